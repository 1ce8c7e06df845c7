"""Runs backends, decoders and shared nodes in other processes, with one mechanism for all."""
