"""Connections: from the bytes of clients to calls of methods, and back."""
