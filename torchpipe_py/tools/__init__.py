"""The commands of ``torchpipe``, such as ``load``, ``export`` and ``graph``.

They share ``report`` (tables, pages, charts and files) and ``options`` (the flags of all of them).
"""
