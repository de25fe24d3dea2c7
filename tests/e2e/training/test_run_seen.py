"""A run of real processes, as its server tells it while it goes on: who takes part, what they learn, if they agree.

And as a collector of traces gets it.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx

from neurogrid.training.runs.estimate import estimate
from neurogrid.training.runs.run_file import parse_run_file
from tests.e2e.otlp_collector import ReceivedSpan, open_collector
from tests.e2e.preloaded import DEADLINE
from tests.e2e.training.run_processes import RUN_FILE, RunProcesses, open_run
from tests.observability import documented_spans
from tests.ports import free_port

SEEN = """
[stop]
rounds = 4000
[outer]
every = 4
fragments = 1
[members]
min = 2
[checkpoints]
every = 4
[eval]
every = 4
"""


def url_of(run: RunProcesses) -> str:
    run.wait(lambda: "the page of the run: " in run.log, "there is no page")
    found = re.search(r"the page of the run: (http://127\.0\.0\.1:\d+)/", run.log)
    assert found is not None
    return found[1]


def ask(url: str, path: str) -> Any:
    answer = httpx.get(f"{url}{path}", timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_status(url: str, is_so: Any) -> dict[str, Any]:
    until = time.monotonic() + DEADLINE
    while True:
        status: dict[str, Any] = ask(url, "/v1/training/status")
        if is_so(status):
            return status
        assert time.monotonic() < until, status
        time.sleep(0.02)


def test_a_run_is_seen_while_it_goes_on(tmp_path: Path) -> None:
    with open_collector() as collector, open_run(tmp_path, free_port(), RUN_FILE + SEEN) as run:
        traced = ("--otlp-endpoint", collector.url)
        run.lead("--http-port", "0", "--metrics-port", "0", *traced)
        url = url_of(run)
        run.join("desk", *traced)
        wait_status(url, lambda status: status["waits"] == "waits for members: 1 of 2 are there")
        run.join("laptop", *traced)
        status = wait_status(url, lambda status: status["round"] >= 8 and status["rounds"])
        assert status["phase"] in ("training", "finishing")
        members = {member["name"]: member for member in status["members"]}
        assert members.keys() == {"desk", "laptop"}
        told = estimate(parse_run_file(RUN_FILE + SEEN), status["num_parameters"], num_members=2)
        for member in members.values():
            # What `neurogrid train check` says; and of the round that is under way, some.
            assert member["sent_bytes"] < 1.1 * told.sent_bytes * (member["round"] + 1)
            assert member["tokens_per_second"] > 0
            assert 0 < member["loss"] < 10
            assert -1 <= member["cosine"] <= 1
            assert member["lease_seconds"] > 0
            assert member["versions"]["torch"]
            assert member["sent_bytes"] > 0
        last = status["rounds"][-1]
        assert sorted(last["names"].values()) == ["desk", "laptop"]
        assert last["seconds"] > 0
        assert sum(each["sent_bytes"] for each in status["rounds"]) > 0
        assert status["num_parameters"] > 0
        assert status["samples"]["used"] > 0
        verdict = ask(url, "/v1/training/verify")
        assert verdict["hash_agreement_rate"] == 1.0
        assert verdict["num_members"] == 3  # the leader, too
        figures = ask(url, "/v1/training/metrics")["metrics"]
        assert figures[0]["round"] == 1
        assert max(each.get("outer_step_norm", 0.0) for each in figures) > 0
        # A round that is decided before its members have told of it has no loss of its own: the next one's has it.
        losses = [each["loss"] for each in figures if "loss" in each]
        assert losses[-1] < losses[0]
        journal = ask(url, "/v1/training/journal?most=1000")["entries"]
        assert [entry["line"] for entry in journal] == list(range(1, len(journal) + 1))
        assert {"run", "joined", "began", "dealt", "round"} <= {entry["kind"] for entry in journal}
        assert ask(url, "/v1/training/checkpoints")["checkpoints"][0]["round"] == 4
        metrics = httpx.get(f"{url}/metrics", timeout=30).text
        assert "neurogrid_training_agreement_ratio 1.0" in metrics
        told_bytes = re.findall(
            r'neurogrid_training_member_bytes_total\{direction="(\w+)",peer="\S+"\} (\S+)', metrics
        )
        assert sorted(way for way, _ in told_bytes) == ["received", "received", "sent", "sent"]
        assert all(float(num) > 0 for _, num in told_bytes)
        spans = collector.wait(lambda spans: bool(whole_rounds(spans)))
        told = {
            name: {key for span in spans if span.name == name for key in span.attributes}
            for name in {span.name for span in spans}
        }
        assert told == documented_spans("training")


def whole_rounds(spans: list[ReceivedSpan]) -> list[str]:
    """Traces of rounds that leader and both members told of, with a checkpoint."""
    found = []
    for root in spans:
        trace = [span for span in spans if span.trace_id == root.trace_id]
        inner = [span for span in trace if span.parent_id == root.span_id]
        members = [span for span in inner if span.name == "training.member"]
        names = {span.name for span in inner}
        if root.parent_id or len(members) < 2 or "training.checkpoint" not in names:
            continue
        assert root.name == "training.round"
        numbers = {span.attributes["neurogrid.round"] for span in (root, *members)}
        assert len(numbers) == 1
        for member in members:
            parts = {span.name for span in trace if span.parent_id == member.span_id}
            assert parts >= {"training.train", "training.average", "training.apply"}
        assert len({span.service for span in trace}) == 2
        assert len({span.instance for span in trace}) == 3
        found.append(root.trace_id)
    return found
