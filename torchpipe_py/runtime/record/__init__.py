"""What is recorded of requests and batches: figures, visits, traces, spans."""
