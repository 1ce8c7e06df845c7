"""``torchpipe from-triton``: converts a model repository of Triton to TOML files, and lists unsupported settings."""
