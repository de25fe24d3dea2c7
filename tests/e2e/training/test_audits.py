"""Witnessed runs whose members compute again what others claim, in processes of their own."""

from __future__ import annotations

import re
from pathlib import Path

from neurogrid.training.checks import Kind, open_verdict
from neurogrid.training.runs.entries import EpochEntry
from neurogrid.training.witnessed import Eject, event_of
from tests.e2e.training.odd_auditing import PROGRAM
from tests.e2e.training.run_processes import (
    RUN_FILE,
    entries_of,
    open_run,
    rounds_of,
)
from tests.ports import free_port

AUDITED = RUN_FILE + (
    '[outer]\nmethod = "distro"\ngrace = 5.0\n[distro]\ntop_k = 32\n'
    "[epochs]\nwarmup = 60\ntrain = 60\nwitness = 10\ncooldown = 60\n"
)


def ejections(run: Path) -> list[Eject]:
    """Who was put out, by the journal."""
    return [
        event
        for entry in entries_of(run)
        if isinstance(entry, EpochEntry)
        for event in map(event_of, entry.events)
        if isinstance(event, Eject)
    ]


def test_nobody_honest_is_accused(tmp_path: Path) -> None:
    """Every claim is computed again, over three epochs; all hold, and the run learns."""
    run_file = (
        AUDITED + "rounds = 4\n[checks]\naudit = 1.0\n[stop]\nrounds = 12\n[members]\nmin = 4\n"
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        run.lead()
        for name in ("a", "b", "c", "d"):
            run.join(name)
        run.end()
        log, figures = run.log, run.figures()
        said = "".join((tmp_path / f"{name}.log").read_text() for name in ("a", "b", "c", "d"))
    assert [entry.round for entry in rounds_of(run.run)] == list(range(1, 13))
    assert not any(line.get("weights_other") for line in figures)
    losses = [line["loss"] for line in figures if "loss" in line]
    assert losses[-1] < losses[0] - 1.0
    assert ejections(run.run) == []
    assert "bands off" not in log
    assert "refused" not in log
    (made, held) = map(
        int, re.findall(r"(\d+) claims .* computed again, (\d+) of them hold", log)[-1]
    )
    # But for those of the last round, and what was still computed when the run ended.
    assert made == held > 8 * 4
    assert "begins anew" not in said


def test_who_cheats_is_ejected_and_so_is_who_accuses_falsely(tmp_path: Path) -> None:
    run_file = (
        AUDITED + "rounds = 30\n[checks]\naudit = 1.0\n[stop]\nrounds = 24\n[members]\nmin = 5\n"
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        run.lead()
        for name in ("a", "b", "c"):
            run.join(name)
        for kind in ("other", "accuser"):
            run.join(kind, program=(*PROGRAM, kind))
        run.wait(lambda: "other is ejected: it did not compute" in run.log, "other stays")
        run.wait(lambda: "accuser is ejected: it accused" in run.log, "accuser stays")
        run.wait_round(run.rounds() + 3)
        run.close()
        figures, log = run.figures(), run.log
    assert not any(line.get("weights_other") for line in figures)
    verdicts = [open_verdict(each.evidence) for each in ejections(run.run)]
    assert len(verdicts) == 2
    assert {evidence.kind for evidence, _ in verdicts} == {Kind.RESULT}
