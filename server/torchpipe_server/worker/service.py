"""The plan that a process runs, and the standard service or a custom one on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchpipe_py import ConfigError
from torchpipe_py.serving import (
    Bound,
    CertifiedTables,
    Folder,
    Routes,
    Served,
    load_idl,
    plan_pipeline,
    shared_nodes,
    usual_engines,
)
from torchpipe_server.options import Options

if TYPE_CHECKING:
    from torchpipe_py import pipe
    from torchpipe_py.serving import Control, Pipeline, Totals


def make_plan(options: Options, tables: Any, processes: int) -> Pipeline:
    """The plan of the configuration, run by ``processes`` processes; options that override it change ``tables``."""
    for each in tables.values() if isinstance(tables, Folder) else [tables]:
        if options.max_inflight:
            each["global"]["max_inflight"] = options.max_inflight
        if options.decode_isolation != "config":
            for table in each.values():
                table.pop("decode_isolation", None)
            each["global"]["decode_isolation"] = options.decode_isolation
    plan = plan_pipeline(tables, processes=processes)
    return tables.checking(plan) if isinstance(tables, CertifiedTables) else plan


def has_engine(options: Options, tables: Any) -> bool:
    """Whether an engine process runs the shared nodes of the configuration."""
    return options.workers > 1 and bool(shared_nodes(tables))


def engine_processes(options: Options, tables: Any) -> int:
    """The number of engine processes, if there are shared nodes: at most one per worker."""
    each = options.engines or usual_engines(tables)
    return min(each * max(1, len(options.device_numbers)), options.workers)


def served_maker(
    options: Options, control: Control | None = None, totals: Totals | None = None
) -> Callable[[pipe], Served]:
    """A function that makes the served methods on a pipe, perhaps with those of a custom handler."""
    if not options.handler:
        return partial(usual_service, options, control=control, totals=totals)
    from torchpipe_server.methods.custom import CustomHandler, load_handler

    cls = load_handler(options.handler)
    if options.grpc_port >= 0 and not getattr(cls, "standard_routes", True):
        raise ConfigError(f"--grpc-port serves standard paths, and {options.handler} has standard_routes = False")

    def make_custom(run: pipe) -> Served:
        handler = CustomHandler(cls, run, options.deadline_ms)
        if handler.is_alone:
            limit_delays(run, options)
            return Served(handler.methods, Routes(handler.routes, options.elsewhere))
        usual = usual_service(options, run, control, totals)
        routes = usual.routes.with_own(handler.routes)
        return usual._replace(methods=handler.methods or usual.methods, routes=routes)

    return make_custom


def usual_service(options: Options, run: pipe, control: Control | None = None, totals: Totals | None = None) -> Served:
    """The methods of ``idl/inference.thrift``, ``POST /infer``, and the Open Inference Protocol."""
    from torchpipe_py.serving import Inference
    from torchpipe_server.front.services import reply_bound
    from torchpipe_server.methods.page import PageHandler
    from torchpipe_server.methods.thrift import InferenceHandler

    limit_delays(run, options)
    text, reply = Bound(options.max_text_bytes, "--max-text-bytes"), reply_bound(options.max_reply_bytes)
    stem = Path(options.config).stem
    usual = Inference(
        run,
        stem,
        options.deadline_ms,
        options.max_batch,
        text,
        reply,
        control,
        options.repository_control,
        totals,
        options.forward_headers,
    )
    thrift = InferenceHandler(
        run, load_idl(), usual.deadlines, options.max_batch, options.max_reply_bytes, usual.admission, usual.roots,
        text, usual.headers,
    )  # fmt: skip
    page = [] if options.no_page else PageHandler(run, usual.roots, usual.models, usual.deadlines, options).routes
    routes = Routes([*usual.routes, *page], options.elsewhere)
    return Served(thrift.methods, routes, () if options.grpc_port < 0 else usual.rpcs(), usual.models.figures)


def limit_delays(run: pipe, options: Options) -> None:
    """Have the pipe refuse requests that wait too long."""
    run.limit_delays(None if options.queue_target_ms < 0 else options.queue_target_ms / 1000)
