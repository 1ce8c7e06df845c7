"""``torchpipe parity``: compares the results of two configurations on the same images, by pixels or classes."""
