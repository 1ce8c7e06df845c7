"""Every rule of the configuration language and of the run-time semantics, a row for each.

``RULES`` is the map of the language; what no row can hold (identity of dicts, batches, races, closing) follows it.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import Register
from kit.backends import Gate
from kit.waits import WAIT, error_of, eventually, in_threads, outcome, wait_queued

from torchpipe_py import (
    Backend,
    BackendError,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ItemBackend,
    Jump,
    NoResult,
    Param,
    PipeClosed,
    Registry,
    SetupError,
    Status,
    UnknownNode,
    parse_toml,
    pipe,
    registry,
)
from torchpipe_py.values import to_floats, to_int

Data = dict[str, Any]


# -- what the rows are made of --------------------------------------------------------------------------------------


class Mark(ItemBackend):
    """Appends its mark, so that a result tells its way; ``-`` at the end gives no result, ``!`` raises."""

    mark = Param(str, "+", doc="what to append")

    def forward_item(self, item: Data) -> None:
        if str(item["data"]).endswith("!"):
            raise ValueError(f"bad item {item['data']}")
        if not str(item["data"]).endswith("-"):
            item["result"] = f"{item['data']}{self.mark}"


class Returns(ItemBackend):
    """Returns its result in place of writing it; with ``-`` at the end of the data nothing."""

    def forward_item(self, item: Data) -> Any:
        return None if item["data"].endswith("-") else item["data"]


class ReturnsAll(Backend):
    """The same for a batch."""

    def forward(self, items: list[Data]) -> Any:
        return [item["data"] for item in items]


class ReturnsMany(ReturnsAll):
    """The same, where batches have several items."""

    max = min = lambda self: 2


class Keys(ItemBackend):
    """The keys that it finds."""

    def forward_item(self, item: Data) -> None:
        item["result"] = " ".join(sorted(item))


class Sum(ItemBackend):
    """data + k."""

    def forward_item(self, item: Data) -> None:
        item["result"] = item["data"] + item["k"]


class Typed(ItemBackend):
    """What it was configured with."""

    number = Param(to_int, 1, doc="an integer")
    numbers = Param(to_floats, (), doc="numbers")

    def forward_item(self, item: Data) -> None:
        item["result"] = (self.number, *self.numbers)


class Most(Mark):
    """Its batch range comes from the configuration."""

    most = Param(to_int, 1, key="max", doc="largest batch")
    least = Param(to_int, 1, key="min", doc="smallest batch")

    def max(self) -> int:
        return int(self.most)

    def min(self) -> int:
        return int(self.least)


class Words(Jump):
    """Each word by itself."""

    def split(self, data: Data) -> Sequence[Data]:
        return [{"data": word} for word in data["data"].split()]

    def merge(self, data: Data, parts: Sequence[Data]) -> None:
        data["result"] = " ".join(part.get("result", "?") for part in parts)


class AnyKeys:
    """A class that takes any parameter; init and forward are all it needs."""

    def init(self, config: Data) -> None:
        self.config = config

    def forward(self, items: list[Data]) -> None:
        for item in items:
            item["result"] = self.config["anything"]


def upper(data: Data) -> Status:
    """A filter that changes the dict."""
    data["data"] = data.pop("result").upper()
    return Status.Run


class Second:
    """A filter with a state: each place that names it has its own."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, data: Data) -> Status:
        self.calls += 1
        return Status.Run if self.calls % 2 else Status.Skip


class Above:
    """Runs on numbers above its bound only, as a class that is configured."""

    bound: float = 0.0

    def forward(self, data: Data) -> Status:
        data["data"] = data.pop("result", data["data"])
        return Status.Run if len(data["data"]) > self.bound else Status.Break


class Passes:
    """Runs on what it was told to, as a class that takes every key of its node."""

    def init(self, config: Data) -> None:
        self.word = config["word"]

    def forward(self, data: Data) -> Status:
        return Status.Run if data["data"] == self.word else Status.Skip


def no_status(data: Data) -> None:
    """Gives no Status."""


def raising(data: Data) -> Status:
    raise KeyError("on purpose")


@pytest.fixture(autouse=True)
def registered(restored: Registry) -> None:
    """The names that the rows use, for this test alone."""
    for cls in (Mark, Keys, Sum, Typed, Most, Words, Returns, ReturnsAll, ReturnsMany, AnyKeys):
        restored.register_backend(cls)
    for filter_ in (upper, Second, Above, Passes, no_status, raising):
        restored.register_filter(filter_)


# -- the table ------------------------------------------------------------------------------------------------------

GONE = object()
"""The outcome of a key that is not in the dict any more."""


class Rule(NamedTuple):
    """``outcome``: what ``request`` becomes with ``config``; keys that it does not name are as they were."""

    text: str
    config: Data
    outcome: Data
    request: Data = {"data": "x"}  # noqa: RUF012


def mark(text: str, next: str = "", **keys: Any) -> Data:
    return {"backend": "Mark", "mark": text, **({"next": next} if next else {}), **keys}


def chain(filter_: str) -> Data:
    """a, then b behind the filter, then c."""
    return {"a": mark("1", "b"), "b": mark("2", "c", filter=filter_), "c": mark("3")}


def sequence(filter_: str) -> Data:
    """The same as one node, and another node behind it."""
    return {"s": {"backend": f"S[Mark,({filter_})Mark,Mark]", "mark": "1|2|3", "next": "d"}, "d": mark("4")}


def diamond(join: str, **keys: Any) -> Data:
    """r to b and c, both to j; c stands first in ``next``, b in the file."""
    return {"r": mark("r", "c,b"), "b": mark("b", "j"), "c": mark("c", "j"), "j": mark("j", map=join, **keys)}


def jump(backend: str, **keys: Any) -> Data:
    return {"a": {"backend": backend, "jump": "r", **keys}, "r": mark("r")}


def at_a(data: Any, **more: Any) -> Data:
    return {"data": data, "node_name": "a", **more}


X = {"data": "x"}

