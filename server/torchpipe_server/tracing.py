"""OpenTelemetry in a worker, with the exporters set by ``OTEL_TRACES_EXPORTER`` and other variables."""

from __future__ import annotations

import os
import threading
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk._configuration import _OTelSDKConfigurator  # meant for distributions of OpenTelemetry
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from torchpipe_py import ConfigError
from torchpipe_py.methods.tracing import keep_fields_out_of_the_log


def set_up() -> trace.TracerProvider:
    """Set up the process's provider, which takes every span: sampling is decided before.

    It starts the exporters' threads, so call it after a fork. Raises ``ConfigError`` if OpenTelemetry's variables name
    something that is missing.
    """
    keep_fields_out_of_the_log()
    environment = os.environ
    if "service.name=" not in environment.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        environment.setdefault("OTEL_SERVICE_NAME", "torchpipe-serve")
    environment.setdefault("OTEL_TRACES_EXPORTER", "otlp")
    environment.setdefault("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    try:
        configurator: Any = _OTelSDKConfigurator
        configurator().configure(sampler=ParentBased(ALWAYS_ON))
    except Exception as error:
        hint = "torchpipe_py[otel] includes otlp; console is always available"
        exporter = environment["OTEL_TRACES_EXPORTER"]
        raise ConfigError(
            f"--trace-ratio: OpenTelemetry cannot be set up (OTEL_TRACES_EXPORTER={exporter}; {hint}): {error}"
        ) from error
    return trace.get_tracer_provider()


def shut_down(provider: Any, seconds: float) -> bool:
    """Export what is left for at most ``seconds``; returns whether that was enough."""
    thread = threading.Thread(target=provider.shutdown, name="torchpipe-flush", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
