"""A blocked caller stands in for an idle instance: when it does, when it does not, and that nothing else changes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from typing import Any

import pytest
from conftest import Register
from fakes import WAIT, Gate, error_of, in_threads, outcome

from torchpipe_py import Backend, BackendError, ItemBackend, PipeClosed, Registry, Status, pipe
from torchpipe_py.runtime.idle import IdleStack, Sleeper

Data = dict[str, Any]


class Where(ItemBackend):
    """Result is the list of threads that worked on the request so far, this one last."""

    anywhere = True

    def setup(self) -> None:
        self.home = threading.current_thread()

    def forward_item(self, item: Data) -> None:
        seen = item["data"] if isinstance(item["data"], list) else []
        item["result"] = [*seen, threading.current_thread()]

    def close(self) -> None:
        assert threading.current_thread() is self.home

    def any_thread(self) -> bool:
        return self.anywhere


class AtHome(Where):
    """The same, but bound to its thread."""

    anywhere = False


def idle(p: pipe) -> pipe:
    """The pipe, once all its instances rest."""
    for node in p._runtime.nodes.values():
        while node.lane.idle.count() < len(node.instances):
            pass
    return p


def call(p: pipe, data: Any) -> None:
    """Call the pipe in a thread of its own, ``caller``: the main thread stands in for nobody."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            p(data)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="caller")
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def chain(*names: str) -> dict[str, Any]:
    """Nodes 0, 1, 2, … in a row."""
    last = len(names) - 1
    return {
        str(index): {"backend": name, **({} if index == last else {"next": str(index + 1)})}
        for index, name in enumerate(names)
    }


def test_a_blocked_caller_runs_backends_as_far_as_they_allow(register: Register) -> None:
    free, bound = register(Where), register(AtHome)
    with pipe(chain(free, f"S[{free},Identity]", bound, free)) as p:
        call(idle(p), data := {"data": 1})
        names = [thread.name for thread in data["result"]]
        assert names == ["caller", "caller", "torchpipe-2-0", "torchpipe-3-0"]
        assert [node["requests"] for node in p.stats()["nodes"].values()] == [1, 1, 1, 1]
        nodes = idle(p).stats()["nodes"].values()  # an instance that has delivered is busy a moment longer
        assert all(not node["busy"] and not node["queued"] for node in nodes)


def test_the_main_thread_runs_nothing(register: Register) -> None:
    """The handler of a signal may raise there at any time."""
    free = register(Where)
    with pipe(chain(free, free)) as p:
        idle(p)(data := {"data": 1})
    assert [thread.name for thread in data["result"]] == ["torchpipe-0-0", "torchpipe-1-0"]


def test_one_bound_backend_binds_its_sequence(register: Register) -> None:
    with pipe({"backend": f"S[{register(Where)},{register(AtHome)}]"}) as p:
        call(idle(p), data := {"data": 1})
    assert [thread.name for thread in data["result"]] == ["torchpipe-node-0"] * 2


def test_who_does_not_wait_for_one_answer_alone_runs_nothing(register: Register) -> None:
    with pipe({"backend": register(Where)}) as p:
        p(several := [{"data": 1}, {"data": 2}])
        p(timed := {"data": 1}, timeout=WAIT)
        submitted = outcome(p.submit({"data": 1}))
    for data in (*several, timed, submitted):
        assert data["result"] != [threading.current_thread()]


def test_no_more_callers_at_once_than_instances(register: Register) -> None:
    lock, running, most = threading.Lock(), [0], [0]

    class Counting(Where):
        """Counts how many run at once."""

        def forward_item(self, item: Data) -> None:
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            item["result"] = sum(range(200)) + item["data"]
            with lock:
                running[0] -= 1

    with pipe({"backend": register(Counting), "instance_num": 2}) as p:

        def work(index: int) -> None:
            for number in range(300):
                p(data := {"data": 1000 * index + number})
                assert data["result"] == 19900 + 1000 * index + number

        in_threads(8, work)
        assert p.stats()["nodes"]["node"]["requests"] == 2400
    assert most[0] <= 2


class Turnstile:
    """A gate whose backend any thread may run."""

    def __init__(self) -> None:
        self.gate = gate = Gate(blocks=lambda data: data == "slow")

        class Anywhere(gate.backend):  # type: ignore[name-defined, misc]
            """As the gate's."""

            def any_thread(self) -> bool:
                return True

        self.backend = Anywhere


def test_a_caller_does_not_overtake_what_is_queued(register: Register) -> None:
    stile = Turnstile()
    with pipe({"backend": register(stile.backend)}) as p, stile.gate as gate:
        first = gate.hold(p, {"data": "slow"})
        second = p.submit({"data": 2})
        caller = threading.Thread(target=p, args=({"data": 3},))
        caller.start()
        while p.stats()["inflight"] < 3:
            pass
        gate.open()
        outcome(first)
        outcome(second)
        caller.join(WAIT)
        assert gate.batches == [["slow"], [2], [3]]


def test_work_queued_meanwhile_is_taken_up_when_the_caller_is_done(register: Register) -> None:
    stile = Turnstile()
    with pipe({"backend": register(stile.backend)}) as p, stile.gate as gate:
        caller = threading.Thread(target=idle(p), args=({"data": "slow"},))
        caller.start()
        gate.wait_entered()
        assert p.stats()["nodes"]["node"]["busy"] == 1
        queued = [p.submit({"data": number}) for number in range(3)]
        gate.open()
        assert [outcome(future)["result"] for future in queued] == [0, 1, 2]
        caller.join(WAIT)


