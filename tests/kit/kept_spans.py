"""OpenTelemetry's spans, kept in memory."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class KeptSpans:
    """A provider whose spans are kept; ``options`` are those of ``TracerProvider``."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False, **options)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    @property
    def traces(self) -> set[int]:
        """Their ids."""
        return {span.context.trace_id for span in self.spans if span.context}

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def errors(self, name: str) -> list[Any]:
        return [(span.attributes or {}).get("error.type") for span in self.named(name)]

    def tree(self) -> list[str]:
        """Each span but those of waits, behind the one that it is a child of, sorted."""
        names = {span.context.span_id: span.name for span in self.spans if span.context}
        return sorted(
            f"{names.get(span.parent.span_id, 'remote') if span.parent else 'root'} > {span.name}"
            for span in self.spans
            if not span.name.endswith((": queue", ": batch wait"))
        )
