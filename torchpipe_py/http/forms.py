"""``multipart/form-data`` as a request's dict."""

from __future__ import annotations

from typing import Any

from multipart import MultipartError, PushMultipartParser, parse_options_header

from torchpipe_py.errors import InvalidRequest

MOST_PARTS = 16
TEXT_BYTES = 4096  # of a part that is no file


def read_form(content_type: str, body: bytes, options: dict[str, Any]) -> dict[str, Any]:
    """The one file of the form under ``data``; the texts, which may be parameters, go to ``options``.

    Raises ``InvalidRequest`` for what is no form, or one with another number of files.
    """
    _, arguments = parse_options_header(content_type)
    files: list[bytes] = []
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
                    options[str(segment.name)] = content.decode("utf-8")
                    content.clear()
    except MultipartError as error:
        raise InvalidRequest(f"form: {error}") from None
    except UnicodeDecodeError:
        raise InvalidRequest("form: a text that is not UTF-8") from None
    if len(files) != 1:
        raise InvalidRequest(f"form: {len(files)} files; one request has one, as in curl -F data=@image.jpg")
    return {"data": files[0]}
