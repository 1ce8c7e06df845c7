"""What a worker answers: the usual service, or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchpipe_server.front.services import Routes, Served
from torchpipe_server.options import Options

if TYPE_CHECKING:
    from torchpipe_py import pipe
    from torchpipe_py.runtime.admission import Deadlines
    from torchpipe_server.methods.many import Turns
    from torchpipe_server.methods.oip.core import Control, Models

VERSION = "1"  # of the model: a service has one configuration at a time


def served_maker(options: Options, control: Control | None = None) -> Callable[[pipe], Served]:
    """What makes of a pipe what is served: the usual service, or the user's own."""
    if not options.handler:
        return partial(usual_service, options, control=control)
    from torchpipe_server.methods.custom import CustomHandler, load_handler

    cls = load_handler(options.handler)

    def make_own(run: pipe) -> Served:
        limit_delays(run, options)
        handler = CustomHandler(cls, run, options.deadline_ms)
        return Served(handler.methods, Routes(handler.routes, options.monitoring))

    return make_own


def usual_service(options: Options, run: pipe, control: Control | None = None) -> Served:
    """The methods of ``idl/inference.thrift``, ``POST /infer``, and the Open Inference Protocol."""
    from torchpipe_py.idl import load_idl
    from torchpipe_py.runtime.admission import Deadlines
    from torchpipe_py.wire.errors import Bound
    from torchpipe_server.front.services import reply_bound
    from torchpipe_server.methods.http import HttpHandler
    from torchpipe_server.methods.many import Turns
    from torchpipe_server.methods.oip.core import OpenInference
    from torchpipe_server.methods.oip.handler import OipHandler
    from torchpipe_server.methods.oip.requests import InferLimits
    from torchpipe_server.methods.page import PageHandler
    from torchpipe_server.methods.thrift import InferenceHandler

    limit_delays(run, options)
    deadlines, turns = Deadlines(run, options.deadline_ms), Turns(run)
    thrift = InferenceHandler(run, load_idl(), deadlines, options.max_batch, options.max_reply_bytes, turns)
    http = HttpHandler(run, deadlines, options.max_text_bytes, options.max_reply_bytes)
    limits = InferLimits(Bound(options.max_text_bytes, "--max-text-bytes"), options.max_batch)
    models = _models(run, Path(options.config).stem, deadlines, turns)
    core = OpenInference(models, options.max_batch, reply_bound(options.max_reply_bytes), control)
    page = [] if options.no_page else PageHandler(run, models.all(), deadlines, options).routes
    routes = Routes([*http.routes, *OipHandler(core, limits).routes, *page], options.monitoring)
    if options.grpc_port < 0:
        return Served(thrift.methods, routes)
    from torchpipe_server.methods.oip.rpc import OipRpcs

    return Served(thrift.methods, routes, OipRpcs(core, limits).rpcs)


def _models(run: pipe, stem: str, deadlines: Deadlines, turns: Turns) -> Models:
    """Each root that requests may enter; that of a file with one root goes by the file's name, too."""
    from torchpipe_server.methods.oip.core import Model, Models

    roots = [Model(each.name, each.version, run, deadlines, turns, each.node_name) for each in run.models]
    if any(each.root != each.name for each in run.models):
        return Models(roots)
    file = [Model(stem, VERSION, run, deadlines, turns)]
    return Models(roots, file) if len(roots) > 1 else Models(file, roots)


def limit_delays(run: pipe, options: Options) -> None:
    """Have the pipe refuse what waits too long."""
    run.limit_delays(None if options.queue_target_ms < 0 else options.queue_target_ms / 1000)
