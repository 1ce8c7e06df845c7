"""The messages of workers to the supervisor, which checks them: a worker runs custom code."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta, Struct, to_builtins
from msgspec.json import Decoder

from torchpipe_py.serving import COUNTS, TOTALS, metrics

Figures = dict[str, Any]

# Of a node: current values.
NOW = ("instances", "alive", "queued", "busy")
HISTOGRAMS = ("queue", "batch_wait", "compute")
# Of a worker's requests to engine processes.
HAND_OVER = ("requests", "slot_wait_ms", "there_ms", "in_engine_ms", "back_ms")

_amount = Meta(ge=0, lt=2**62)  # JSON has no NaN
_few = Meta(max_length=4096)
_Number = Annotated[int, _amount] | Annotated[float, _amount]
_Size = Annotated[int, Meta(gt=0, lt=2**31)]
_Histogram = Annotated[list[_Number], Meta(min_length=COUNTS, max_length=COUNTS)]


def _object(keys: dict[str, Any], total: bool = True) -> Any:
    """A JSON object with these keys, all required if ``total``; other keys are dropped."""
    make: Any = TypedDict
    return make("object", keys, total=total)


_list: Any = list  # mypy would read the brackets as a type
_dict: Any = dict

_NODE = _object(
    {
        **dict.fromkeys((*NOW, *TOTALS, "oldest_batch_s"), _Number),
        **{"min": _Size, "max": _Size, "batch_sizes": _dict[_Size, _Number], "instance_compute_ms": _list[_Number]},
        "histograms": _object(dict.fromkeys(HISTOGRAMS, _Histogram)),
    }
)
_COUNTS = Annotated[_dict[str, _Number], _few]
_OF_METHOD = _object({"outcomes": _COUNTS, "latency_ms": _Number, "latency": _Histogram}, total=False)
_REQUESTS = _object({"by_model": Annotated[_dict[str, Annotated[_dict[str, _OF_METHOD], _few]], _few]})
_GPU = _object({"index": _Number, "name": str, "used_bytes": _Number, "total_bytes": _Number})
_text = Annotated[str, Meta(max_length=8192)]
_STREAM_NOW = _object(
    {
        **dict.fromkeys(("state", "source", "last_error"), _text),
        **dict.fromkeys(("silent_s", "waiting", "in_flight", "fps", "age_ms"), _Number),
    },
    total=False,
)
_STREAM = _object(
    {
        **{"decoded": _Number, "reconnects": _Number, "frames": _COUNTS, "now": _STREAM_NOW},
        "age": _object({"counts": _Histogram, "sum_ms": _Number}),
    }
)
_MODEL_COUNTS = _object(
    dict.fromkeys(("success_count", "success_ns", "fail_count", "fail_ns", "items", "admitted", "last_ms"), _Number)
)
# Of custom backends, see ``torchpipe_py.metrics.Family``.
_Value = Annotated[int, Meta(ge=-(2**62), le=2**62)] | Annotated[float, Meta(ge=-(2.0**62), le=2.0**62)]
_Name = Annotated[str, Meta(pattern=rf"^(?!{metrics.RESERVED}){metrics.NAME}\Z", max_length=metrics.MOST_CHARACTERS)]
_Label = Annotated[str, Meta(pattern=rf"^(?!le\Z){metrics.LABEL}\Z", max_length=metrics.MOST_CHARACTERS)]
_Labels = Annotated[list[_Label], Meta(max_length=metrics.MOST_LABELS)]
_Help = Annotated[str, Meta(max_length=metrics.MOST_TEXT)]
_LabelValue = Annotated[str, Meta(max_length=metrics.MOST_CHARACTERS)]
_samples = Meta(max_length=metrics.MOST_LABEL_SETS + 1)


class _Sample(Struct):
    labels: dict[str, _LabelValue]
    value: _Value


class _Counts(Struct):
    labels: dict[str, _LabelValue]
    counts: list[_Number]
    sum: _Value


class _Family(Struct, tag_field="kind"):
    help: _Help
    labels: _Labels
    samples: Annotated[list[_Sample], _samples]

    def __post_init__(self) -> None:
        for sample in self.samples:
            if list(sample.labels) != self.labels:
                raise ValueError("a sample has other labels than its metric")


class _CounterFamily(_Family, tag="counter"):
    pass


class _GaugeFamily(_Family, tag="gauge"):
    pass


class _HistogramFamily(_Family, tag="histogram"):
    samples: Annotated[list[_Counts], _samples]  # type: ignore[assignment]
    bounds: Annotated[list[_Value], Meta(min_length=1, max_length=metrics.MOST_BUCKETS)]

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = {len(sample.counts) for sample in self.samples}
        if self.bounds != sorted(set(self.bounds)) or counts - {len(self.bounds) + 1}:
            raise ValueError("a histogram's bounds do not ascend, or are not those of its counts")


_METRICS = Annotated[
    dict[_Name, _CounterFamily | _GaugeFamily | _HistogramFamily], Meta(max_length=metrics.MOST_METRICS)
]

_STATS = _object(
    {
        **{"inflight": _Number, "requests": _REQUESTS, "nodes": Annotated[_dict[str, _NODE], _few]},
        "hand_over": _object(dict.fromkeys(HAND_OVER, _Number), total=False),
        **{"log_lines_dropped": _Number, "gpus": _list[_GPU], "streams": Annotated[_dict[str, _STREAM], _few]},
        "models": Annotated[_dict[str, _MODEL_COUNTS], _few],
        "metrics": _METRICS,
    }
)


class Ready(Struct, tag="ready"):
    """The worker takes connections; ``graph`` is the pipeline as SVG.

    ``problems`` says why models of a folder are not served, by ``NAME/VERSION``.
    """

    graph: str
    problems: Annotated[dict[str, str], _few] = {}


class Prepared(Struct, tag="prepared"):
    """A model is set up, or why not; ``graph`` is that of the models that will be served.

    ``change`` is the number that the request had.
    """

    change: Annotated[int, _amount]
    problem: str
    graph: str


class Committed(Struct, tag="committed"):
    """The prepared model is served, or the reason why not."""

    change: Annotated[int, _amount]
    problem: str


class Listening(Struct, tag="listening"):
    """The worker takes connections at the port of gRPC, as requested."""


class Failed(Struct, tag="failed"):
    """The process cannot start."""

    message: str


class Gone(Struct, tag="gone"):
    """The worker no longer serves a connection: it is closed, or another process is to serve it."""

    slot: int
    is_closed: bool


class Control(Struct, tag="control"):
    """A client's request to load or unload a model, to list all, or for all statistics.

    The outcome is sent with the same ``id``.
    """

    id: Annotated[int, Meta(ge=0, lt=2**62)]
    action: Literal["load", "unload", "index", "statistics"]
    name: Annotated[str, Meta(max_length=200)]


class Stats(Struct, tag="stats"):
    """The statistics that the supervisor requested."""

    stats: _STATS  # type: ignore[valid-type]


class End(Struct, tag="end"):
    """The process ends; ``answered``: with every accepted request answered."""

    answered: bool
    stats: _STATS  # type: ignore[valid-type]


class Event(Struct, tag="event"):
    """The result of a frame as a line of JSON; ``missed`` events before it were dropped."""

    stream: str
    data: Annotated[str, Meta(max_length=2**17, pattern=r"^[^\r\n]*\Z")]
    missed: Annotated[int, _amount]


class Snapshot(Struct, tag="snapshot"):
    """The last frame of a stream as JPEG, or why there is none."""

    stream: str
    jpeg: bytes
    problem: _text


Message = Ready | Prepared | Committed | Listening | Failed | Gone | Control | Stats | End | Event | Snapshot

_decoder = Decoder(Message)


def parse_message(data: bytes) -> Message:
    """A worker's message. Workers read hostile bytes: ``ValueError`` or ``RecursionError`` if it is invalid."""
    message: Message = _decoder.decode(data)
    if isinstance(message, (Stats, End)):
        stats: Figures = message.stats  # type: ignore[assignment]
        stats["metrics"] = to_builtins(stats["metrics"])
    return message
