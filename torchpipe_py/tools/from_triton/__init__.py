"""``torchpipe from-triton``: from a model repository of Triton to TOML files, and a list of what has no place there."""
