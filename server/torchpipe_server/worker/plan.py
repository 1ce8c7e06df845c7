"""What of the configuration and the options a process runs: its plan, and how many engine processes there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchpipe_server.options import Options

if TYPE_CHECKING:
    from torchpipe_py.plan.build import Pipeline


def make_plan(options: Options, tables: Any, processes: int) -> Pipeline:
    """The plan of the configuration for one of so many processes that run it.

    What the options say otherwise is written into ``tables``.
    """
    from torchpipe_py.plan.build import plan_pipeline
    from torchpipe_py.plan.folder import Folder

    for each in tables.values() if isinstance(tables, Folder) else [tables]:
        if options.max_inflight:
            each["global"]["max_inflight"] = options.max_inflight
        if options.decode_isolation != "config":
            for table in each.values():
                table.pop("decode_isolation", None)
            each["global"]["decode_isolation"] = options.decode_isolation
    return plan_pipeline(tables, processes=processes)


def has_engine(options: Options, tables: Any) -> bool:
    """Whether an engine process runs the shared nodes of the configuration."""
    from torchpipe_py.plan.sharing import shared_nodes

    return options.workers > 1 and bool(shared_nodes(tables))


def engine_processes(options: Options, tables: Any) -> int:
    """How many run the shared nodes, if there are any: no more than workers."""
    from torchpipe_py.plan.sharing import decodes_on_gpu

    each = options.engines or (2 if decodes_on_gpu(tables) else 1)
    return min(each * max(1, len(options.device_numbers)), options.workers)
