"""``torchpipe parity``: what two preprocessing configurations make of the same images, pixel by pixel and by class."""
