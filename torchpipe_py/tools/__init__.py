"""The tools behind ``torchpipe load``, ``bench``, ``parity``, ``export``, ``quantize`` and ``graph``.

They share ``report`` (tables, pages, charts and files) and ``options`` (the flags of all of them).
"""
