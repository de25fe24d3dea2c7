"""A run of real processes in one look: where its loss goes, whose weights are others, what its members are worth."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.preloaded import DEADLINE
from tests.e2e.training.other_digest import FIRST_ROUND
from tests.e2e.training.run_processes import RUN_FILE, open_run
from tests.e2e.training.test_run_seen import ask, url_of
from tests.ports import free_port

OTHER = (sys.executable, str(Path(__file__).with_name("other_digest.py")))
RUN = """
[stop]
rounds = 4000
[outer]
every = 4
fragments = 1
[members]
min = 2
"""


def wait_global(url: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    until = time.monotonic() + DEADLINE
    while True:
        told: dict[str, Any] = ask(url, "/v1/training/global")
        if is_so(told):
            return told
        assert time.monotonic() < until, told
        time.sleep(0.05)


def test_a_run_is_seen_as_a_whole(tmp_path: Path) -> None:
    with open_run(tmp_path, free_port(), RUN_FILE + RUN) as run:
        run.lead("--http-port", "0")
        url = url_of(run)
        assert ask(url, "/v1/training/global")["loss"]["trend"]["direction"] == "unknown"
        run.join("fine")
        run.join("other", program=OTHER)
        told = wait_global(
            url,
            lambda told: (
                told["loss"]["trend"]["direction"] not in ("unknown", "unclear")
                and bool(told["agreement"]["differing"])
            ),
        )
        assert told["loss"]["trend"]["direction"] == "falling"
        assert told["loss"]["short"] < told["loss"]["long"]
        assert told["tokens_per_second"]["short"] > 0
        assert told["gradient_norm"]["short"] > 0
        [other] = told["agreement"]["differing"]
        # It need not tell of each round.
        assert FIRST_ROUND <= other["since_round"] <= other["round"]
        assert (other["name"], told["agreement"]["num_members"]) == ("other", 3)
        assert not told["training_verified"]
        assert "of the members have the same weights" in told["reason"]
        later = wait_global(
            url, lambda now: now["agreement"]["differing"][0]["round"] > other["round"]
        )
        assert later["agreement"]["differing"][0]["since_round"] == other["since_round"]
        members = {each["name"]: each for each in later["members"]}
        assert {name: each["agrees"] for name, each in members.items()} == {
            "fine": True,
            "other": False,
        }
        assert sum(each["worth"] for each in members.values()) == pytest.approx(1, abs=0.2)
        assert all(0 < each["in_time"] <= 1 for each in members.values())
        assert sum(each["num_samples"] for each in members.values()) > 0
        assert "other has other weights than the leader after round" in run.log
        lines = run.figures()
    assert all(line["gradient_norm"] > 0 for line in lines[2:])
