"""Backends by name, their common contract, and backends that call others."""

from __future__ import annotations

import contextlib
import logging
from contextlib import ExitStack
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from conftest import Register
from kit.refusals import refusal

from torchpipe_py import (
    Backend,
    BackendError,
    BackendUnavailable,
    ConfigError,
    ItemBackend,
    Param,
    Registry,
    Status,
    pipe,
    register_backend,
    registry,
)
from torchpipe_py.backends.base import BackendConfig
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.values import to_int, to_strings

Data = dict[str, Any]


# -- the contract -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("name", sorted({*registry.BUILT_IN_BACKENDS, *registry.ALIASES}))
def test_every_built_in_backend_keeps_the_contract(name: str, classifier: str, tmp_path: Path) -> None:
    cls = registry.default.find_backend(name)
    assert cls is not None
    assert issubclass(cls, Backend)
    assert cls.__doc__
    assert cls.__doc__ != Backend.__doc__
    params = cls.parameters()
    assert all(param.doc and param.key for param in params.values())
    torch.jit.script(torch.nn.Identity()).save(str(tmp_path / "model.pt"))
    torch.save(torch.zeros(1, 3, 2, 2), tmp_path / "tensor.pt")
    model = str(tmp_path / "model.pt") if cls.__name__ == "TorchTensor" else classifier
    folder, tensor = str(tmp_path / "saved"), str(tmp_path / "tensor.pt")
    samples = {"save_dir": folder, "tensor_name": tensor, "model": model, "trusted": True}
    samples |= {"color": "rgb", "resize_h": 32, "resize_w": 48, "max_h": 32, "max_w": 64}
    samples |= {"mean": 127.5, "std": 60, "jump": "other", "range": "1,4", "size": 32, "crop_h": 24, "crop_w": 24}
    needed = {
        param.key: samples[param.key]
        for param in params.values()
        if "required" in repr(param.default) or param.key in ("trusted", "max_w")  # AlignMat takes max_w or widths
    }
    brackets = f"[{','.join(['Identity'] * cls.children[0])}]" if cls.children[0] else ""
    nodes = {"node": {"backend": name + brackets, **needed}, "other": {}}
    backend = plan_pipeline(nodes).plans["node"].backends[0].create(BackendConfig(graphs=Mock()))
    assert {key: getattr(backend, key) for key in params} == dict(backend.params)
    assert backend.config.label == name + brackets
    with contextlib.suppress(BackendUnavailable):
        backend.setup()
        assert 1 <= backend.min() <= backend.max()
        hash(backend.batch_key({"data": b"bytes"}))
    backend.close()
    backend.close()


# -- registered classes -------------------------------------------------------------------------------------------


class Duck:
    """Not a Backend; multiplies."""

    def init(self, config: dict[str, Any]) -> None:
        self.config = config

    def forward(self, items: list[Data]) -> None:
        for item in items:
            item["result"] = (item["data"], self.config, len(items))


@pytest.mark.parametrize("form", ["{0}", "Python[{0}]", "S[Identity,Python[{0}]]", "SyncTensor[{0}]"])
def test_runs_class_with_init_and_forward(register: Register, form: str) -> None:
    name = register(Duck)
    config = {"backend": form.format(name), "a": 1, "b": "x", f"{name}::b": "y", f"{name}::c": [1], "instance_num": 2}
    with pipe(config) as p:
        assert p({"data": 1})["result"] == (1, {"a": 1, "b": "y", "c": [1]}, 1)
        assert p.max() == 1


class Annotated:
    """Its annotations are its parameters."""

    factor: int
    shift: float = 0.5
    names: list[str] = ["a"]  # noqa: RUF012
    upper: bool = False
    max: int = 4
    calls: ClassVar[int] = 0
    _private: object = None

    def forward(self, items: list[Data]) -> None:
        for item in items:
            item["result"] = (self.factor * item["data"] + self.shift, self.names, self.upper, len(items))


def test_annotations_are_parameters(register: Register) -> None:
    name = register(Annotated)
    with pipe({"backend": name, "factor": "3", f"{name}::names": "x, y", "upper": "yes"}) as p:
        assert p({"data": 2})["result"] == (6.5, ["x", "y"], True, 1)
        assert p.max() == 4
    with pipe({"backend": f"Python[{name}]", "factor": 1, "max": 2}) as p:
        assert p({"data": 2})["result"] == (2.5, ["a"], False, 1)
        assert p.max() == 2
    plans = plan_pipeline({"backend": name, "factor": 1, "max": 2}).plans.values()
    assert [plan.batch_range() for plan in plans] == [(1, 2)]  # without a set-up


