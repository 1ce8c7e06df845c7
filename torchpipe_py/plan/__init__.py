"""From TOML to a checked, frozen plan: no threads, no heavy imports."""
