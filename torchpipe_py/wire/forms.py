"""``multipart/form-data`` as the dicts of requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from multipart import MultipartError, PushMultipartParser, parse_options_header

from torchpipe_py.errors import InvalidRequest
from torchpipe_py.wire.errors import Bound
from torchpipe_py.wire.json_values import InputReader, from_text

MOST_FIELDS = 16  # parts that are not files
TEXT_BYTES = 4096  # limit of a part that is not a file
_FILE_KEY = "data"


def read_form(
    content_type: str, body: bytes, parameters: Callable[[Mapping[str, str]], Collection[str]],
    options: dict[str, Any], text: Bound, most: int,
) -> tuple[list[dict[str, Any]], str]:  # fmt: skip
    """A dict for each file of the form: the file under ``data``, and the other fields except ``parameters``.

    The text is the first file's field.

    ``parameters`` gives their names, which depend on the model that the fields name. They go to ``options``, as texts.
    Raises ``InvalidRequest`` for an invalid form, no file or more than ``most``, and a duplicate field.
    """
    _, arguments = parse_options_header(content_type)
    boundary = arguments.get("boundary", "")
    files: list[bytes] = []
    texts: dict[str, str] = {}
    field = ""
    try:
        with PushMultipartParser(boundary, max_segment_count=most + MOST_FIELDS + 1, strict=True) as parser:
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
                    if len(files) == most:
                        raise InvalidRequest(f"form: more than {most} files (max_batch)")
                    field = field if files else str(segment.name)
                    files.append(bytes(content))
                    content.clear()
                else:
                    name = str(segment.name)
                    if len(texts) == MOST_FIELDS:
                        raise InvalidRequest(f"form: more than {MOST_FIELDS} fields beside files")
                    if name in texts:
                        raise InvalidRequest(f"form: {name[:40]!r} appears twice; send a list as one field: [1, 2]")
                    texts[name] = content.decode("utf-8")
                    content.clear()
    except MultipartError as error:
        raise InvalidRequest(f"form: {error}") from None
    except UnicodeDecodeError:
        raise InvalidRequest("form: a text that is not UTF-8") from None
    if not files:
        raise InvalidRequest("form: no file; an image is one, as in curl -F data=@image.jpg")
    known = parameters(texts)
    options.update({name: text for name, text in texts.items() if name in known})
    given = {name: from_text(f"form: {name[:40]!r}", content) for name, content in texts.items() if name not in known}
    fields = InputReader(text).read(given)
    for name in ("", _FILE_KEY):
        if name in fields:
            raise InvalidRequest(
                f"form: a field {name!r}; {_FILE_KEY!r} is the file, other fields have names of their own"
            )
    return [{_FILE_KEY: file, **fields} for file in files], field
