"""Load tests: what clients send and when, what they count, and the report of it.

``torchpipe bench`` (``bench``) runs clients as threads on a pipe in this process, ``torchpipe load`` (``command``,
``runs``) as processes against a server. A run is read in this order: ``options``, ``plans`` (what each client sends),
``arrivals`` (when), ``client``, ``records`` (what clients leave), ``measure`` (the rest, and the verdict), ``report``;
``sweep`` makes several runs.
"""
