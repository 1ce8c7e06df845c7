"""Put on ``PYTHONPATH`` of a service, to look into its processes: ``sitecustomize.py`` says how."""
