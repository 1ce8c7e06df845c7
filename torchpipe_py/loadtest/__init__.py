"""Load tests: what one sends, counts and reports, whatever its clients are.

``torchpipe bench`` (``command``) runs clients as ``threads`` on a pipe in this process, ``scripts/client_qps.py`` as
processes against a server. What a client has to do is its plan (``plans``), what it did its ``ledger``; ``statistics``,
``cpu``, ``nodes`` and ``report`` make figures of that.
"""