CONFIGURATION = [
    Rule(
        "§3: top-level scalars are defaults",
        {"mark": "1", "a": {"backend": "Mark", "next": "b"}, "b": mark("2")},
        {"data": "x1", "result": "x12"},
    ),
    Rule("§3: 'global' in a dict of dicts", {"global": {"mark": "1"}, "a": {"backend": "Mark"}}, {"result": "x1"}),
    Rule(
        "§3: a backend at the top level is that of each node that names none",
        {"backend": "Mark", "a": {"next": "b"}, "b": {"backend": "Mark", "Mark::mark": "b"}},
        {"data": "x+", "result": "x+b"},
    ),
    Rule(
        "§3: or = true is filter = 'or', as in the C++ library",
        {
            "a": {"backend": "Mark", "next": "b"},
            "b": {"backend": "Typed", "or": True, "next": "c"},
            "c": mark("c", **{"or": "false"}),
        },
        {"data": "x+", "result": "x+c"},
    ),
    Rule(
        "§3: the constants' names mean the keys, in a map",
        {"a": mark("a", "b"), "b": mark("b", map="a[ TASK_RESULT_KEY :TASK_DATA_KEY,TASK_DATA_KEY:TASK_BOX_KEY]")},
        {"data": "xa", "box": "x", "result": "xab"},
    ),
    Rule(
        "§3: the constants' names mean the keys, in split and merge",
        {**jump("MapReduce", split="data,TASK_BOX_KEY", merge="TASK_RESULT_KEY, TASK_BOX_KEY")},
        {"data": ["x", "y"], "box": [1, 2], "result": ["xr", "yr"]},
        at_a(["x", "y"], box=[1, 2]),
    ),
    Rule("§3: a flat dict is one node", mark("1"), {"result": "x1"}),
    Rule("§3: 224 means the same as '224'", {"backend": "Typed", "number": 224}, {"result": (224,)}),
    Rule("§3: lists", {"backend": "Typed", "numbers": [123.675, "116.28", 103]}, {"result": (1, 123.675, 116.28, 103)}),
    Rule("§3: commas", {"backend": "Typed", "numbers": "123.675, 116.28, 103"}, {"result": (1, 123.675, 116.28, 103)}),
    Rule("§3 backend", {"a": {"next": "b"}, "b": {"backend": "SyncTensor[S[Identity, Mark]]"}}, {"result": "x+"}),
    Rule("§3 backend: (filter)expr inside a list", {"backend": "S[Mark,(run)Mark]"}, {"result": "x+"}),
    Rule("§3 next", {"a": mark("a", "b, c"), "b": mark("b"), "c": mark("c")}, {"data": "xa", "result": "xac"}),
    Rule("§3 filter: what to do on entry", {"a": mark("a", filter="run")}, {"result": "xa"}),
    Rule("§3 max, min of a backend", {"backend": "Most", "max": "4", "min": 2}, {"result": "x+"}),
    Rule("§3: scoped", {"backend": "S[Mark,Typed]", "mark": "1", "Typed::number": 2}, {"data": "x1", "result": (2,)}),
    Rule("§3: A::backend = B", {"backend": "SyncTensor", "SyncTensor::backend": "Mark", "mark": "1"}, {"result": "x1"}),
    Rule("§3: S is Sequential", {"backend": "S", "Sequential::backend": "Mark,Mark"}, {"data": "x+", "result": "x++"}),
    Rule("§3: per position", {"backend": "S[Mark,Identity,Mark]", "mark": "1|2"}, {"data": "x1", "result": "x12"}),
    Rule("§3: a&b composes several instances into one", {"backend": "Most&Most", "max": "1&4"}, {"result": "x+"}),
    Rule("§3: instance_num composes", {"backend": "Most&Most", "max": "1&4", "instance_num": "1&2"}, {"result": "x+"}),
    Rule("§3: & stands at the top only", {"backend": "Mark&Mark"}, {"result": "x+"}),
    Rule(
        "§3: name.alias is a logical node",
        {"rec": mark("r", "mid"), "mid": mark("m", "rec.2"), "rec.2": {"map": "mid[result:data]"}},
        {"data": "xrm", "result": "xrmr"},
    ),
    Rule(
        "§3: of logical nodes",
        {"rec": mark("r", "rec.2"), "rec.2": {"backend": "Typed"}},
        {"data": "xr", "result": "xrr"},
    ),
    Rule(
        "§3: a logical node needs its physical node",
        {"rec": mark("r", "rec.a"), "rec.a": {"backend": "Mark", "next": "rec.b"}, "rec.b": {}},
        {"data": "xrr", "result": "xrrr"},
    ),
    Rule(
        "§3: default scheduler names are accepted and ignored",
        {"Interpreter::backend": "PipelineV3", "PipelineV3::backend": "BaselineSchedule", "a": mark("1")},
        {"result": "x1"},
    ),
    Rule("§3: any keys", {"backend": "AnyKeys", "anything": [1, 2]}, {"result": [1, 2]}),
]
CONFIGURATION_REFUSED = [
    ({"marc": "1", "a": {"backend": "Mark"}}, "global: marc", "no node takes it; did you mean 'mark'?"),
    ({"global": {"next": "a"}, "a": {}}, "global: next", "belongs into a node's table"),
    ({"backend": "Marc", "a": {}}, "global: backend", "no backend 'Marc'; did you mean 'Mark'?"),
    ({"a": {"next": "b"}, "b": {"or": True, "filter": "swap"}}, "b: or", "the node has filter = 'swap' as well"),
    ({"a": {"next": "b"}, "b": {"map": "a[TASK_REPLY_KEY:data]"}}, "b: map", "no key 'TASK_REPLY_KEY'; did you mean '"),
    (jump("MapReduce", split="TASK_BOKS_KEY"), "a: split", "no key 'TASK_BOKS_KEY'; did you mean 'TASK_BOX_KEY'?"),
    ({}, "", "no table or key in it"),
    ({"backend": "Typed", "number": 2.5}, "node: number", "expected an integer, got 2.5"),
    ({"backend": "Typed", "number": [1]}, "node: number", "expected an integer, got [1]"),
    ({"backend": "Typed", "numbers": "1, x"}, "node: numbers", "expected a finite number, got 'x'"),
    ({"backend": "SyncTensor[S[Identity, Marc]]"}, "node: backend", "no backend 'Marc'; did you mean 'Mark'?"),
    ({"backend": "FirstAvailable[(or)Mark]"}, "node: backend", "(or)Mark: filters stand only inside Sequential"),
    ({"a": mark("a", "b, cc"), "b": {}, "c": {}}, "a: next", "no node 'cc'; did you mean 'c'?"),
    ({"a": mark("a", "b,b"), "b": {}}, "a: next", "names 'b' twice"),
    ({"a": {"next": "b"}, "b": {"next": "a"}}, "b: next", "a cycle: a -> b -> a"),
    ({"a": {"filter": "serialskop"}}, "a: filter", "no filter 'serialskop'; did you mean 'serialskip'?"),
    ({"backend": "Mark", "max": 4}, "node: max", "no backend of this node takes a batch range"),
    ({"backend": "S[Mark,Typed]", "Typed::nummer": 2}, "node: Typed::nummer", "unknown key; did you mean 'Typed::numb"),
    ({"backend": "SyncTensor", "SyncTensor::backend": "Marc"}, "node: backend", "no backend 'Marc'; did you mean 'Mar"),
    ({"backend": "S"}, "node: backend", "S needs a backend in brackets"),
    ({"backend": "S[Mark,Mark,Mark]", "mark": "1|2"}, "node: mark", "'1|2' has 2 values, Mark occurs 3 times"),
    ({"backend": "Most&Most", "max": "1&4&8"}, "node: max", "'1&4&8' has 3 parts, backend has 2"),
    (
        {"backend": "Most&Most", "max": "1&4", "instance_num": "1&1&2"},
        "node: instance_num",
        "'1&1&2' has 3 parts, backend has 2",
    ),
    ({"backend": "S[Mark&Mark]"}, "node: backend", "expected ']', found '&'"),
    ({"backend": "Most", "min": "1&1&1", "max": "2&3"}, "node", "key 'm"),
    ({"backend": "Range[Most]", "range": "8-19"}, "node: range", 'expected "min,max" with 1 <= min <= max, got '),
    ({"rec": mark("r", "rec.2"), "rec.2": {"instance_num": 2}}, "rec.2: instance_num", "shares the instances of 'rec'"),
    ({"rac": mark("r"), "rec.2": {}}, "rec.2", "a logical node (name.alias) of 'rec', which is missing, or is a tab"),
    ({"PipelineV3::backend": "Mine", "a": mark("1")}, "global: PipelineV3::backend", "the scheduler is not exchangeab"),
    ({"backend": "Keys", "anything": [1, 2]}, "node: anything", "unknown key"),
]

