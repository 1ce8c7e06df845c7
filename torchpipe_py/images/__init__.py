"""Image files: where they are, and what their headers say before a decoder reads them."""
