"""``torchpipe parity``: what two configurations make of the same images, pixel by pixel or class by class."""
