"""Clients of a load test: what they send, when, and over which connection."""
