"""docs/observability.md and observability/: what they name exists, and what exists is in the document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from neurogrid.telemetry.build_metrics import BUILD_METRICS
from neurogrid.telemetry.coordinator_metrics import COORDINATOR_METRICS
from neurogrid.telemetry.gpu_metrics import GPU_METRICS
from neurogrid.telemetry.http_metrics import HTTP_METRICS
from neurogrid.telemetry.traffic_metrics import TRAFFIC_METRICS
from neurogrid.telemetry.training_metrics import TRAINING_METRICS
from neurogrid.telemetry.worker_metrics import WORKER_METRICS
from tests.observability import OBSERVABILITY, documented_metrics

BOTH = (*TRAFFIC_METRICS, *BUILD_METRICS)
OF_COORDINATOR = (*COORDINATOR_METRICS, *HTTP_METRICS)
OF_WORKER = (*WORKER_METRICS, *GPU_METRICS)
SPECS = {spec.name: spec for spec in (*OF_COORDINATOR, *OF_WORKER, *TRAINING_METRICS, *BOTH)}
# What Prometheus adds to what it scrapes, and what all of its clients tell.
ADDED_LABELS = {"instance", "job"}
OTHER_METRICS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}
JOBS = {"neurogrid-coordinator", "neurogrid-worker", "neurogrid-training"}

NAME = re.compile(r"\b(?:neurogrid|process)_\w+|\bup\b")
MATCHERS = re.compile(r"\{([^{}]*)\}")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")


def test_the_document_has_every_metric_as_it_is() -> None:
    roles = {
        **{spec.name: ("coordinator",) for spec in OF_COORDINATOR},
        **{spec.name: ("worker",) for spec in OF_WORKER},
        **{spec.name: ("leader",) for spec in TRAINING_METRICS},
        **{spec.name: ("coordinator", "worker") for spec in BOTH},
        **{
            spec.name: ("coordinator", "worker")
            for spec in COORDINATOR_METRICS
            if spec in WORKER_METRICS
        },
    }
    documented = documented_metrics()
    assert len(documented) == len({row.name for row in documented})
    assert {(row.name, row.kind, row.labels, row.roles, row.meaning) for row in documented} == {
        (spec.name, spec.kind, spec.labels, roles[spec.name], spec.meaning)
        for spec in SPECS.values()
    }


def test_names_say_what_is_counted_and_in_which_unit() -> None:
    for spec in SPECS.values():
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec
        assert spec.kind != "histogram" or spec.name.endswith(("_seconds", "_rows")), spec
        assert spec.meaning.endswith("."), spec


def metrics_in(query: str) -> Iterator[str]:
    """The metrics that a query names, without the ending that a histogram's series have."""
    for name in NAME.findall(MATCHERS.sub("", GROUPING.sub("", query))):
        base = re.sub(r"_(?:bucket|sum|count)$", "", name)
        yield base if base in SPECS and SPECS[base].kind == "histogram" else name


def faults(query: str) -> list[str]:
    """What a query names that there is not."""
    found = []
    names = set(metrics_in(query))
    labels = set(ADDED_LABELS)
    for name in names:
        if name in SPECS:
            labels |= {*SPECS[name].labels, *({"le"} if SPECS[name].kind == "histogram" else ())}
        elif name not in OTHER_METRICS:
            found.append(f"no metric {name}")
    used = {label for matchers in MATCHERS.findall(query) for label, _ in LABEL.findall(matchers)}
    for group in GROUPING.findall(query):
        used |= {label.strip() for label in group.split(",") if label.strip()}
    found += [f"no label {label}" for label in sorted(used - labels)]
    return found + ["names nothing"] * (not names)


def dashboard() -> dict[str, Any]:
    loaded = json.loads((OBSERVABILITY / "grafana-dashboard.json").read_text())
    assert isinstance(loaded, dict)
    return loaded


def dashboard_queries() -> list[str]:
    whole = dashboard()
    queries = [target["expr"] for panel in whole["panels"] for target in panel.get("targets", ())]
    queries += [item["expr"] for item in whole["annotations"]["list"]]
    for item in whole["templating"]["list"]:
        if item["type"] == "query":
            inner = re.fullmatch(r"label_values\((\w+), (\w+)\)", item["query"]["query"])
            assert inner is not None
            queries.append(f'{inner[1]}{{{inner[2]}=""}}')
    return queries


def alert_queries() -> list[str]:
    groups = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def test_every_query_names_what_there_is() -> None:
    queries = [*dashboard_queries(), *alert_queries()]
    assert len(queries) > 50
    assert {query: faults(query) for query in queries if faults(query)} == {}


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name for query in dashboard_queries() for name in metrics_in(query)}
    # Those say the same in another way, or of a start alone.
    unseen = {
        "neurogrid_mend_duration_seconds",
        "neurogrid_plan_duration_seconds",
        "neurogrid_worker_sessions",
        "neurogrid_held_layers",
        "neurogrid_held_weights_bytes",
        "neurogrid_weights_received_bytes_total",
        "neurogrid_free_bytes",
        "neurogrid_serving_coordinator",
        "neurogrid_promised_bytes",
        "neurogrid_given_way_total",
        "neurogrid_gpu_memory_allocated_bytes",
    }
    assert set(SPECS) - shown == unseen


def test_what_is_drawn_in_the_dashboard_is_named_in_its_legend() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = {g.strip() for q in GROUPING.findall(target["expr"]) for g in q.split(",")}
            labels = {
                label for m in metrics_in(target["expr"]) if m in SPECS for label in SPECS[m].labels
            }
            assert used <= (grouped - {""} or labels | ADDED_LABELS), (panel["title"], target)


def test_the_scraped_jobs_are_those_of_the_queries() -> None:
    scraped = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())["scrape_configs"]
    assert {job["job_name"] for job in scraped} == JOBS
    for query in [*dashboard_queries(), *alert_queries()]:
        for matchers in MATCHERS.findall(query):
            for label, value in LABEL.findall(matchers):
                assert label != "job" or all(re.fullmatch(value, job) for job in JOBS), query


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("neurogrid_request_total", "no metric neurogrid_request_total"),
        ("neurogrid_requests_total_sum", "no metric neurogrid_requests_total_sum"),
        ('neurogrid_requests_total{kind="lost"}', "no label kind"),
        ("sum by (outcome, peer) (neurogrid_requests_total)", "no label peer"),
        ("sum by (le) (neurogrid_requests_total)", "no label le"),
        ("vector(1)", "names nothing"),
    ],
)
def test_the_check_finds(query: str, fault: str) -> None:
    assert faults(query) == [fault]
