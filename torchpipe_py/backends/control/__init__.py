"""Backends for control flow: they pass data on, chain or choose backends, or jump to other graphs."""
