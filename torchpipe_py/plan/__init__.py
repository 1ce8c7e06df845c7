"""Turns TOML into a checked, frozen plan, without threads or heavy imports."""
