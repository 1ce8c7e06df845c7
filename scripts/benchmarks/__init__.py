"""Benchmarks: each prints the limit, the baselines and the pipe side by side, from one run, as medians."""
