"""``torchpipe load`` and ``bench``: send images to a service, or to a pipe in this process, and report the results.

Read in this order: ``arrivals`` (the plan), ``client`` (sends it), ``records`` (of each call), ``wire``
(the bytes of a service), ``measure`` (processors, GPUs, nodes), ``judge`` (percentiles, the verdict), ``report``;
``run`` has the commands.
"""