_IGNORED = "return values are ignored: write item['result'] instead"

DATA = [
    Rule("§4 data: data in, result out, other keys free", mark("1"), {"result": "x1"}, {"data": "x", "mine": 1}),
    Rule("§4 node_name", {"one": mark("1"), "two": mark("2")}, {"result": "x2"}, {"data": "x", "node_name": "two"}),
    Rule(
        "§4 data: no result means there is none, and error says why",
        {"a": mark("1", "b"), "b": mark("2")},
        {"error": "node 'a': Mark gave no result"},
        {"data": "x-"},
    ),
    Rule(
        "§4 data: results never leak from an earlier call",
        mark("1"),
        {"result": GONE, "error": "node 'node': Mark gave no result"},
        {"data": "x-", "result": "stale", "error": "stale"},
    ),
    Rule(
        "§4 data: a backend that returns None, but no result",
        {"backend": "Returns"},
        {"error": "node 'node': Returns gave no result"},
        {"data": "x-"},
    ),
    Rule(
        "§4 data: nor through a graph with branches",
        diamond("b[result:data],c[result:other]", filter="swap"),
        {
            "data": "xrb",
            "other": "xrc",
            "result": GONE,
            "error": "a filter ended the request before any backend gave a result",
        },
        {"data": "x", "result": "stale", "error": "stale"},
    ),
]
DATA += [
    Rule(
        f"§4 data: what forward returns is ignored, and the error says so: {backend}",
        {"backend": backend},
        {"error": error, "result": GONE},
    )
    for backend, error in (
        ("Returns", f"Returns returned a value (str); {_IGNORED}"),
        ("S[Identity,Returns,Mark]", f"Returns returned a value (str); {_IGNORED}"),
        ("ReturnsAll", f"ReturnsAll returned a value (list); {_IGNORED}"),
        ("S[ReturnsAll,Mark]", f"ReturnsAll returned a value (list); {_IGNORED}"),
        ("ReturnsMany", f"ReturnsMany returned a value (list); {_IGNORED}"),
        ("S[Identity,ReturnsMany]", f"ReturnsMany returned a value (list); {_IGNORED}"),
    )
]
DATA_RAISES = [
    *(
        ({"one": mark("1"), "two": mark("2", "three"), "three": mark("3")}, {**X, **given}, UnknownNode, problem)
        for given, problem in (
            ({}, "'node_name' must name one of the roots: one, two"),
            ({"node_name": None}, "'node_name' must name one of the roots: one, two"),
            ({"node_name": "too"}, "'node_name': no root 'too'; did you mean 'two'?"),
            ({"node_name": "three"}, "'node_name': no root 'three'"),
            ({"node_name": 7}, "'node_name': no root 7"),
        )
    ),
    (mark("1"), [{"data": "x"}, {"data": "x!"}], BackendError, "node 'node': Mark: ValueError: bad item x!"),
    ({"a": mark("1", "b"), "b": mark("2")}, {"data": "x!"}, RuntimeError, "node 'a': Mark: ValueError: bad item x!"),
]

# For each filter of b in a, b, c: the data and the result at the end; the result of the same as one Sequential,
# and another node behind it.
_FILTERS: list[tuple[str, str, str, str]] = [
    ("Run", "x2", "x23", "x234"),
    ("continue", "x2", "x23", "x234"),
    ("Skip", "x1", "x13", "x134"),
    ("SerialSkip", "x", "x1", "x14"),
    ("serial_skip", "x", "x1", "x14"),
    ("SubGraphSkip", "x", "x1", "x14"),
    ("subgraph_skip", "x", "x1", "x14"),
    ("Break", "x", "x1", "x14"),
    ("swap", "x12", "x123", "x1234"),
    ("or", "x1", "x13", "x134"),
    ("upper", "X12", "X123", "X1234"),
    ("Python[upper]", "X12", "X123", "X1234"),
    ("Second", "x2", "x23", "x234"),
]
_BAD_FILTERS = [
    (
        "Error",
        "node 'b': its filter returned Status.Error",
        "BackendError: the filter before Mark returned Status.Error",
    ),
    (
        "no_status",
        "node 'b': its filter returned None, not a Status",
        "BackendError: the filter before Mark returned None, not a Status",
    ),
    ("raising", "node 'b': its filter: KeyError: 'on purpose'", "KeyError: 'on purpose'"),
]


