"""Nodes: queues of requests, instances that run their backends, and who wakes whom."""
