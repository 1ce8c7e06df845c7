"""Pages of other origins that may call a port and read its answers (CORS)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchpipe_py.serving import Done, HttpAnswer, HttpRequest, Method, to_strings

_ALLOW_ORIGIN = "Access-Control-Allow-Origin"
_METHOD = "access-control-request-method"
_SECONDS = 600
"""How long a browser may remember the answer to a preflight request."""


class CrossOrigin:
    """Adds header fields to answers to pages of ``origins``, separated by commas.

    ``*`` alone is any origin; within one it is any text without the characters ``/``, ``?`` and ``#``.
    Pages never send credentials: the fields that would allow them are left out.
    """

    def __init__(self, origins: str) -> None:
        names = [origin.rstrip("/").lower() for origin in to_strings(origins)]
        self._is_any = "*" in names
        self._patterns = [re.compile("[^/?#]*".join(map(re.escape, name.split("*")))) for name in names]
        self.preflight = Method(HttpRequest, self._answer)
        """Answers a request that ``is_preflight``, whose path takes the method that the page wants to use."""

    def is_preflight(self, request: HttpRequest) -> bool:
        """Whether a browser asks if a page of an allowed origin may send a request."""
        return request.method == "OPTIONS" and _METHOD in request.fields and self._is_allowed(request)

    def wanted(self, request: HttpRequest) -> HttpRequest:
        """The request that a preflight request is about, as far as it is known."""
        return HttpRequest(request.fields[_METHOD], request.path)

    def fields(self, request: HttpRequest, own: Mapping[str, str]) -> dict[str, str]:
        """The fields for an answer, unless it has its ``own``."""
        if any(name.lower() == _ALLOW_ORIGIN.lower() for name in own):
            return {}
        vary = {} if self._is_any else {"Vary": "Origin"}
        if not self._is_allowed(request):
            return vary
        origin = "*" if self._is_any else request.fields["origin"]
        return {_ALLOW_ORIGIN: origin, "Access-Control-Expose-Headers": "*", **vary}

    def _is_allowed(self, request: HttpRequest) -> bool:
        origin = request.fields.get("origin")
        if origin is None or self._is_any:
            return origin is not None
        return any(pattern.fullmatch(origin.lower()) for pattern in self._patterns)

    def _answer(self, request: HttpRequest, done: Done) -> None:
        asked = request.fields
        headers = {"Access-Control-Allow-Methods": asked[_METHOD], "Access-Control-Max-Age": str(_SECONDS)}
        if names := asked.get("access-control-request-headers"):
            headers["Access-Control-Allow-Headers"] = names
        if asked.get("access-control-request-private-network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        done(HttpAnswer(200, "text/plain", b"", headers))


def cross_origin(origins: str) -> CrossOrigin | None:
    """The rule for these origins; ``None`` without any."""
    return CrossOrigin(origins) if to_strings(origins) else None