def _spellings(name: str) -> list[str]:
    is_built_in = name.lower() in registry.default.filter_names() or name.lower() in ("continue", "serial_skip")
    return list(dict.fromkeys([name, *([name.lower(), name.upper()] if is_built_in else [])]))


FILTERS = [
    *(
        Rule(f"§4 filters, at a node: {spelled}", chain(spelled), {"data": data, "result": result})
        for name, data, result, _ in _FILTERS
        for spelled in _spellings(name)
    ),
    *(
        Rule(
            f"§4 filters, inside Sequential, where the skips end the sequence: {spelled}",
            sequence(spelled),
            {"data": result[:-1], "result": result},
        )
        for name, _, _, result in _FILTERS
        for spelled in _spellings(name)
    ),
    Rule(
        "§4 filters: a class that annotates its parameters has them, from the node or scoped",
        {"a": mark("a", "b"), "b": mark("b", filter="Above", bound="1", next="c"), "c": mark("c", filter="Above")},
        {"data": "xab", "result": "xabc"},
    ),
    Rule(
        "§4 filters: a class that is configured, inside Sequential",
        {"backend": "S[Mark,(Above)Mark,(Python[Above])Mark]", "mark": "1|2|3", "Above::bound": 2},
        {"data": "x1", "error": "node 'node': S[Mark,(Above)Mark,(Python[Above])Mark] gave no result"},
    ),
    Rule(
        "§4 filters: a class with init gets the keys of its node",
        {
            "a": mark("a", "b"),
            "b": mark("b", filter="Passes", word="no", next="a.2"),
            "a.2": {"filter": "Passes", "word": "x"},
        },
        {"data": "x", "result": "xa"},
    ),
    Rule(
        "§4 swap: no result is Break",
        {"a": mark("1", "b"), "b": mark("2", filter="swap")},
        {"error": "node 'a': Mark gave no result"},
        {"data": "x-"},
    ),
    Rule(
        "§4 or: no result is Run",
        {"a": {"backend": "Mark", "next": "b"}, "b": {"backend": "Typed", "filter": "or"}},
        {"result": (1,)},
        {"data": "x-"},
    ),
    Rule(
        "§4 or: a result of an earlier call is none",
        mark("1", filter="or"),
        {"result": "x1", "error": GONE},
        {"data": "x", "result": "stale", "error": "stale"},
    ),
    Rule("§4 or: inside Sequential", {"backend": "S[Mark,(or)Keys]"}, {"result": "data"}, {"data": "x-"}),
    Rule(
        "§4 swap: inside Sequential, where no result ends the sequence",
        {"backend": "S[Mark,Mark]"},
        {"error": "node 'node': S[Mark,Mark] gave no result"},
        {"data": "x-"},
    ),
    *(
        Rule(
            f"§4 filters: the result of the node before is not that of {backend} behind {name}",
            {"a": {"next": "b"}, "b": {"backend": backend, "filter": name}},
            {"result": GONE, "error": f"node 'b': {backend} gave no result"},
            {"data": "x-"},
        )
        for backend in ("Mark", "S[Identity,Mark]", "S[Identity,(run)Mark]", "SyncTensor[Mark]")
        for name in ("swap", "run")
    ),
    Rule(
        "§4 Break ends the whole request, whatever other branches do",
        diamond("b[result:data]") | {"b": mark("b", "j", filter="break")},
        {"result": "xr"},
        {"data": "x", "mine": 1},
    ),
    Rule("§4 filters: Run with a map", {"a": mark("1", "b"), "b": mark("2", map="a[data:data]")}, {"result": "x2"}),
    Rule(
        "§4 SerialSkip ends before a node that waits for several",
        diamond("b[result:data],c[result:other]") | {"b": mark("b", "j", filter="serialskip")},
        {"data": "xr", "other": "xrc", "result": "xrj"},
    ),
    Rule(
        "§4 SerialSkip ends at a fork",
        {"r": mark("r", "b", filter="serialskip"), "b": mark("b", "c,d"), "c": mark("c"), "d": mark("d")},
        {"error": "a filter ended the request before any backend gave a result"},
    ),
    Rule(
        "§4: the example of torchpipe's documentation, SubGraphSkip at a_1 and SerialSkip at b_1",
        {
            "r_1": mark("r", "a_1,b_1"),
            "a_1": mark("a", "a_2_1,a_2_2", filter="SubGraphSkip"),
            "a_2_1": mark("b", "r_2"),
            "a_2_2": mark("c", "r_2"),
            "b_1": mark("d", "b_2", filter="SerialSkip"),
            "b_2": mark("e", "r_2"),
            "r_2": mark("2", map="a_2_1[result:data],a_2_2[data:other],b_2[result:third]"),
        },
        {"data": "xr", "other": "x", "third": "xr", "result": "xr2"},
    ),
    Rule(
        "§4: of a subgraph that is skipped, later maps read from its root",
        {
            "r": mark("r", "a"),
            "a": mark("a", "b", filter="subgraphskip"),
            "b": mark("b", "c"),
            "c": mark("c", "d"),
            "other": mark("o", "d", map="r[result:data]"),
            "d": mark("d", map="b[data:data],c[result:res],other[result:o]"),
        }
        | {"r": mark("r", "a,other")},
        {"res": "xr", "o": "xro", "result": "xd"},
    ),
]
FILTERS_REFUSED = [
    (chain("Python[uper]"), "b: filter", "no filter 'Python[uper]'; valid: "),
    ({"a": mark("a", filter="Above", bound="high")}, "a: bound", "expected a finite number, got 'high'"),
    ({"backend": "S[Mark,(Above)Mark]", "bond": 2}, "node: bond", "unknown key; did you mean 'bound'?"),
    ({"a": mark("a", filter="Above", word="x")}, "a: word", "unknown key; "),
]
FILTERS_RAISES = [
    *((chain(name), X, BackendError, message) for name, message, _ in _BAD_FILTERS),
    *(
        (sequence(name), X, BackendError, f"node 's': S[Mark,({name})Mark,Mark]: {message}")
        for name, _, message in _BAD_FILTERS
    ),
]

