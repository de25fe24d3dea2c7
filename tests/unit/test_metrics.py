"""What metrics are made of: histograms, what a coordinator's generations were like, bytes by peer, a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from prometheus_client import generate_latest

from neurogrid.errors import (
    ConfigurationError,
    ModelError,
    NoRouteError,
    PeerRefusedError,
    RemoteProtocolError,
    ResponseTimeout,
    StreamBrokenError,
)
from neurogrid.inference.board.generation_log import failure_kind
from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.node.histogram import Histogram
from neurogrid.p2p.exchange.counters import OTHERS
from neurogrid.planner import Plan
from neurogrid.telemetry.coordinator_metrics import CoordinatorMetrics
from neurogrid.telemetry.gpu_metrics import GPU_METRICS, Gpu, GpuSource
from neurogrid.telemetry.metric import Reading
from neurogrid.telemetry.otlp import is_wanted
from neurogrid.telemetry.traffic_metrics import PeerBytes


def test_a_histogram_counts_each_value_once() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.0, 0.1, 0.2, 1.0, 7.0):
        histogram.observe(value)
    assert histogram.cumulative == [(0.1, 2), (1.0, 4), (float("inf"), 5)]
    assert histogram.num_values == 5
    assert histogram.total == pytest.approx(8.3)


# Generations


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_generation_is_timed_from_when_it_was_asked_for() -> None:
    clock = Clock()
    board = StatusBoard(clock=clock)
    told = board.generations
    board.generation_queued(1, 7)
    assert (told.num_running, told.num_waiting) == (0, 1)
    clock.now += 2
    board.generation_opened(1)
    assert (told.num_running, told.num_waiting) == (1, 0)
    for seconds in (1.0, 0.25, 0.5):
        clock.now += seconds
        board.token_generated(1)
    board.generation_finished(1, "length")
    clock.now += 10
    board.generation_ended(1, "")
    assert (told.num_prompt_tokens, told.num_tokens) == (7, 3)
    assert (told.queue.total, told.first_token.total) == (2, 3)
    assert (told.between_tokens.num_values, told.between_tokens.total) == (2, 0.75)
    assert told.duration.total == 13.75
    assert told.outcomes == {"stop": 0, "length": 1, "closed": 0, "failed": 0}
    assert (told.num_running, told.num_waiting) == (0, 0)


def test_a_generation_that_waited_in_vain_has_failed_and_had_no_prompt() -> None:
    board = StatusBoard()
    board.generation_queued(1, 7)
    board.generation_ended(1, "too many wait")
    board.generation_queued(2, 7)
    board.generation_opened(2)
    board.generation_ended(2, "")
    told = board.generations
    assert told.outcomes == {"stop": 0, "length": 0, "closed": 1, "failed": 1}
    assert told.num_prompt_tokens == 7


def caused(cause: Exception | None, **more: str) -> NoRouteError:
    error = NoRouteError("no", peer_id=more.pop("peer_id", "somebody"), **more)  # type: ignore[arg-type]
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (caused(ResponseTimeout("late")), "timeout"),
        (caused(StreamBrokenError("gone")), "lost"),
        (caused(None), "lost"),
        (caused(PeerRefusedError("no", code=9, text="no")), "refused"),
        (caused(RemoteProtocolError("what")), "protocol"),
        (caused(ModelError("NaN")), "not_finite"),
        (caused(StreamBrokenError("gone"), unreachable_from="another"), "cut_off"),
        (NoRouteError("nobody"), "no_worker"),
    ],
)
def test_kinds_of_failures(error: NoRouteError, kind: str) -> None:
    assert failure_kind(error) == kind
    board = StatusBoard()
    board.step_failed(1, error)
    failures = board.generations.failures
    assert {name: count for name, count in failures.items() if count} == {kind: 1}


def test_mending_is_timed_from_the_first_attempt() -> None:
    clock = Clock()
    board = StatusBoard(clock=clock)
    board.mending([range(4)])
    clock.now += 5
    board.mending([range(4)])
    clock.now += 1
    board.mended(Plan(()))
    mending = board.statistics.mending_seconds
    assert (mending.num_values, mending.total) == (1, 6)


def test_two_coordinators_in_a_process_have_metrics_of_their_own() -> None:
    boards = (StatusBoard(), StatusBoard())
    boards[0].generation_queued(1, 3)
    texts = [generate_latest(CoordinatorMetrics(board).registry).decode() for board in boards]
    assert [
        f"neurogrid_requests_waiting {n}.0" in text for n, text in zip((1, 0), texts, strict=True)
    ]


# Bytes by peer


def test_peers_beyond_the_bound_are_others_and_no_total_falls() -> None:
    peers = PeerBytes(max_peers=2)
    assert peers.update({"a": 10, "b": 20}, {"a", "b"}) == {"…a": 10, "…b": 20}
    assert peers.update({"a": 10, "b": 20, "c": 5}, {"a", "b"}) == {"…a": 10, "…b": 20, OTHERS: 5}
    # Where one is gone, the next one that comes has its place; what it had stays out of the others' total.
    named = peers.update({"a": 11, "b": 20, "c": 6, "d": 1}, {"b"})
    assert named == {"…b": 20, "…d": 1, OTHERS: 7}
    # The counters have added up those that are gone.
    named = peers.update({"b": 21, OTHERS: 17, "d": 2}, {"b"})
    assert named == {"…b": 21, "…d": 2, OTHERS: 7}
    named = peers.update({OTHERS: 40, "d": 2}, {"d"})
    assert named == {"…d": 2, OTHERS: 9}


def test_peers_of_one_label_are_one_series() -> None:
    ids = {"1-" + "x" * 8: 1, "2-" + "x" * 8: 2}
    assert PeerBytes().update(ids, set(ids)) == {"…" + "x" * 8: 3}


# A GPU


def read_gpu(gpu: Gpu | None) -> dict[str, dict[str, float]]:
    reading = Reading(GPU_METRICS)
    GpuSource(torch.device("cpu"), lambda device: gpu)(reading)
    return {
        family.name: {sample.labels["gpu"]: sample.value for sample in family.samples}
        for family in reading.families
        if family.samples
    }


def test_a_gpu_is_told_as_far_as_it_is_known() -> None:
    assert read_gpu(None) == {}
    known = {
        "neurogrid_gpu_memory_total_bytes": {"1": 100},
        "neurogrid_gpu_memory_used_bytes": {"1": 40},
        "neurogrid_gpu_memory_allocated_bytes": {"1": 30},
    }
    assert read_gpu(Gpu(1, 100, 40, 30, None)) == known
    assert read_gpu(Gpu(1, 100, 40, 30, 0.5)) == {**known, "neurogrid_gpu_use_ratio": {"1": 0.5}}


def test_a_cpu_has_no_metrics_of_a_gpu() -> None:
    reading = Reading(GPU_METRICS)
    GpuSource(torch.device("cpu"))(reading)
    assert [family.samples for family in reading.families] == [[]] * len(GPU_METRICS)


# Where traces go

COLLECTOR = "http://127.0.0.1:4318"


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{COLLECTOR}/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR, "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR, "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_traces_are_sent_where_a_collector_is_named(
    environment: dict[str, str], wanted: bool
) -> None:
    assert is_wanted(environment) is wanted


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "127.0.0.1:4318"}, "give a URL"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://a"}, "give a URL"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "http/protobuf alone",
        ),
    ],
)
def test_what_is_no_collector_is_refused(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        is_wanted(environment)


def test_without_the_extra_the_error_says_what_to_install() -> None:
    program = (
        "import os, sys\n"
        "sys.modules['opentelemetry.sdk'] = None\n"
        f"os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = '{COLLECTOR}'\n"
        "from neurogrid.cli.commands.worker import main\n"
        "sys.exit(main(['--port', '0', '--no-cache']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pip install -r packaging/requirements/otel.txt" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_commands_import_no_server_and_no_traces_unasked() -> None:
    # What lies below them imports neither in any case: test_layers.py.
    program = (
        "import sys\n"
        "import neurogrid.cli.commands.worker, neurogrid.cli.commands.coordinator\n"
        "found = {'starlette', 'hypercorn', 'opentelemetry'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
