"""The pieces of the load tester `scripts/client_qps.py` that are about processes and the wire, one role per file.

The parent (`coordinator`) forks one process per client (`clients`) and starts all at once (`gate`). What a client sends
and when is `wire` and `arrivals`. What came of it is in `torchpipe_py.loadtest`, but for the tester's own `cost`.
"""