GRAPH = [
    Rule(
        "§4 graph: its ends are merged in file order",
        {"r": mark("r", "c,b"), "b": {"backend": "Keys"}, "c": mark("c")},
        {"data": "xr", "result": "xrc"},
    ),
    Rule(
        "§4 graph: a join", diamond("b[result:data],c[result:other]"), {"data": "xrb", "other": "xrc", "result": "xrbj"}
    ),
    Rule("§3 map: of every predecessor", diamond("[result:data]"), {"data": "xrc", "result": "xrcj"}),
    Rule(
        "§3 map: the same source twice",
        diamond("b[result:data],c[result:other],b[data:third]"),
        {"data": "xrb", "other": "xrc", "third": "xr", "result": "xrbj"},
    ),
    Rule(
        "§3 map: from any ancestor",
        {"a": mark("a", "b"), "b": mark("b", "c"), "c": mark("c", map="b[result:data],a[result:first]")},
        {"data": "xab", "first": "xa", "result": "xabc"},
    ),
    Rule(
        "§3 map: of the node before",
        {"a": mark("a", "b"), "b": mark("b", map="[result:data]")},
        {"data": "xa", "result": "xab"},
    ),
    Rule(
        "§4 graph: a join of two roots is refused, no request could pass it",
        {"a": mark("a", "c"), "b": mark("b"), "c": mark("c")},
        {"data": "xa", "result": "xac"},
        at_a("x"),
    ),
    Rule(
        "§4 graph: context, if any, is carried along, and nothing else that is not mapped",
        {"a": mark("a", "b"), "b": {"backend": "Keys", "map": "a[data:data]"}},
        {"result": "context data"},
        {"data": "x", "context": "c", "other": 1},
    ),
    Rule(
        "§4: no key",
        {"a": mark("a", "b"), "b": {"backend": "Keys", "map": "a[data:data,nothing:there]"}},
        {"result": "data"},
    ),
    Rule(
        "§4 graph: where data is missing the request ends without a result, for the reason its source had",
        {"a": mark("a", "b,c"), "b": mark("b", "d", filter="run"), "c": {"next": "d"}, "d": {"map": "b[result:data]"}},
        {"error": {"node 'a': Mark gave no result", "node 'b': Mark gave no result"}},
        {"data": "x-", "mine": 1},
    ),
    Rule(
        "§4 graph: nothing was there",
        {"a": mark("a", "b"), "b": {"map": "a[nothing:data]"}},
        {"error": "node 'b': its map gives no 'data': 'a' has no 'nothing'"},
    ),
]
GRAPH_REFUSED = [
    (
        {"r": mark("r", "b,c"), "b": mark("b", "j"), "c": mark("c", "j"), "j": mark("j")},
        "j",
        "several predecessors (b, c) need a map",
    ),
    (diamond("[result]"), "j: map", "expected key:newkey, found 'result' in '[result]'"),
    ({"a": mark("a", "b,c"), "b": {}, "c": {"map": "b[result:data]"}}, "c: map", "'b' is not an ancestor; valid: a"),
    ({"a": {"next": "b", "map": "b[result:data]"}, "b": {}}, "a: map", "the node is a root"),
    ({"a": {"next": "b"}, "b": {"map": "a[result:x]"}}, "b: map", "gives no 'data'; expected source[key:data]"),
    ({"a": {"next": "c"}, "b": {"next": "c"}, "c": {"map": "a[result:data]"}}, "c", "waits for 'a', which a request t"),
]


def map_reduce_rules(backend: str) -> list[Rule]:
    plain, said = jump(backend), f"§4 {backend}: "
    unlike = "the keys to split hold lists of different lengths: 'data' has 2, 'k' has 1"
    no_list = "expected a list or an array under 'data' to split, found str"
    of_one = {"result": GONE, "error": "element [1] of 3: node 'r': Mark gave no result"}
    sums = {"a": {"backend": backend, "jump": "r", "split": "data,k"}, "r": {"backend": "Sum"}}
    along = {**sums, "a": {**sums["a"], "split": ["data"]}}
    return [
        Rule(f"{said}results in order", plain, {"result": ["xr", "yr", "zr"]}, at_a(["x", "y", "z"])),
        Rule(f"{said}a tuple is a list", plain, {"result": ["xr", "yr"]}, at_a(("x", "y"))),
        Rule(f"{said}what cannot be split", plain, {"error": no_list}, at_a("xyz")),
        Rule(f"{said}empty lists", jump(backend, merge="result,data"), {"result": []}, at_a([])),
        Rule(f"{said}the error of an element is the request's", plain, of_one, at_a(["x", "-", "-"])),
        Rule(f"{said}several split keys, in step", sums, {"result": [31, 42]}, at_a([1, 2], k=[30, 40])),
        Rule(f"{said}lists of different lengths", sums, {"error": unlike}, at_a([1, 2], k=[3])),
        Rule(f"{said}other keys go along with every element", along, {"result": [31, 32]}, at_a([1, 2], k=30)),
        Rule(f"{said}an empty split", jump(backend, split="", merge="result"), {"result": ["xr"]}, at_a("x")),
    ]