class Wrong(Annotated):
    """A parameter that no TOML value can be."""

    model: object = None


class Shift(ItemBackend):
    """Adds ``by``, which must be given, and notes the words."""

    by = Param(to_int, doc="how much", low=1, high=9)
    words = Param(to_strings, ("a",), doc="some words", key="some::words")

    def forward_item(self, item: Data) -> None:
        item["result"] = (item["data"] + self.by, self.words)


@pytest.mark.parametrize(
    ("cls", "config", "problem"),
    [
        (Annotated, {}, "key 'factor': NAME needs it"),
        (Annotated, {"factor": "x"}, "key 'factor': expected an integer, got 'x'"),
        (Annotated, {"factor": 1, "shft": 2}, "key 'shft': unknown key; did you mean 'shift'?"),
        (Annotated, {"factor": 1, "upper": 3}, "key 'upper': expected true or false"),
        (Annotated, {"factor": 1, "zz": 2}, "unknown key; valid: "),
        (Wrong, {"factor": 1}, "parameter 'model' is annotated <class 'object'>; expected int"),
        (Shift, {}, "key 'by': NAME needs it: how much"),
        (Shift, {"by": 10}, "key 'by': expected at most 9, got 10"),
        (Shift, {"by": 1, "bye": 1}, "key 'bye': unknown key; did you mean 'by'?"),
    ],
)
def test_wrong_parameters_of_a_class_are_refused(register: Register, cls: type, config: Data, problem: str) -> None:
    name = register(cls)
    assert problem.replace("NAME", name) in refusal({"backend": name, **config}, pipe)


class Undeclared:
    """Attributes that are not parameters: arguments of ``__init__``, and one without an annotation."""

    bias = 1
    max = 4

    def __init__(self, alpha: float = 1) -> None:
        self.alpha = alpha

    def forward(self, items: list[Data]) -> list[Any]:
        return [self.alpha * item["data"] + self.bias for item in items]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("alpha", 2.5, "unknown key; parameters of Undeclared are annotations of the class (alpha: float), not argum"),
        ("alhpa", 2, "unknown key; parameters of Undeclared are annotations of the class (alpha: int), not arguments"),
        ("bias", 2, "unknown key; parameters of Undeclared are annotations of the class (bias: int), not arguments of"),
        ("max", 2, "no backend of this node takes a batch range; parameters of Undeclared are annotations of the cla"),
        ("max_batch_size", 8, "unknown key; the largest batch is 'max' here; parameters of Undeclared are annotations"),
        ("Identity::alpha", 3, "unknown key; valid: backend, "),
    ],
)
def test_class_without_init_takes_its_annotations(register: Register, key: str, value: object, problem: str) -> None:
    for form in ("{}", "Python[{}]", "S[Identity,{}]"):
        config = {"backend": form.format(register(Undeclared))}
        with pipe(config) as p:
            assert p({"data": 2})["result"] == 3
        assert refusal({**config, key: value}, pipe).startswith(f"config: node 'node': key {key!r}: {problem}")


class Returns:
    """Returns its results, as a class for LitServe or mosec does."""

    max = 4

    def forward(self, items: list[Data]) -> Any:
        return items[0]["returns"](items)


def doubled(items: list[Data]) -> list[int]:
    return [2 * item["data"] for item in items]


@pytest.mark.parametrize("form", ["{}", "Python[{}]", "S[Identity,{}]"])
@pytest.mark.parametrize("kind", [list, tuple])
def test_list_from_forward_holds_results(register: Register, form: str, kind: type) -> None:
    items = [{"data": number, "returns": lambda items: kind(doubled(items))} for number in range(6)]
    with pipe({"backend": form.format(register(Returns))}) as p:
        p(items)
        assert [item["result"] for item in items] == [0, 2, 4, 6, 8, 10]
        itself = {"data": 1, "result": 7, "returns": lambda items: [item.update(result=-1) or item for item in items]}
        assert p(itself)["result"] == -1


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([], "a list of 0 results for 1 item"),
        ([1, 2], "a list of 2 results for 1 item"),
        (torch.zeros(1, 2), "a Tensor"),
        ({"result": 1}, "a dict"),
        (7, "an int"),
        ("text", "a str"),
        (iter([1]), "a list_iterator"),
    ],
)
def test_other_return_values_of_forward_are_errors(register: Register, returned: Any, problem: str) -> None:
    data = {"data": 1, "returns": lambda items: returned}
    with pipe({"backend": register(Returns)}) as p, pytest.raises(BackendError) as caught:
        p(data)
    assert f"Returns.forward returned {problem}; expected nothing (write item['result'] then), or" in str(caught.value)
    assert "result" not in data


