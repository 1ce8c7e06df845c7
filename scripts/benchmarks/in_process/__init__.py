"""In one process, without a network: the pipe against bare queues, threads, processes and plain code."""