MAP_REDUCES = ("MapReduce", "S[Identity,MapReduce]", "SyncTensor[MapReduce]")
JUMPS = [
    Rule(
        "§4 Jump runs another root's graph",
        {"a": {"backend": "Jump", "jump": "r", "next": "b"}, "b": mark("b"), "r": mark("r", "s"), "s": mark("s")},
        {"data": "xrs", "result": "xrsb"},
        at_a("x"),
    ),
    Rule("§4 Jump: jump must be named", jump("Jump"), {"result": "xr"}, at_a("x")),
    Rule("§4 Jump: after another", jump("S[Mark,Jump]", mark="a"), {"data": "xa", "result": "xar"}, at_a("x")),
    Rule("§4 Jump: not into its own graph", jump("S[Jump,Mark]", mark="a"), {"data": "xr", "result": "xra"}, at_a("x")),
    Rule("§4 Jump: of a logical node", jump("Jump") | {"a.2": {}}, {"result": "xr"}, {"data": "x", "node_name": "a.2"}),
    Rule("§4 Jump: what fails there", jump("Jump"), {"error": "node 'r': Mark gave no result"}, at_a("x-")),
    *itertools.chain(*map(map_reduce_rules, MAP_REDUCES)),
    Rule(
        "§4: merge", jump("MapReduce", merge="result, k"), {"result": ["xr", "yr"], "k": [5, 5]}, at_a(["x", "y"], k=5)
    ),
    Rule(
        "§4 MapReduce: nested",
        {"a": {"backend": "MapReduce", "jump": "b"}, "b": {"backend": "MapReduce", "jump": "r"}, "r": mark("r")},
        {"result": [["xr", "yr"], [], ["zr"]]},
        at_a([["x", "y"], [], ["z"]]),
    ),
    Rule("§4: custom split and merge by subclassing", jump("Words"), {"result": "xr ? zr"}, at_a("x y- z")),
    Rule("§4 Range: as another", {"backend": "Range[Most]", "min": 2, "max": 9, "range": "10,10"}, {"result": "x+"}),
    Rule("§4 Range: range is min,max", {"backend": "Range[Most]", "max": 9, "range": [8, 19]}, {"result": "x+"}),
]
JUMPS_REFUSED = [
    (jump("Jump") | {"a": {"backend": "Jump", "jump": "rr"}}, "a: jump", "no node 'rr'; did you mean 'r'?"),
    ({"a": {"backend": "Jump"}, "r": {}}, "a: jump", "Jump needs it"),
    ({"a": {"backend": "Jump", "jump": "s"}, "r": {"next": "s"}, "s": {}}, "a: jump", "'s' is not a root, where"),
    ({"a": {"next": "b"}, "b": {"backend": "S[Mark,Jump]", "jump": "a"}}, "b: jump", "'a' is the root of the graph of"),
    (
        {"a": {"backend": "Jump", "jump": "b"}, "b": {"backend": "S[Jump]", "jump": "a"}},
        "a: jump",
        "from 'b' jumps lead back to 'a': a cycle",
    ),
    (
        {"a": {"backend": "S[Jump]", "jump": "r"}, "r": {"next": "a.2"}, "a.2": {}},
        "a: jump",
        "'r' is the root of the graph of 'a.2' itself",
    ),
    *((jump(backend, merge=""), "a: merge", "names no key") for backend in MAP_REDUCES),
    ({"backend": "Range[Most]", "min": 8, "max": 8, "range": "10,10"}, "node", "Range[Most]: range: Most takes 8..8,"),
    (
        {"backend": "Range[Most]", "range": "19,8"},
        "node: range",
        "expected \"min,max\" with 1 <= min <= max, got '19,8'",
    ),
]
BAD = "'r': node 'r': Mark: ValueError: bad item"
JUMPS_RAISES = [
    (jump("Jump"), at_a("x!"), BackendError, f"node 'a': Jump: BackendError: {BAD} x!"),
    (jump("Words"), at_a("x y! z"), BackendError, f"node 'a': Words: BackendError: element [1] of 3: {BAD} y!"),
    *(
        (jump(backend), at_a(data), BackendError, f"node 'a': {backend}: BackendError: {told}")
        for backend in MAP_REDUCES
        for data, told in (
            (["x!"], f"{BAD} x!"),
            (["x", "y!", "z"], f"element [1] of 3: {BAD} y!"),
            (["-", "x!"], f"element [1] of 2: {BAD} x!"),
        )
    ),
    (
        jump("MapReduce", merge="result,k"),
        at_a(["x"]),
        BackendError,
        "node 'a': MapReduce: ValueError: element [0] of 1:",
    ),
]

RULES = [*CONFIGURATION, *DATA, *FILTERS, *GRAPH, *JUMPS]
REFUSED = [*CONFIGURATION_REFUSED, *FILTERS_REFUSED, *GRAPH_REFUSED, *JUMPS_REFUSED]
"""Configurations, the node and the key at fault, and what is said of them."""
RAISES = [*DATA_RAISES, *FILTERS_RAISES, *JUMPS_RAISES]
"""Configurations, requests, and the errors of their calls."""


CALLS: list[Callable[[pipe, Any], Any]] = [
    lambda p, data: p(data),
    lambda p, data: p(data, timeout=WAIT),
    lambda p, data: outcome(p.submit(data)),
    lambda p, data: p([data] if isinstance(data, dict) else data),
]
"""The ways to call a pipe: on the caller's thread, on a copy of the dict, on the pipe's threads, as a list."""


def settled(data: Data) -> Data:
    """With the words of an error instead of the error."""
    return {key: str(value) if isinstance(value, (NoResult, InvalidRequest)) else value for key, value in data.items()}


@pytest.mark.parametrize("rule", RULES, ids=[rule.text for rule in RULES])
def test_rule(rule: Rule) -> None:
    expected = {key: value for key, value in {**rule.request, **rule.outcome}.items() if value is not GONE}
    # A new pipe for each way to call it: a filter may have a state.
    for call in CALLS:
        data = copy.deepcopy(rule.request)
        with pipe(rule.config) as p:
            call(p, data)
            assert p.stats()["inflight"] == 0
        actual = settled(data)
        if isinstance(expected.get("error"), set) and actual.get("error") in expected["error"]:
            actual["error"] = expected["error"]  # branches race for it
        assert actual == expected


@pytest.mark.parametrize(("config", "place", "words"), REFUSED)
def test_refused(config: Data, place: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pipe(config).close()
    node, _, key = place.partition(": ")
    where = {"": "", "global": "global: "}.get(node, f"node {node!r}: ") + (f"key {key!r}: " if key else "")
    assert str(caught.value).startswith(f"config: {where}{words}")


@pytest.mark.parametrize(("config", "request_", "error", "message"), RAISES)
def test_raises(config: Data, request_: Any, error: type[BaseException], message: str) -> None:
    with pipe(config) as p:
        for call in CALLS:
            data = copy.deepcopy(request_)
            with pytest.raises(error) as raised:
                call(p, data)
            assert str(raised.value).startswith(message)
            assert p.stats()["inflight"] == 0
            if isinstance(raised.value, BackendError) and "filter" not in str(raised.value):
                assert raised.value.__cause__ is not None
            assert all(item.get("result", True) for item in (data if isinstance(data, list) else [data]))


# -- what no row can hold: files, dicts, classes --------------------------------------------------------------------


class Reader(ItemBackend):
    """The text of a file; ``cache`` is one that it would make."""

    model = Param(str, doc="path", file=True)
    cache = Param(str, "", doc="path", kept=True)

    def forward_item(self, item: Data) -> None:
        item["result"] = Path(self.model).read_text("utf-8"), self.cache


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_relative_path_is_looked_for_in_the_working_directory_then_beside_the_file(
    register: Register,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    as_dict: bool,
) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    text = f'[a]\nbackend = "{register(Reader)}"\nmodel = "a.txt"\ncache = "b.txt"\n'
    (folder / "good.toml").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)

    def result() -> tuple[str, str]:
        data: Data = {"data": 1}
        with pipe(copy.deepcopy(parse_toml("configs/good.toml")) if as_dict else "configs/good.toml") as p:
            p(data)
        return data["result"]

    (folder / "a.txt").write_text("beside", "utf-8")
    assert result() == ("beside", "configs/b.txt")
    (tmp_path / "b.txt").write_text("made earlier", "utf-8")
    assert result() == ("beside", "b.txt")
    (tmp_path / "b.txt").unlink()
    assert caplog.messages == []
    (tmp_path / "a.txt").write_text("here", "utf-8")
    assert result() == ("here", "b.txt")
    taken = "a.txt is in the working directory and beside the TOML file; the former is taken"
    assert caplog.messages == [f"configs/good.toml: {taken}"]
    (folder / "b.txt").write_text("made earlier", "utf-8")
    assert result() == ("here", "configs/b.txt")


