"""Logs as programs read them: every line an object, whatever is logged."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from neurogrid.cli.terminal.logs import set_up_logging
from neurogrid.cli.terminal.show import TerminalProgress
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.planner import Plan, PlannedStage


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    loggers = logging.root, logging.getLogger("libp2p"), logging.getLogger("neurogrid")
    before = [(logger.level, logger.handlers[:]) for logger in loggers]
    last_resort = logging.lastResort
    yield
    logging.lastResort = last_resort
    logging.captureWarnings(False)
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)


class Stderr:
    """What a command has written there. To be made in the test: pytest changes the streams before each phase."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, level: str = "info", as_json: bool = True
    ) -> None:
        self.stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", self.stream)
        self.screen = set_up_logging(level, as_json=as_json)

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


def test_one_object_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch)
    logger = logging.getLogger("neurogrid.fleet.placing.fleet")
    logger.warning("lost\n%s", "worker", extra={"peer_id": "12D3Koo", "layers": [0, 4]})
    logger.debug("nobody asked")
    (line,) = stderr.objects
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "warning",
        "logger": "neurogrid.fleet.placing.fleet",
        "message": "lost\nworker",
        "peer_id": "12D3Koo",
        "layers": [0, 4],
    }


def test_an_exception_comes_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch)
    try:
        raise ValueError("torn")
    except ValueError:
        logging.getLogger("neurogrid").exception("a bug")
    (line,) = stderr.objects
    assert (line["level"], line["message"]) == ("error", "a bug")
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: torn")


def test_what_json_has_not_is_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch)
    extra = {"rate": float("nan"), "path": logging.Logger, "text": "half \ud83d"}
    logging.getLogger("neurogrid").info("odd", extra=extra)
    (line,) = stderr.objects
    assert line["rate"] == "nan"
    assert line["message"] == "odd"
    assert line["text"] == extra["text"]


def test_progress_and_warnings_are_objects_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch)
    stderr.screen.say("plan: embedded", event="planned", num_layers=8)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", UserWarning, stacklevel=1)
    planned, warned = stderr.objects
    assert (planned["message"], planned["event"], planned["num_layers"]) == (
        "plan: embedded",
        "planned",
        8,
    )
    assert planned["level"] == "info"
    assert (warned["level"], warned["logger"]) == ("warning", "py.warnings")


def test_fields_cannot_pose_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch)
    logging.getLogger("neurogrid").info("true", extra={"level": "none", "time": 0, "logger": "x"})
    (line,) = stderr.objects
    assert (line["level"], line["logger"], line["message"]) == ("info", "neurogrid", "true")


def test_lines_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch, as_json=False)
    logging.getLogger("neurogrid.p2p").warning("slow")
    logging.getLogger("libp2p").error("of no interest")
    astray = logging.getLogger("astray")  # as libp2p makes its own when it is imported
    astray.propagate = False
    astray.error("of no interest")
    stderr.screen.say("plan: embedded", event="planned")
    assert stderr.stream.getvalue() == "W slow\nplan: embedded\n"


def test_debug_is_for_what_we_say_ourselves(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch, level="debug")
    apart = logging.getLogger("apart")
    apart.propagate = False
    for name in ("neurogrid.p2p", "libp2p.host", "transformers", "markdown_it", "hpack.hpack"):
        logging.getLogger(name).debug("close look")
    apart.warning("close look")
    logging.getLogger("libp2p.host").error("of no interest")
    logging.getLogger("markdown_it").warning("slow")
    assert [line["logger"] for line in stderr.objects] == ["neurogrid.p2p", "markdown_it"]


def test_no_debugging_is_said_for_info_after_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_logging("debug")
    stderr = Stderr(monkeypatch)
    logging.getLogger("neurogrid.p2p").debug("close look")
    assert stderr.objects == []


def test_what_libp2p_says_is_for_debug_all(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch, level="debug-all", as_json=False)
    logging.getLogger("libp2p.host.basic_host").warning("slow")
    assert stderr.stream.getvalue().endswith(" W libp2p.host.basic_host: slow\n")
    assert stderr.stream.getvalue().count("slow") == 1


def test_for_debug_all_whatever_is_logged_is_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch, level="debug-all")
    stray = logging.getLogger("stray")
    stray.propagate = False
    for logger in (stray, logging.getLogger("libp2p.host"), logging.getLogger("neurogrid")):
        logger.warning("slow")
    assert [line["logger"] for line in stderr.objects if line["message"] == "slow"] == [
        "stray",
        "libp2p.host",
        "neurogrid",
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_people_see_names_beside_the_peer_ids_that_are_logged(
    monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    stderr = Stderr(monkeypatch, as_json=as_json)
    peer_id = "12D3KooW" + "A" * 44
    joined = WorkerInfo(peer_id, "CPU", 10**9, "", True, (), machine="attic", address="192.168.1.7")
    with TerminalProgress(stderr.screen) as progress:
        progress.joined(joined)
        logging.getLogger("neurogrid.p2p").warning("%s is silent", peer_id)
        progress.lost(peer_id, range(4), "it is silent")
    if as_json:
        # Programs have the name in a field of its own, and the message as it is.
        first, silent, _ = stderr.objects
        assert (first["peer_id"], first["machine"]) == (peer_id, "attic")
        assert silent["message"] == f"{peer_id} is silent"
    else:
        assert stderr.stream.getvalue().splitlines() == [
            "worker attic …AAAAAAAA (192.168.1.7) joined: CPU, 1.0 GB free",
            f"W {peer_id} (attic) is silent",
            "lost worker attic …AAAAAAAA (192.168.1.7) with layers 0 to 3: it is silent",
        ]


def test_a_machine_that_computes_alone_says_one_line_of_its_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stderr = Stderr(monkeypatch, as_json=False)
    own, other = ("12D3KooW" + letter * 44 for letter in "AB")
    here = WorkerInfo(own, "this machine: CPU", 10**9, "", True, (), machine="desk")
    stage = PlannedStage(own, 0, 8, 7_800_000)
    with TerminalProgress(stderr.screen) as progress:
        progress.listening(own, ["/ip4/127.0.0.1/tcp/9000"])
        progress.model_read("embedded", 8)
        progress.planned(Plan((stage,)), [here], 8)
        progress.already_held(own, 5_700_000)
        progress.ready()
        alone = "embedded, 8 layers in 7.8 MB, on this machine: CPU, 1.0 GB free"
        assert stderr.stream.getvalue().splitlines() == [alone]
        # As soon as there is somebody else, who has what is to be known, and so is what was sent.
        beside = WorkerInfo(other, "CPU", 10**9, "", True, (), machine="attic")
        progress.planned(Plan((replace(stage, peer_id=other),)), [here, beside], 8)
        progress.ready()
    told = stderr.stream.getvalue()
    assert "plan: embedded, 8 layers in 1 stage\n  stage 1  layers 0-7" in told
    assert told.endswith("weights: nothing to send\n")
