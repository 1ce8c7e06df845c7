"""What goes wrong around a service, done to it on purpose: kills, reloads, floods, garbage, and judges of what it did.

``scenarios`` runs one event against ``service.Service`` and returns a ``Report``. The tests run each in its short form,
``python scripts/soak.py`` in its long one.
"""
