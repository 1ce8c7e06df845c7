"""The pieces of the load tester `scripts/client_qps.py`, one role per file.

A run (`runs`): the parent (`coordinator`) forks one process per client (`clients`) and starts all at once (`gate`).
What a client sends is `wire` on a `connection`, and when is `arrivals`, from the `schedules` of its `loads`, which may
be a `replay`. Several runs are `campaigns`: `sweeps`, or a `search`.

What came of it is in `torchpipe_py.loadtest`, but for the single calls (`records`) and what they say: `series`,
`lateness`, `stability`, the tester's own `cost`, the `gpu`s. `verdict` judges; `tables`, `spreadsheet` and `page`, with
its `plots` made of `charts` on `axes`, show; `compare` reads two reports again.
"""