def test_reports_failed_init_and_class_without_name(register: Register) -> None:
    class Fails(Duck):
        def init(self, config: dict[str, Any]) -> None:
            raise ValueError("no such thing")

    with pytest.raises(BackendError, match=r"config: node 'node': Python\[Fails\d+\]: ValueError: no such thing"):
        pipe({"backend": f"Python[{register(Fails)}]"})
    with pytest.raises(ConfigError, match="node 'node': key 'backend': no backend 'Nobody'"):
        pipe({"backend": "Python[Nobody]"})


def test_declared_parameters(register: Register) -> None:
    with pipe({"backend": register(Shift), "by": "2", "some::words": "x, y"}) as p:
        assert p({"data": 1})["result"] == (3, ("x", "y"))


def test_refuses_registered_name(register: Register) -> None:
    name = register(Shift)
    assert register_backend(Shift, name) is Shift
    for taken in ("Identity", "S", "Torch", name):
        with pytest.raises(ConfigError, match=f"'{taken}' is registered already"):
            register_backend(Duck, taken)


@pytest.mark.parametrize(
    ("thing", "problem"),
    [
        (type("Empty", (), {}), "class Empty has no method 'forward'"),
        (len, "expected a class"),
        (3, "expected a class"),
        ("Name", "expected a class, got str; write @register_backend, or register_backend"),
        (type("Item", (), {"forward_item": None}), "forward_item is ItemBackend's: derive from it"),
        (type("Number", (Backend,), {"max": 4}), r"Number: max of a Backend is a method: def max\(self\): return …"),
        (type("Declared", (Shift,), {"min": Param(to_int, doc="")}), "Declared: min of a Backend is a method"),
    ],
)
def test_refuses_invalid_registrations(thing: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        register_backend(thing, "Unusable")
    assert registry.default.find_backend("Unusable") is None


@pytest.mark.usefixtures("register")
@pytest.mark.parametrize("module", ["__main__", "reloaded"])
def test_code_that_runs_again_may_redefine_its_class(module: str) -> None:
    """A cell, or a module that is reloaded; not a function, of which each call may make another class."""
    cell = "class Cell(Backend):\n    def forward(self, items):\n        items[0]['result'] = {}\n"
    with ExitStack() as pipes:
        runs = []
        for number in range(2):
            exec(cell.format(number), names := {"__name__": module, "Backend": Backend})
            register_backend(names["Cell"])
            runs.append(pipes.enter_context(pipe({"backend": "Cell"})))
        assert [run({"data": None})["result"] for run in runs] == [0, 1]  # each keeps the class that it was built with
    exec("def make():\n    class Cell(Backend):\n        pass\n    return Cell", names)
    with pytest.raises(ConfigError, match=f"'Cell' is registered already, by {module}.Cell; register_backend"):
        register_backend(names["make"]())
    exec(cell.format(2), names := {"__name__": "another", "Backend": Backend})
    with pytest.raises(ConfigError, match="'Cell' is registered already"):
        register_backend(names["Cell"])


@pytest.mark.usefixtures("register")
def test_forward_written_for_one_dict_gets_a_hint() -> None:
    class OfOne:
        def forward(self, item: Any) -> Any:
            return item["data"]

    class OfMany:
        def forward(self, items: Any) -> Any:
            def of(item: Any) -> Any:
                return item["data"]["of a list"]

            return [of(item) for item in items]

    register_backend(OfOne)
    register_backend(OfMany)
    hint = "forward gets a list of dicts, also for one request"
    with pipe({"backend": "OfOne"}) as run, pytest.raises(BackendError, match=hint):
        run({"data": 1})
    with pipe({"backend": "OfMany"}) as run, pytest.raises(BackendError) as raised:
        run({"data": [1]})
    assert hint not in str(raised.value)


@pytest.mark.usefixtures("register")
def test_warns_of_init_in_a_backend(caplog: pytest.LogCaptureFixture) -> None:
    for content in ({"setup": print}, {}):
        members = {"init": print, "forward_item": print, **content}
        register_backend(type("Derived", (ItemBackend,), members), f"Derived{len(content)}")
    (message,) = caplog.messages
    assert message.startswith("Derived: init(config) is never called: this is a Backend. Call it setup(self)")


@pytest.mark.usefixtures("register")
def test_warns_of_setup_in_plain_class(caplog: pytest.LogCaptureFixture) -> None:
    for content in ({"init": None}, {}):
        register_backend(type("Plain", (), {"setup": None, "forward": print, **content}), f"Plain{len(content)}")
    assert caplog.messages == [
        "Plain: setup() is never called: this is not a Backend. Derive from Backend, or call it init(self, config)"
    ]


def test_a_pipe_knows_the_names_of_its_registry() -> None:
    mine, others = Registry(), Registry()
    mine.register_backend(Shift, "Named")
    others.register_backend(Duck, "Named")
    mine.register_filter(lambda data: Status.Break, "never")
    with pipe({"a": {"backend": "Named", "by": 1, "filter": "never"}}, registry=mine) as p:
        assert "result" not in p({"data": 1})
    assert others.find_backend("Named") is not mine.find_backend("Named")
    with pytest.raises(ConfigError, match="no filter 'never'"):
        pipe({"a": {"backend": "Named", "by": 1, "filter": "never"}}, registry=others)
    with pytest.raises(ConfigError, match="no backend 'Named'"):
        pipe({"backend": "Named"}, registry=None)
    with mine.restored() as registry_inside:
        registry_inside.register_backend(Shift, "Gone")
    assert mine.find_backend("Gone") is None


def test_finds_backends_of_entry_points() -> None:
    """Installed packages name their backends in the group ``torchpipe_py.backends``."""
    broken = Mock(load=Mock(side_effect=ImportError))
    broken.name = "Broken"
    points = [EntryPoint("Installed", f"{__name__}:Shift", ""), EntryPoint("NoClass", "math:pi", ""), broken]
    known = Registry(lambda group: points if group == "torchpipe_py.backends" else [])
    with pipe({"backend": "Installed", "by": 1}, registry=known) as p:
        assert p({"data": 1})["result"] == (2, ("a",))
    with pytest.raises(ConfigError, match=r"did you mean 'Installed'\?"):
        pipe({"backend": "Instaled"}, registry=known)
    with pytest.raises(ConfigError, match="NoClass: expected a class, got float"):
        pipe({"backend": "NoClass"}, registry=known)
    with pytest.raises(ImportError):
        pipe({"backend": "Broken"}, registry=known)


# -- FirstAvailable -----------------------------------------------------------------------------------------------


class Missing(Backend):
    """Cannot be set up."""

    closed = 0
    error: Exception = BackendUnavailable("lacks a library")

    def setup(self) -> None:
        raise self.error

    def close(self) -> None:
        type(self).closed += 1


class Defective(Missing):
    error = ValueError("a bug")


class Batching(ItemBackend):
    """Takes six."""

    def forward_item(self, item: Data) -> None:
        item["result"] = "batching"

    def max(self) -> int:
        return 6


def test_first_available_backend_is_chosen(register: Register, caplog: pytest.LogCaptureFixture) -> None:
    missing, batching, defective = register(Missing), register(Batching), register(Defective)
    choice, Missing.closed, Defective.closed = f"FirstAvailable[{missing},{batching},{defective}]", 0, 0
    with caplog.at_level(logging.INFO, "torchpipe_py"), pipe({"backend": choice, "instance_num": 3}) as p:
        assert p({"data": 1})["result"] == "batching"
        assert p.max() == 6
        assert p.setup_choices() == {"node": [f"{choice}: {batching}"]}
    assert caplog.messages == [f"{choice}: using {batching} ({missing}: lacks a library)"]
    with pytest.raises(BackendError, match="a bug"):
        pipe({"backend": f"FirstAvailable[{defective},Identity]"})
    assert (Missing.closed, Defective.closed) == (3, 1)
    with pytest.raises(BackendUnavailable) as caught:
        pipe({"backend": f"FirstAvailable[{missing},S[Identity,{missing}]]"})
    for part in ("none is available", f"{missing}: lacks a library", f"S[Identity,{missing}]: lacks a library"):
        assert part in str(caught.value)


# -- Sequential ---------------------------------------------------------------------------------------------------


def test_children_are_closed_in_reverse_even_after_a_failure(register: Register) -> None:
    """A failure in setup, or in the close of another child."""
    steps: list[str] = []

    class Step(ItemBackend):
        """Notes setup and close."""

        at = Param(to_int, doc="its number")

        def setup(self) -> None:
            steps.append(f"setup {self.at}")
            if self.at == 3:
                raise ValueError("three")

        def close(self) -> None:
            steps.append(f"close {self.at}")
            if self.at == 2:
                raise ValueError("will not close")

    name = register(Step)
    pipe({"backend": f"S[{name},{name}]", "at": "1|2"}).close()
    assert steps == ["setup 1", "setup 2", "close 2", "close 1"]
    steps.clear()
    with pytest.raises(BackendError, match="three"):
        pipe({"backend": f"S[{name},{name},{name}]", "at": "1|3|2"})
    assert steps[:2] == ["setup 1", "setup 3"]
    assert {"close 1", "close 3"} <= set(steps)
