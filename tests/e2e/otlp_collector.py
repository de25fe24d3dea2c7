"""A collector of traces: what the OpenTelemetry collector is, as far as these tests need it."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.e2e.support import DEADLINE

__all__ = ["Collector", "ReceivedSpan", "open_collector"]


@dataclass(frozen=True)
class ReceivedSpan:
    """A span that came, and from which process."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, object]
    events: tuple[str, ...]
    is_error: bool


class Collector:
    """What has come so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._spans: list[ReceivedSpan] = []
        self._came = threading.Condition()

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All of them, by their start."""
        with self._came:
            return sorted(self._spans, key=lambda span: span.start)

    def wait(self, is_enough: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """The spans, once enough have come."""
        deadline = time.monotonic() + DEADLINE
        while not is_enough(self.spans):
            with self._came:
                assert self._came.wait(deadline - time.monotonic()), self._spans
        return self.spans

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._came:
            for resource in request.resource_spans:
                told = {item.key: _plain(item.value) for item in resource.resource.attributes}
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self._spans.append(
                            ReceivedSpan(
                                name=span.name,
                                service=str(told["service.name"]),
                                instance=str(told["service.instance.id"]),
                                trace_id=span.trace_id.hex(),
                                span_id=span.span_id.hex(),
                                parent_id=span.parent_span_id.hex(),
                                start=span.start_time_unix_nano,
                                end=span.end_time_unix_nano,
                                attributes={a.key: _plain(a.value) for a in span.attributes},
                                events=tuple(event.name for event in span.events),
                                is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                            )
                        )
            self._came.notify_all()


def _plain(value: AnyValue) -> object:
    return getattr(value, value.WhichOneof("value"))


@contextmanager
def open_collector() -> Iterator[Collector]:
    """Take traces over OTLP/HTTP until the block is left."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                data = gzip.decompress(data)
            collector.take(ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
