"""What the leader of a run serves, asked over HTTP on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import trio
from prometheus_client import generate_latest

from neurogrid.server.http.guard import Access
from neurogrid.server.http.http_server import open_http
from neurogrid.server.training.routes import TRAINING_PATHS
from neurogrid.server.training_app import training_app
from neurogrid.telemetry.training_metrics import TRAINING_METRICS, TrainingMetrics
from neurogrid.training.leading.board import RunBoard
from neurogrid.training.runs.entries import BannedEntry
from tests.unit.training.test_run_board import RUN, RUN_ID, Run


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    with run.board.watching(run.look):
        run.join("a", "b")
        for loss in (4.0, 3.6, 3.2, 2.9, 2.5):
            run.decide("a", "b", loss=loss)
        run.decide("a", loss=2.4)
        run.report("a", batch_seconds=0.5, loss_sum=3.0, num_tokens=1, round=6, digest=bytes(32))
        run.report("b", state="averaging", done=5, round=6, digest=bytes(32))
        run.now += 20
        yield run


def asked(board: RunBoard, *paths: str, key: str = "", keys: tuple[str, ...] = ()) -> list[Any]:
    """Answers of a real server to requests for these paths."""

    async def main() -> list[Any]:
        metrics = TrainingMetrics(board)
        app = training_app(board, metrics.registry, access=Access(keys), statistics=metrics.http)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with trio.fail_after(30):
            async with (
                open_http(app, host="127.0.0.1", port=0) as url,
                httpx.AsyncClient(base_url=url, headers=headers) as client,
            ):
                return [await client.get(path) for path in paths]

    return trio.run(main)


def test_the_status_says_how_the_run_stands(run: Run) -> None:
    [answer] = asked(run.board, "/v1/training/status")
    status = answer.json()
    assert (status["run_id"], status["phase"], status["round"]) == (RUN_ID.hex(), "training", 6)
    assert status["waits"] == "round 7 waits for a"
    assert [member["name"] for member in status["members"]] == ["a", "b"]
    assert status["rounds"][-1]["late"] == [1]
    assert status["rounds"][-1]["figures"]["loss"] == 2.4


def test_it_answers_before_the_run_has_begun() -> None:
    answers = asked(RunBoard(RUN), *TRAINING_PATHS)
    assert [answer.status_code for answer in answers] == [200] * len(TRAINING_PATHS)
    assert answers[0].json()["waits"] == "the model and the data are opened"


def test_metrics_are_the_lines_of_the_run(run: Run) -> None:
    every, later, few = asked(
        run.board,
        *("/v1/training/metrics", "/v1/training/metrics?after=4", "/v1/training/metrics?most=3"),
    )
    assert [line["loss"] for line in every.json()["metrics"]] == [4.0, 3.6, 3.2, 2.9, 2.5, 2.4]
    assert [line["round"] for line in later.json()["metrics"]] == [5, 6]
    assert [line["round"] for line in few.json()["metrics"]] in ([1, 3, 6], [1, 4, 6])
    assert few.json()["total"] == 6


@pytest.mark.parametrize("query", ["most=1", "most=x", "most=1e3", "after=-1", f"after={10**30}"])
def test_a_wrong_query_is_named(run: Run, query: str) -> None:
    [answer] = asked(run.board, f"/v1/training/metrics?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_the_journal_ends_with_what_was_written_last(run: Run) -> None:
    [answer] = asked(run.board, "/v1/training/journal?most=2")
    entries = answer.json()["entries"]
    assert [entry["line"] for entry in entries] == [len(run.recorded) - 1, len(run.recorded)]
    assert {"kind", "time"} <= entries[-1].keys()


def test_verify_says_whether_it_learns(run: Run) -> None:
    [answer] = asked(run.board, "/v1/training/verify")
    told = answer.json()
    assert (told["training_verified"], told["loss_trend"]) == (True, "improving")
    assert told["hash_agreement_rate"] == 1.0
    assert told["sync_success_rate"] == pytest.approx(11 / 12)
    assert told["alarms"] == []


def test_the_whole_run_is_in_one_look(run: Run) -> None:
    for number in range(7, 11):
        run.decide("a", "b", loss=2.4 - 0.1 * number)
    [answer] = asked(run.board, "/v1/training/global")
    assert answer.json()["training_verified"]
    run.differing = {"b": 9}
    [answer] = asked(run.board, "/v1/training/global")
    told = answer.json()
    assert (told["round"], told["training_verified"]) == (run.machine.state.round, False)
    assert "of the members have the same weights" in told["reason"]
    assert told["loss"]["latest"] == pytest.approx(1.4)
    assert told["loss"]["latest"] < told["loss"]["short"] < told["loss"]["long"]
    trend = told["loss"]["trend"]
    assert (trend["direction"], trend["num"]) == ("falling", 10)
    assert trend["low"] <= trend["change"] <= trend["high"] < 0
    assert told["eval_loss"] == {
        **dict.fromkeys(("latest", "short", "long")),
        "trend": {"direction": "unknown", "num": 0, **dict.fromkeys(("change", "low", "high"))},
    }
    assert told["tokens_per_second"]["latest"] > 0
    [other] = told["agreement"]["differing"]
    assert (other["name"], other["since_round"]) == ("b", 9)
    worth = {each["name"]: each["worth"] for each in told["members"]}
    assert worth["a"] > worth["b"] > 0  # which was late once
    assert sum(worth.values()) == pytest.approx(1.0)
    assert {each["name"]: each["agrees"] for each in told["members"]} == {"a": True, "b": False}
    assert sum(each["num_samples"] for each in told["members"]) == run.machine.state.num_used


def test_bans_are_told_while_they_are_in_force(run: Run) -> None:
    now = int(run.now)
    run.told(BannedEntry("c", 1, now, now + 60, b"", "too much"))
    run.told(BannedEntry("d", 2, now, 0, bytes(32), "a false claim"))
    run.told(BannedEntry("c", 3, now, now + 600, b"", "again"))
    [answer] = asked(run.board, "/v1/training/global")
    assert [(ban["peer"], ban["number"], ban["reason"]) for ban in answer.json()["bans"]] == [
        ("d", 2, "a false claim"),
        ("c", 3, "again"),
    ]
    run.now += 600
    [answer] = asked(run.board, "/v1/training/global")
    assert [ban["peer"] for ban in answer.json()["bans"]] == ["d"]
    run.board.replay(run.recorded, [])
    assert [ban.peer for ban in run.board.bans] == ["d"]


def test_a_loss_that_is_not_a_number_is_null(run: Run) -> None:
    run.decide("a", "b", loss=float("nan"))
    status, verify = asked(run.board, "/v1/training/status", "/v1/training/verify")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for answer in (status, verify):
        json.loads(answer.content, parse_constant=refuse)
    assert verify.json()["loss"] is None
    assert not verify.json()["training_verified"]


def test_the_document_has_each_path(run: Run) -> None:
    [answer] = asked(run.board, "/openapi.json")
    document = answer.json()
    assert set(TRAINING_PATHS) <= document["paths"].keys()
    assert document["info"]["description"].startswith("A training run")
    answers = asked(run.board, *TRAINING_PATHS)
    for path, told in zip(TRAINING_PATHS, answers, strict=True):
        ok = document["paths"][path]["get"]["responses"]["200"]
        schema = ok["content"]["application/json"]["schema"]
        assert set(schema["required"]) <= told.json().keys()
        assert set(schema["properties"]) <= told.json().keys(), path


def test_with_keys_all_but_the_page_and_the_document_needs_one(run: Run) -> None:
    key = "k" * 20
    guarded = [*TRAINING_PATHS, "/metrics"]
    for answer in asked(run.board, *guarded, keys=(key,)):
        assert answer.status_code == 401
    for answer in asked(run.board, "/", "/openapi.json", "/health", keys=(key,)):
        assert answer.status_code == 200
    for answer in asked(run.board, *guarded, keys=(key,), key=key):
        assert answer.status_code == 200


def test_metrics_for_prometheus(run: Run) -> None:
    text = generate_latest(TrainingMetrics(run.board).registry).decode()
    for spec in TRAINING_METRICS:
        assert f"# TYPE {spec.name.removesuffix('_total')}" in text, spec.name
    lines = text.splitlines()
    for line in (
        'neurogrid_training_phase{phase="training"} 1.0',
        "neurogrid_training_rounds_total 6.0",
        'neurogrid_training_contributions_total{when="in_time"} 11.0',
        'neurogrid_training_contributions_total{when="late"} 1.0',
        "neurogrid_training_loss 2.4",
        'neurogrid_training_members{state="averaging"} 1.0',
        "neurogrid_training_agreement_ratio 1.0",
    ):
        assert line in lines
    assert not any(line.startswith("neurogrid_training_eval_loss ") for line in lines)