def test_close_waits_for_a_caller_that_stands_in(register: Register) -> None:
    stile = Turnstile()
    p = pipe({"backend": register(stile.backend)})
    data = {"data": "slow"}
    errors: list[BaseException] = []

    def call() -> None:
        try:
            idle(p)(data)
        except PipeClosed as error:
            errors.append(error)

    with stile.gate as gate:
        caller = threading.Thread(target=call)
        caller.start()
        gate.wait_entered()
        queued = p.submit({"data": 2})
        assert p.close(timeout=0.01) is False
        assert isinstance(error_of(queued), PipeClosed)
        assert len(p._runtime.inflight) == 0
    caller.join(WAIT)
    assert len(errors) == 1
    assert p.close()


@pytest.mark.parametrize("alone", [True, False])
def test_what_looks_like_ctrl_c_in_a_backend_is_a_defect(register: Register, alone: bool) -> None:
    class Interrupted(Where):
        """Raises what only a handler of a signal should."""

        def forward_item(self, item: Data) -> None:
            if item["data"] == "interrupt":
                raise KeyboardInterrupt
            item["result"] = item["data"]

    with pipe({"backend": register(Interrupted)}) as p:
        with pytest.raises(BackendError, match="KeyboardInterrupt"):
            call(idle(p), {"data": "interrupt"} if alone else [{"data": "interrupt"}, {"data": 1}])
        call(p, data := {"data": 3})
        assert data["result"] == 3
        assert p.stats()["inflight"] == 0


def test_a_defect_is_told_as_ever_and_the_instance_lives(register: Register) -> None:
    class Failing(Where):
        """Fails for text."""

        def forward_item(self, item: Data) -> None:
            item["result"] = 2 * item["data"] + 0

    with pipe({"only": {"backend": register(Failing)}}) as p:
        for _ in range(3):
            with pytest.raises(BackendError, match="node 'only'"):
                call(p, {"data": "text"})
            call(p, data := {"data": 2})
            assert data["result"] == 4
        assert p.stats()["nodes"]["only"]["failed"] == 3


def test_a_leader_that_waits_for_a_request_on_its_callers_thread_gets_it(register: Register) -> None:
    class Four(Backend):
        """Result is the size of the batch."""

        def forward(self, items: list[Data]) -> None:
            for item in items:
                item["result"] = len(items)

        def max(self) -> int:
            return 4

    stile = Turnstile()
    nodes = {
        "a": {"backend": register(stile.backend), "instance_num": 2, "next": "b"},
        "b": {"backend": register(Four), "batching_timeout": 60_000},
    }
    with pipe(nodes) as p, stile.gate as gate:
        slow = {"data": "slow"}
        caller = threading.Thread(target=idle(p), args=(slow,))
        caller.start()
        gate.wait_entered()
        quick = p.submit({"data": 1})
        while not p._runtime.nodes["b"].lane._waiting:
            pass
        gate.open()
        assert outcome(quick)["result"] == 2
        caller.join(WAIT)
        assert slow["result"] == 2


def test_a_long_chain_needs_no_deep_stack() -> None:
    with pipe(chain(*["Identity"] * 300)) as p:
        call(p, data := {"data": 1})
        assert data["result"] == 1


def test_a_borrowed_sleeper_is_not_woken_before_it_is_back() -> None:
    queue: deque[int] = deque()
    stack = IdleStack(queue)
    sleeper = Sleeper()
    woken = threading.Event()

    def rest() -> None:
        stack.sleep(sleeper)
        woken.set()

    thread = threading.Thread(target=rest, daemon=True)
    thread.start()
    while not stack.count():
        pass
    assert stack.borrow() is sleeper
    assert stack.borrow() is None
    queue.append(1)
    stack.wake_one()
    assert not woken.wait(0.05)
    stack.give_back(sleeper)
    assert woken.wait(WAIT)
    assert stack.borrow() is None, "what is queued comes first"
    thread.join(WAIT)


def test_a_caller_that_stands_in_may_close_the_pipe(register: Register, restored: Registry) -> None:
    pipes: list[pipe] = []

    def closing(data: Data) -> Status:
        pipes[0].close()
        return Status.Run

    restored.register_filter(closing, "closing")
    nodes = {"a": {"backend": register(Where), "next": "b"}, "b": {"backend": register(Where), "filter": "closing"}}
    p = pipe(nodes)
    pipes.append(idle(p))
    with pytest.raises(PipeClosed):
        call(p, {"data": 1})
    assert p.close()


def test_a_request_with_branches_leaves_no_cycle() -> None:
    class Payload:
        """Something that can be referred to weakly."""

    nodes = {"a": {"next": "b,c"}, "b": {"next": "d"}, "c": {"next": "d"}, "d": {"map": "b[result:data],c[result:x]"}}
    with pipe(nodes) as p:
        gc.collect()
        gc.disable()
        try:
            payload = Payload()
            known = weakref.ref(payload)
            for run in (
                lambda data: call(p, data),
                lambda data: p(data),
                lambda data: outcome(p.submit(data)) and None,
            ):
                run({"data": payload})
            del payload, run
            for node in p._runtime.nodes.values():
                while node.lane.idle.count() < len(node.instances):
                    pass
            assert known() is None
        finally:
            gc.enable()
