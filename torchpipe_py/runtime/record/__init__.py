"""Records of requests and batches: statistics, visits, traces, spans."""
