"""Traces leave the process: the OpenTelemetry SDK, set up as its environment variables say, if they name a collector.

Source: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/ and
https://opentelemetry.io/docs/specs/otel/protocol/exporter/
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

from neurogrid import __version__
from neurogrid.errors import ConfigurationError
from neurogrid.p2p.streams.tracing import given_ids

__all__ = ["ENDPOINT", "TRACES_ENDPOINT", "exporting_traces", "is_wanted"]

logger = logging.getLogger(__name__)

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
# The only one that the extra brings.
PROTOCOL: Final = "http/protobuf"
# Seconds for the last spans, when the process ends.
FLUSH_TIMEOUT: Final = 3.0


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment names a collector, and does not switch the SDK off.

    Raises:
        ConfigurationError: what it names is no collector that can be spoken to.
    """
    endpoint = environment.get(TRACES_ENDPOINT) or environment.get(ENDPOINT)
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not endpoint or is_off or environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return False
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            f"{endpoint[:200]!r} is no address of a collector: give a URL, as http://127.0.0.1:4318"
        )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if environment.get(name, PROTOCOL) != PROTOCOL:
            raise ConfigurationError(
                f"{name} is {environment[name][:100]!r}: traces are sent as {PROTOCOL} alone"
            )
    return True


@contextmanager
def exporting_traces(service: str) -> Iterator[None]:
    """Send spans to the collector that the environment names, until the block is left; none if it names none.

    Once in a process: OpenTelemetry keeps the first provider that is set. What could not be sent in
    `FLUSH_TIMEOUT` seconds after the block is lost.

    Args:
        service: `service.name`, where OTEL_SERVICE_NAME does not say otherwise.

    Raises:
        ConfigurationError: the address is none, or the extra `otel` is not installed.
    """
    if not is_wanted():
        yield
        return
    from opentelemetry import trace

    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    except ModuleNotFoundError as exc:
        raise ConfigurationError(
            f"traces are to be sent ({ENDPOINT}, --otlp-endpoint), and {exc.name} is not installed: "
            "pip install -r packaging/requirements/otel.txt (in the source)"
        ) from exc
    resource = Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or service,
            "service.version": __version__,
            "service.instance.id": str(uuid.uuid4()),
        }
    )

    class Ids(RandomIdGenerator):
        """Ids drawn at random, but for a span whose ids others know already."""

        takes_given_ids = True

        def generate_trace_id(self) -> int:
            given = given_ids.get()
            return int.from_bytes(given.trace_id, "big") if given else super().generate_trace_id()

        def generate_span_id(self) -> int:
            given = given_ids.get()
            return int.from_bytes(given.span_id, "big") if given else super().generate_span_id()

    provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=Ids())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        # In a thread of its own: the exporter tries again for as long as it likes.
        ending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(FLUSH_TIMEOUT)
        if ending.is_alive():
            logger.warning("the last spans could not be sent within %g s", FLUSH_TIMEOUT)
