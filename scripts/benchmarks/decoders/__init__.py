"""JPEG decoders side by side."""
