"""HTML that may load nothing: its script and its style are in it, and its policy names them."""

from __future__ import annotations

import base64
import hashlib

from torchpipe_py.serving import HttpAnswer


def html_document(text: str, style: str, script: str = "") -> HttpAnswer:
    """The answer with a document whose policy allows only this script, this style, and no other host."""
    allowed = f"script-src {_hash_of(script)}; " if script else ""
    policy = (
        f"default-src 'none'; {allowed}style-src {_hash_of(style)}; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Cache-Control": "no-store",
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept",
        "X-Content-Type-Options": "nosniff",
    }
    return HttpAnswer(200, "text/html; charset=utf-8", text.encode(), headers)


def _hash_of(part: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
