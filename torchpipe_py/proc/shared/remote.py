"""A shared node in a worker: its requests go to the engine process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.deferred import HandedOver, HandOverBackend
from torchpipe_py.backends.signature import Signature
from torchpipe_py.proc.process.outcome import take_outcome
from torchpipe_py.proc.shared.client import EngineClient
from torchpipe_py.proc.shared.codec import pack_sent
from torchpipe_py.proc.shared.link import EngineCall


class Remote(HandOverBackend):
    """Hands requests over to the engine process: ``section`` is the head of the nodes that it runs, ``engine`` the way.

    What the dict holds goes there and comes back as copies; what cannot be pickled stays, unseen there. What the engine
    process changes in an array in place is not seen here.
    """

    any_params = True
    runs_nodes = True

    def setup(self) -> None:
        self._engine: EngineClient = self.params["engine"]
        self._section, self._signature = self._engine.section(self.params["section"])

    def start(self, item: Data, done: HandedOver, request: Any) -> None:
        [sent], packed = pack_sent([item], self.config.label)

        def finish(outcome: tuple[Data, Any] | None, error: BaseException | None) -> None:
            done(take_outcome(item, sent, outcome) if error is None else error)

        call = EngineCall(self._section, packed, request.deadline, finish)
        request.linked().give_up.append(lambda: self._engine.give_up(call))
        if request.done:  # perhaps before it could be given up there
            self._engine.give_up(call)
        else:
            self._engine.ask(call)

    def expected_wait(self) -> float:
        return self._engine.expected_wait()

    def signature(self) -> Signature:
        found: Signature = self._signature
        return found

    @classmethod
    def batch_range(cls, params: Mapping[str, Any], children: Any) -> tuple[int, int]:
        return 1, 1
