"""What goes wrong around a service, done to it on purpose: kills, reloads, floods, garbage, and judges of what it did.

``scenarios`` runs one event against ``service.Service`` and returns a ``report.Report``; ``judges`` are pure. The tests
run each in its short form, ``python scripts/soak.py`` in its long one, and both against planted ``faults`` as well.
"""
