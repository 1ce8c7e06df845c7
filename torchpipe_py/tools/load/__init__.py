"""``torchpipe load`` and ``bench``: send images to a service, or to a pipe in this process, and report what comes back.

A run reads in this order: ``arrivals`` (what clients send and when), ``client`` (who sends it), ``records`` (what they
leave), ``wire`` (the bytes of a service), ``measure`` (processors, GPUs, nodes), ``judge`` (percentiles, the verdict),
``report``; ``run`` has the commands.
"""