def test_a_filter_class_has_an_instance_for_each_place() -> None:
    with pipe({"s": {"backend": "S[Mark,(Second)Mark,(Second)Mark]", "mark": "1|2|3"}}) as p:
        items: list[Data] = [{"data": "x"} for _ in range(2)]
        for item in items:
            p(item)
    assert [item["result"] for item in items] == ["x3", "x1"]


def test_a_filter_class_that_lacks_a_key_is_no_pipe() -> None:
    with pytest.raises(SetupError, match=r"^config: node 'a': filter 'Passes': KeyError: 'word'$") as caught:
        pipe({"a": mark("a", filter="Passes")})
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(SetupError, match=r"node 'a': S\[Mark,\(Passes\)Mark\]: KeyError: 'word'"):
        pipe({"a": {"backend": "S[Mark,(Passes)Mark]"}})


# -- batches --------------------------------------------------------------------------------------------------------


def ranged(gate: Gate, low: int, high: int) -> type[Backend]:
    return type(f"From{low}to{high}", (gate.backend,), {"min": lambda _: low, "max": lambda _: high, "__doc__": "_"})


def runs(p: pipe, gate: Gate, count: int) -> list[list[Any]]:
    """The runs that a batch of ``count`` is cut into; it forms while a request blocks the only instance."""
    with gate:
        first = gate.hold(p, {"data": "first"})
        items: list[Data] = [{"data": index} for index in range(count)]
        others = [p.submit(item) for item in items]
        wait_queued(p, count)
        gate.open()
        outcome(first)
        for other in others:
            outcome(other)
        assert [item["result"] for item in items] == list(range(count))
    return [batch for batch in gate.batches if batch[0] != "first"]


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (1, [(1, 1)]),
        (2, [(1, 1), (1, 1)]),
        (3, [(3, 4)]),
        (4, [(4, 4)]),
        (5, [(4, 4), (1, 1)]),
        (7, [(7, 8)]),
        (8, [(8, 8)]),
    ],
)
def test_a_composition_of_batch_1_4_and_8(register: Register, count: int, sizes: list[tuple[int, int]]) -> None:
    gate = Gate(blocks=lambda data: data == "first")
    names = [register(ranged(gate, size, size)) for size in (1, 4, 8)]
    with pipe({"backend": "&".join(names)}) as p, gate:
        assert (p.min(), p.max()) == (1, 8)
        batches = runs(p, gate, count)
    assert [(len(set(batch)), len(batch)) for batch in batches] == sizes
    assert list(dict.fromkeys(itertools.chain(*batches))) == list(range(count))


@pytest.mark.parametrize(
    ("inner", "outer", "count", "sizes"),
    [
        ((2, 9), (10, 10), 10, [8, 2]),
        ((2, 9), (8, 19), 9, [9]),
        ((2, 9), (8, 19), 19, [9, 8, 2]),
        ((4, 4), (8, 8), 8, [4, 4]),
        ((1, 1), (1, 3), 3, [1, 1, 1]),
    ],
)
def test_range_cuts_batches(register: Register, inner: Any, outer: Any, count: int, sizes: Any) -> None:
    gate = Gate(blocks=lambda data: data == "first")
    name = register(ranged(gate, *inner))
    with pipe({"backend": f"Range[{name}]", "range": list(outer)}) as p, gate:
        assert (p.min(), p.max()) == outer
        assert [len(batch) for batch in runs(p, gate, count)] == sizes


@pytest.mark.parametrize("backend", ["MapReduce", "S[Identity,MapReduce]"])
def test_requests_of_different_jumps_share_a_batch(register: Register, backend: str) -> None:
    gate = Gate(most=8, blocks=lambda data: data == "first")
    config = {"a": {"backend": backend, "jump": "r", "instance_num": 2}, "r": {"backend": register(gate.backend)}}
    with pipe(config) as p, gate:
        first = gate.hold(p, {"data": "first", "node_name": "r"})
        jumps = [p.submit(at_a([thread, thread])) for thread in range(2)]
        other = p.submit({"data": "other", "node_name": "r"})
        eventually(lambda: p.stats()["nodes"]["r"]["queued"] == 5)
        gate.open()
        assert [outcome(future)["result"] for future in (first, *jumps, other)] == ["first", [0, 0], [1, 1], "other"]
        assert p.stats()["nodes"]["r"]["batch_sizes"] == {1: 1, 5: 1}
    assert Counter(gate.batches[1]) == {0: 2, 1: 2, "other": 1}


# -- the end of a request that waits for a jump ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["Jump", "MapReduce"])
@pytest.mark.parametrize("end", ["cancel", "timeout", "ticket"])
def test_end_of_a_request_ends_requests_of_its_jump(register: Register, backend: str, end: str) -> None:
    gate = Gate(blocks=lambda data: data == "first")
    with pipe(jump(backend) | {"r": {"backend": register(gate.backend)}}) as p, gate:
        first = gate.hold(p, {"data": "first", "node_name": "r"})
        data = at_a(["dropped"] if backend == "MapReduce" else "dropped")
        answers: list[BaseException | None] = []
        if end == "timeout":
            with pytest.raises(DeadlineExceeded):
                p(data, timeout=0.5)
            eventually(lambda: p.stats()["inflight"] == 1)  # what a jump starts at that moment ends at once
        elif end == "cancel":
            future = p.submit(data)
            eventually(lambda: p.stats()["nodes"]["r"]["queued"] == 1)
            assert future.cancel()
        else:
            ticket = p.dispatch(data, lambda data, error: answers.append(error))
            eventually(lambda: p.stats()["nodes"]["r"]["queued"] == 1)
            assert ticket.cancel()
            assert [type(error) for error in answers] == [CancelledError]
        assert p.stats()["inflight"] == 1
        gate.open()
        outcome(first)
        p({"data": "last", "node_name": "r"})
        assert len(answers) == (end == "ticket")
    assert gate.batches == [["first"], ["last"]]


