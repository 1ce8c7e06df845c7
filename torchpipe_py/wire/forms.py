"""``multipart/form-data`` as a request's dict."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from multipart import MultipartError, PushMultipartParser, parse_options_header

from torchpipe_py.errors import InvalidRequest
from torchpipe_py.wire.errors import Bound
from torchpipe_py.wire.json_values import inputs_from

MOST_PARTS = 16
TEXT_BYTES = 4096  # limit of a part that is not a file
_FILE_KEY = "data"
_JSON_STARTS = frozenset("0123456789[tf")  # first characters of numbers, lists and booleans


def read_form(
    content_type: str, body: bytes, parameters: Collection[str], options: dict[str, Any], text: Bound
) -> dict[str, Any]:
    """The one file of the form under ``data``, and the other fields except ``parameters``.

    These go to ``options``, as texts. Raises ``InvalidRequest`` for an invalid form, another number of files,
    or a duplicate field.
    """
    _, arguments = parse_options_header(content_type)
    files: list[bytes] = []
    texts: dict[str, str] = {}
    try:
        with PushMultipartParser(arguments.get("boundary", ""), max_segment_count=MOST_PARTS, strict=True) as parser:
            segment: Any = None
            content = bytearray()
            for event in parser.parse(body):
                if isinstance(event, (bytes, bytearray)):
                    content += event
                    if segment.filename is None and len(content) > TEXT_BYTES:
                        raise InvalidRequest(f"form: {segment.name[:40]!r} has more than {TEXT_BYTES} bytes")
                elif event is not None:
                    segment = event
                elif segment.filename is not None:
                    files.append(bytes(content))
                    content.clear()
                else:
                    name = str(segment.name)
                    if name in texts:
                        raise InvalidRequest(f"form: {name[:40]!r} appears twice; send a list as one field: [1, 2]")
                    texts[name] = content.decode("utf-8")
                    content.clear()
    except MultipartError as error:
        raise InvalidRequest(f"form: {error}") from None
    except UnicodeDecodeError:
        raise InvalidRequest("form: a text that is not UTF-8") from None
    if len(files) != 1:
        raise InvalidRequest(f"form: {len(files)} files; one request has one, as in curl -F data=@image.jpg")
    options.update({name: text for name, text in texts.items() if name in parameters})
    fields = inputs_from({name: _value(name, text) for name, text in texts.items() if name not in parameters}, text)
    for name in ("", _FILE_KEY):
        if name in fields:
            raise InvalidRequest(
                f"form: a field {name!r}; {_FILE_KEY!r} is the file, other fields have names of their own"
            )
    return {_FILE_KEY: files[0], **fields}


def _value(name: str, text: str) -> Any:
    """A field's text read as JSON if it is a number, a boolean or a list, else the text."""
    if text.lstrip(" \t\r\n-")[:1] not in _JSON_STARTS:
        return text
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidRequest(f"form: {name[:40]!r} is nested too deeply") from None
    except ValueError:
        return text
