"""Backends that compute nothing themselves: they pass on, chain, choose, jump."""
