"""Decoders in expendable processes: what their native code does to itself costs the image that it decodes."""
