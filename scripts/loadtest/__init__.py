"""The pieces of the load tester `scripts/client_qps.py`, one role per file.

The parent (`coordinator`) forks one process per client (`clients`); both write to memory they share (`ledger`).
What a client sends and when is `wire` and `arrivals`; what came of it is `statistics`, `cpu` and `report`.
"""