def closing(p: pipe, sentinel: Future[Any]) -> threading.Thread:
    """Close on another thread; returns when every node is closing: ``sentinel`` was queued at the last of them."""
    closer = threading.Thread(target=p.close, daemon=True)
    closer.start()
    assert isinstance(error_of(sentinel), PipeClosed)
    return closer


@pytest.mark.parametrize("backend", ["Jump", "MapReduce", "S[Identity,Jump]", "S[Identity,MapReduce]"])
def test_close_fails_a_request_that_waits_for_a_jump(register: Register, backend: str) -> None:
    gate, last = Gate(), Gate()
    config = {**jump(backend), "r": {"backend": register(gate.backend)}, "z": {"backend": register(last.backend)}}
    with pipe(config) as p, gate, last:
        assert repr(p).splitlines()[-1].startswith("  z: ")  # the order in which nodes are closed
        running = p.submit({"data": "running", "node_name": "r"})
        waiting = p.submit(at_a(["x", "y"]))
        sentinels = [p.submit({"data": 1, "node_name": "z"}) for _ in range(2)]
        gate.wait_entered()
        last.wait_entered()
        eventually(lambda: p.stats()["nodes"]["r"]["queued"] == (2 if "Map" in backend else 1))
        closer = closing(p, sentinels[1])
        gate.open()
        last.open()
        closer.join(WAIT)
        assert not closer.is_alive()
        assert outcome(running)["result"] == "running"
        assert p.stats()["inflight"] == 0
        assert type(error_of(waiting)) is PipeClosed


# -- many at once, deep and wide ------------------------------------------------------------------------------------


def test_forks_and_jumps_under_many_threads_answer_once() -> None:
    config = {
        "global": {"batching_timeout": 1},
        "a": mark("a", "b,c", instance_num=2),
        "b": {"backend": "Words", "jump": "r", "next": "d"},
        "c": {"backend": "Most", "max": 4, "next": "d,e"},
        "d": mark("d", "f", map="b[result:data],c[result:other]"),
        "e": {"backend": "S[Most,Jump]", "max": 4, "jump": "q", "next": "f"},
        "f": mark("f", map="d[result:data],d[other:other],e[result:more]"),
        "r": {"backend": "Most", "max": 4, "next": "s,t"},
        "s": {"backend": "Jump", "jump": "q", "next": "u"},
        "t": mark("t", "u"),
        "u": mark("u", map="s[result:data],t[result:other]"),
        "q": {"backend": "Most", "max": 4, "next": "c.2"},
        "c.2": {"next": "v", "filter": "subgraphskip"},
        "v": mark("v"),
    }
    ends: Counter[str] = Counter()
    lock = threading.Lock()
    expected: Data = {}

    def work(index: int) -> None:
        for number in range(40):
            answers: list[BaseException | None] = []
            answered = threading.Event()

            def done(data: Data, error: BaseException | None, answers: Any = answers, event: Any = answered) -> None:
                answers.append(error)
                event.set()

            data = at_a(f"{index}.{number} x")
            timeout = 0.002 if number % 4 == 1 else None
            ticket = p.dispatch(data, done, timeout)
            if number % 4 == 2:
                ticket.cancel()
            assert answered.wait(WAIT)
            if answers == [None]:
                shape = {key: str(value).replace(f"{index}.{number}", "0") for key, value in data.items()}
                assert shape == expected
            with lock:
                ends[type(answers[0]).__name__] += 1
                ends["answers"] += len(answers)

    with pipe(config) as p:
        data = at_a("0 x")
        p(data)
        expected.update({key: str(value) for key, value in data.items()})
        in_threads(8, work)
        p(data := at_a("0 x"))
        assert data == expected
        assert p.stats()["inflight"] == 0
    assert ends["answers"] == 8 * 40
    assert set(ends) <= {"answers", "NoneType", "DeadlineExceeded", "CancelledError"}
    assert ends["NoneType"] >= 8 * 20 > ends["CancelledError"] > 0


def test_a_chain_of_300_nodes() -> None:
    """Logical ones, so that they need one thread."""
    names = ["a", *(f"a.{index}" for index in range(1, 300))]
    nodes: Data = {name: {"next": after} for name, after in itertools.pairwise(names)}
    with pipe({**nodes, names[-1]: {}, "a": mark("+", "a.1")}) as p:
        for call in CALLS:
            call(p, data := {"data": ""})
            assert data["result"] == "+" * 300


def test_jumps_of_jumps() -> None:
    depth = 63
    nodes = {f"j{index}": {"backend": "Jump", "jump": f"j{index + 1}"} for index in range(depth)}
    data: Data = {"data": "x"}
    with pipe({**nodes, f"j{depth}": mark("+")}) as p:
        assert outcome(p.submit(data))["result"] == "x+"
    with pytest.raises(ConfigError, match="node 'first': graphs run graphs from here on, more than 64 deep"):
        pipe({"first": {"backend": "Jump", "jump": "j0"}, **nodes, f"j{depth}": mark("+")})


@pytest.mark.parametrize("length", [150])
@pytest.mark.parametrize("first", ["run", "skip"])
def test_many_skipped_forks_and_joins_in_a_row(length: int, first: str) -> None:
    """n0 to x0 and y0, both to n1, and so on; all of them logical nodes of one."""
    nodes: Data = {}
    for index in range(length):
        before = {"map": f"a.x{index - 1}[data:data],a.y{index - 1}[data:y]"} if index else {}
        nodes[f"a.n{index}"] = {"next": f"a.x{index},a.y{index}", "filter": "skip", **before}
        nodes |= {f"a.{side}{index}": {"next": f"a.n{index + 1}", "filter": "skip"} for side in "xy"}
    last = {"map": f"a.x{length - 1}[data:data]", "filter": "run"}
    data: Data = {"data": "x"}
    with pipe({"a": mark("+", "a.n0", filter=first), **nodes, f"a.n{length}": last}) as p:
        try:
            outcome(p.submit(data))
        finally:
            assert p.stats()["inflight"] == 0, "a request that raised is still in flight"
    assert data == {"data": "x", "result": "x+"}
