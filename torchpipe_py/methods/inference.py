"""``POST /infer`` and the Open Inference Protocol on a pipe, for every server of this package."""

from __future__ import annotations

from collections.abc import Sequence

from torchpipe_py.methods.http import HttpHandler
from torchpipe_py.methods.many import FairAdmission
from torchpipe_py.methods.oip.core import Control, Models, OpenInference, Totals
from torchpipe_py.methods.oip.handler import OipHandler
from torchpipe_py.methods.oip.requests import InferLimits
from torchpipe_py.methods.roots import Roots, check_count
from torchpipe_py.methods.routes import Route, Rpc
from torchpipe_py.runtime.admission import Deadlines
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.wire.errors import Bound
from torchpipe_py.wire.parameters import ForwardedHeaders


class Inference:
    """Routes and gRPC methods of a pipe.

    ``stem`` is the name of the file, ``items`` bounds the batch of a request, ``text`` its texts, ``reply`` an answer.
    ``forward_headers``: see ``ForwardedHeaders``.
    """

    def __init__(
        self, run: pipe, stem: str, deadline_ms: float, items: int, text: Bound, reply: Bound,
        control: Control | None = None, may_load: bool = False, totals: Totals | None = None,
        forward_headers: str = "",
    ) -> None:  # fmt: skip
        check_count(run)
        self.headers = headers = ForwardedHeaders(forward_headers)
        self.roots, self.deadlines, self.admission = Roots(run, stem), Deadlines(run, deadline_ms), FairAdmission(run)
        self.models = Models(run, stem, self.deadlines, self.admission)
        self._core = OpenInference(self.models, items, reply, control, may_load, totals)
        self._limits = InferLimits(text, items, headers)
        http = HttpHandler(run, self.roots, self.deadlines, self.admission, items, text, reply, headers)
        self.routes: Sequence[Route] = [*http.routes, *OipHandler(self._core, self._limits).routes]

    def rpcs(self) -> Sequence[Rpc]:
        """The protocol over gRPC; imports its libraries."""
        from torchpipe_py.methods.rpc.oip import OipRpcs

        return OipRpcs(self._core, self._limits).rpcs
