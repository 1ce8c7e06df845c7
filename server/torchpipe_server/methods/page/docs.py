"""The page ``/docs``: the OpenAPI document for people, made once and without a script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from torchpipe_py.serving import HttpAnswer
from torchpipe_server.methods.page.document import html_document

_STYLE = Path(__file__).with_name("docs.css")


def docs_page(document: Mapping[str, Any]) -> HttpAnswer:
    """The paths of an OpenAPI document, with their parameters, bodies and answers, and its schemas."""
    style, info = _STYLE.read_text(encoding="utf-8"), document["info"]
    operations = [
        _operation(verb, path, operation, document)
        for path, operations in document["paths"].items()
        for verb, operation in operations.items()
    ]
    schemas = document["components"]["schemas"].items()
    named = [
        f'<section id="{escape(name)}"><h2>{escape(name)}</h2>{_json(schema)}</section>' for name, schema in schemas
    ]
    title = f"{escape(info['title'])} {escape(info['version'])}: paths over HTTP"
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{title}</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>\n'
        f'<h1>{title}</h1>\n<p><a href="openapi.json">openapi.json</a> for programs</p>\n'
        f"<main>\n{_lines(operations)}\n<h1>Schemas</h1>\n{_lines(named)}\n</main>\n</body>\n</html>\n"
    )
    return html_document(text, style)


def _operation(verb: str, path: str, operation: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    parts = [f"<h2>{verb.upper()} <code>{escape(path)}</code></h2>", f"<p>{escape(operation.get('summary', ''))}</p>"]
    parameters = [_resolved(each, document) for each in operation.get("parameters", ())]
    if parameters:
        rows = [
            f"<tr><td><code>{escape(each['name'])}</code></td><td>{escape(each['in'])}</td>"
            f"<td>{escape(each.get('description', ''))}</td></tr>"
            for each in parameters
        ]
        parts.append(f"<h3>Parameters</h3>\n<table>{_lines(rows)}</table>")
    contents = operation.get("requestBody", {}).get("content", {})
    if contents:
        parts += ["<h3>Body</h3>", *_contents(contents)]
    parts.append("<h3>Answers</h3>")
    errors = []
    for status, answer in operation["responses"].items():
        found = _resolved(answer, document)
        if status.startswith("2"):
            parts += [f"<p>{status}: {escape(found['description'])}</p>", *_contents(found.get("content", {}))]
        else:
            errors.append(f"<tr><td>{status}</td><td>{escape(found['description'])}</td></tr>")
    if errors:
        parts.append(f"<details><summary>Errors</summary><table>{_lines(errors)}</table></details>")
    return f"<section>{_lines(parts)}</section>"


def _contents(contents: Mapping[str, Any]) -> list[str]:
    """Each type of a body, and its schema."""
    return [
        f"<details><summary>{escape(kind)}</summary>{_json(content.get('schema', {}))}</details>"
        for kind, content in contents.items()
    ]


def _resolved(value: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The value, or the part of the document that it refers to."""
    reference = value.get("$ref")
    if reference is None:
        return value
    found: Any = document
    for name in reference.removeprefix("#/").split("/"):
        found = found[name]
    return found  # type: ignore[no-any-return]


def _json(value: Any) -> str:
    return f'<pre tabindex="0">{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>'


def _lines(parts: list[str]) -> str:
    return "\n".join(parts)
