"""What a coordinator and its workers tell those who run them: one trace over all processes, and metrics that move."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from neurogrid.inference.generation.generation_spans import DETAILED_STEPS
from tests.e2e.otlp_collector import Collector, ReceivedSpan, open_collector
from tests.e2e.server_process import ServerProcess, start_server
from tests.e2e.support import DEADLINE, ENVIRONMENT, WorkerProcess, start_worker
from tests.observability import documented_metrics, documented_spans

MAX_TOKENS = 20
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Cluster:
    """A server and two workers, all of which send their traces to one collector."""

    server: ServerProcess
    workers: list[WorkerProcess]
    collector: Collector

    def metrics_url(self, worker: WorkerProcess) -> str:
        return re.findall(r"metrics are at (\S+)", worker.log)[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setitem(ENVIRONMENT, "OTEL_BSP_SCHEDULE_DELAY", "200")  # milliseconds
        collector = stack.enter_context(open_collector())
        telemetry = ("--otlp-endpoint", collector.url)

        def start(number: int) -> WorkerProcess:
            directory = tmp_path_factory.mktemp(f"worker{number}")
            worker = start_worker(
                directory, "--memory-limit", "1GiB", "--metrics-port", "0", *telemetry
            )
            return stack.enter_context(worker)

        with ThreadPoolExecutor(2) as pool:
            workers = list(pool.map(start, range(2)))
        peers = [part for worker in workers for part in ("--peer", worker.address)]
        server = stack.enter_context(
            start_server(
                tmp_path_factory.mktemp("server"),
                *peers,
                *("--stages", "2", "--local-layers", "none"),
                *("--speculate", "off"),  # a step for each token, which is what is counted
                *telemetry,
            )
        )
        yield Cluster(server, workers, collector)


Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(url: str) -> list[Sample]:
    answer = httpx.get(url, timeout=DEADLINE)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    return [sample for family in families for sample in family.samples]


def value(samples: list[Sample], name: str, **labels: str) -> float:
    """The sum of the series of this name that have these labels."""
    found = [
        sample.value
        for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, name
    return sum(found)


def complete(cluster: Cluster, **more: object) -> httpx.Response:
    request = {
        "model": "embedded",
        "prompt": "The function",
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        **more,
    }
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    answer = httpx.post(
        f"{cluster.server.url}/v1/completions", json=request, headers=headers, timeout=DEADLINE
    )
    assert answer.status_code == 200, answer.text
    return answer


def path_of(span: ReceivedSpan, spans: list[ReceivedSpan]) -> list[str]:
    """The names from the root to this span, each with the process that it was made in."""
    by_id = {item.span_id: item for item in spans}
    found = [span]
    while found[-1].parent_id in by_id:
        found.append(by_id[found[-1].parent_id])
    assert found[-1].parent_id == PARENT_ID
    processes: list[str] = []
    names = []
    for item in reversed(found):
        if item.instance not in processes:
            processes.append(item.instance)
        names.append(f"{processes.index(item.instance)}:{item.name}")
    return names


def test_one_trace_over_all_processes(cluster: Cluster) -> None:
    complete(cluster)

    def is_whole(spans: list[ReceivedSpan]) -> bool:
        ended = [span.name for span in spans if span.trace_id == TRACE_ID]
        steps = 1 + DETAILED_STEPS
        return (
            "inference.generate" in ended
            and ended.count("inference.stage") == 2 * steps
            and ended.count("p2p.receive") >= 3 * steps
        )

    spans = [s for s in cluster.collector.wait(is_whole) if s.trace_id == TRACE_ID]
    services = {span.instance: span.service for span in spans}
    assert sorted(services.values()) == [
        "neurogrid-coordinator",
        "neurogrid-worker",
        "neurogrid-worker",
    ]
    # The chain: from the coordinator to the first worker, from there to the second, and back.
    last = [span for span in spans if span.name == "p2p.receive"][2::3]
    assert len(last) == 1 + DETAILED_STEPS
    paths = [path_of(span, spans) for span in last]
    hops = [
        *("0:p2p.send", "1:p2p.receive", "1:p2p.send", "2:p2p.receive", "2:p2p.send"),
        "0:p2p.receive",
    ]
    assert paths[0] == ["0:inference.generate", "0:inference.prefill", *hops]
    decode = ["0:inference.generate", "0:inference.decode", "0:inference.step", *hops]
    assert paths[1:] == [decode] * DETAILED_STEPS
    for stage in (span for span in spans if span.name == "inference.stage"):
        assert path_of(stage, spans)[-2].endswith(":p2p.receive")
        assert stage.attributes["neurogrid.rows"] == 1
        assert stage.attributes["neurogrid.layers"] in ("0-3", "4-7")
    (root,) = [span for span in spans if span.name == "inference.generate"]
    assert root.attributes["neurogrid.outcome"] == "length"
    assert root.attributes["neurogrid.max_tokens"] == MAX_TOKENS
    (decoding,) = [span for span in spans if span.name == "inference.decode"]
    assert decoding.attributes["neurogrid.steps"] == MAX_TOKENS - 1
    samples = [span for span in spans if span.name == "inference.sample"]
    assert len(samples) == 1 + DETAILED_STEPS


def test_metrics_of_a_generation_and_of_a_kill(cluster: Cluster) -> None:
    server, (first, second) = f"{cluster.server.url}/metrics", cluster.workers
    before = scrape(server)
    complete(cluster)
    after = scrape(server)

    def growth(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert growth("neurogrid_requests_total", outcome="length") == 1
    assert growth("neurogrid_generated_tokens_total") == MAX_TOKENS
    assert growth("neurogrid_prompt_tokens_total") > 0
    assert growth("neurogrid_time_to_first_token_seconds_count") == 1
    assert growth("neurogrid_time_between_tokens_seconds_count") == MAX_TOKENS - 1
    assert growth("neurogrid_time_between_tokens_seconds_bucket", le="+Inf") == MAX_TOKENS - 1
    assert growth("neurogrid_p2p_bytes_total", direction="sent") > 0
    route = {"route": "/v1/completions"}
    assert growth("neurogrid_http_requests_total", **route, method="POST", status="200") == 1
    assert growth("neurogrid_http_request_duration_seconds_count", **route) == 1
    assert value(after, "neurogrid_workers", health="ready") == 2
    assert value(after, "neurogrid_layers_ready") == value(after, "neurogrid_layers") == 8
    assert value(after, "neurogrid_kv_cache_limit_bytes") > 0
    assert value(after, "neurogrid_requests_running") == 0
    assert value(after, "process_resident_memory_bytes") > 0
    assert value(after, "neurogrid_weights_bytes_total", source="coordinator") > 1e6

    computed = [scrape(cluster.metrics_url(worker)) for worker in cluster.workers]
    for samples in computed:
        assert value(samples, "neurogrid_held_layers") == 4
        assert value(samples, "neurogrid_serving_coordinator") == 1
        passes = value(samples, "neurogrid_stage_duration_seconds_count", phase="decode")
        assert passes == value(samples, "neurogrid_batch_rows_count") >= MAX_TOKENS - 1
        assert value(samples, "neurogrid_stage_tokens_total", phase="prefill") > 0
        received = value(samples, "neurogrid_weights_received_bytes_total", source="coordinator")
        assert received > 1e6
    activations = [value(samples, "neurogrid_p2p_bytes_total") for samples in computed]
    assert min(activations) > 0

    with httpx.stream(
        "POST",
        f"{cluster.server.url}/v1/completions",
        json={
            "model": "embedded",
            "prompt": "The function",
            "max_tokens": 120,
            "stream": True,
            "ignore_eos": True,
        },
        timeout=DEADLINE,
    ) as answer:
        lines = (line for line in answer.iter_lines() if line)
        for _ in range(20):
            next(lines)
        assert value(scrape(server), "neurogrid_requests_running") == 1
        second.kill()
        for line in lines:
            assert '"error"' not in line
    lost = scrape(server)
    assert value(lost, "neurogrid_workers_lost_total") == 1
    assert value(lost, "neurogrid_step_failures_total") >= 1
    assert value(lost, "neurogrid_recovery_duration_seconds_count") == 1
    assert value(lost, "neurogrid_recovery_duration_seconds_sum") > 0
    assert value(lost, "neurogrid_mend_duration_seconds_count") == 1
    assert value(lost, "neurogrid_plans_total", outcome="made") >= 2
    assert value(lost, "neurogrid_workers") == 1
    assert value(scrape(cluster.metrics_url(first)), "neurogrid_held_layers") == 8

    def has_recovered(spans: list[ReceivedSpan]) -> bool:
        return {"inference.recover", "failure"} <= {
            name for span in spans for name in (span.name, *span.events)
        }

    assert cluster.collector.wait(has_recovered)


def test_what_is_exposed_is_what_the_docs_say(cluster: Cluster) -> None:
    """Names, types and labels, as the real processes have them after all that."""
    exposed: dict[str, set[tuple[str, frozenset[str]]]] = {"coordinator": set(), "worker": set()}
    urls = {
        "coordinator": f"{cluster.server.url}/metrics",
        "worker": cluster.metrics_url(cluster.workers[0]),
    }
    for role, url in urls.items():
        text = httpx.get(url, timeout=DEADLINE).text
        for family in text_string_to_metric_families(text):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
            if name.startswith("neurogrid_"):
                exposed[role] |= {(name, found) for found in labels or {frozenset()}}
    for role, found in exposed.items():
        documented = {m for m in documented_metrics() if role in m.roles}
        # There is no GPU here, and one model, of which nothing is told apart.
        elsewhere = ("neurogrid_gpu_", "neurogrid_model_")
        here = {m for m in documented if not m.name.startswith(elsewhere)}
        assert {(m.name, frozenset(m.labels)) for m in here} == {
            (name, labels) for name, labels in found if not name.startswith(elsewhere)
        }


def test_spans_are_those_of_the_docs(cluster: Cluster) -> None:
    seen: dict[str, set[str]] = {}
    for span in cluster.collector.spans:
        seen.setdefault(span.name, set()).update(span.attributes)
    documented = documented_spans("inference", "p2p")
    documented["inference.generate"] -= {"neurogrid.adapter"}  # nobody here has one
    assert seen == documented
