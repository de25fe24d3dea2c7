"""Witnessed runs whose members compute again what others claim, in processes of their own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.checks import Kind, fault_of_epochs, open_verdict
from neurogrid.training.runs.entries import EpochEntry
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.runs.verdict import verify_journal
from neurogrid.training.runs.witnessed_machine import epoch_rules, epochs_of
from neurogrid.training.witnessed import Eject, EpochState, event_of
from tests.e2e import preloaded
from tests.e2e.preloaded import TRAIN
from tests.e2e.training.odd_auditing import PROGRAM
from tests.e2e.training.odd_witnessed import PROGRAM as WITNESSED_PROGRAM
from tests.e2e.training.run_processes import (
    RUN_FILE,
    RunProcesses,
    entries_of,
    open_run,
    rounds_of,
)
from tests.e2e.training.test_witnessed_runs import states, status
from tests.ports import free_port

AUDITED = RUN_FILE + (
    '[outer]\nmethod = "distro"\ngrace = 5.0\n[distro]\ntop_k = 32\n'
    "[epochs]\nwarmup = 60\ntrain = 60\nwitness = 10\ncooldown = 60\n"
)


def begin(
    run: RunProcesses,
    honest: str,
    odd: tuple[str, ...] = (),
    witnessed: tuple[str, ...] = (),
) -> None:
    """Start a run whose members all begin together."""
    run.lead()
    run.wait(lambda: (run.run / "journal").exists(), "there is no journal")
    (run.run / "pause").touch()
    for name in honest:
        run.join(name)
    for kind in odd:
        run.join(kind, program=(*PROGRAM, kind))
    for kind in witnessed:
        run.join(kind, program=(*WITNESSED_PROGRAM, kind))
    number = len(honest) + len(odd) + len(witnessed)
    run.wait(lambda: len(latest(run).pending) == number, "not all are here")
    (run.run / "pause").unlink()


def latest(run: RunProcesses) -> EpochState:
    rules = epoch_rules(parse_run_file((run.run / "run.toml").read_text()))
    return [EpochState(), *epochs_of(rules, entries_of(run.run))][-1]


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
    """Every claim is computed again, over three epochs; all hold, the run learns, and results are worth something."""
    run_file = AUDITED + (
        "rounds = 5\n[checks]\naudit = 1.0\nworth = 1.0\n[stop]\nrounds = 15\n[members]\nmin = 4\n"
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        begin(run, "abcd")
        run.end()
        log, figures = run.log, run.figures()
        said = "".join((tmp_path / f"{name}.log").read_text() for name in "abcd")
    assert [entry.round for entry in rounds_of(run.run)] == list(range(1, 16))
    assert not any(line.get("weights_other") for line in figures)
    losses = [line["loss"] for line in figures if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
    assert ejections(run.run) == []
    assert "bands off" not in log
    assert "refused" not in log
    (made, held) = map(int, re.findall(r"(\d+) claims were computed again, (\d+) of", log)[-1])
    assert made == held == 4 * 15  # those of the last round, too
    # Nobody waits for what is measured: of the last round of an epoch it may come too late.
    measured = [line for line in figures if line.get("measured")]
    assert 4 * 9 <= sum(line["measured"] for line in measured) <= 4 * 15
    assert sum(line["measured"] * line["gain"] for line in measured) > 0
    assert "is not known" not in said
    assert "gives up" not in said


def test_claims_hold_after_the_leader_was_started_again(tmp_path: Path) -> None:
    """Members come back with weights of rounds that are taken back and made once more, with others."""
    run_file = AUDITED + (
        "rounds = 4\n[checks]\naudit = 1.0\n[stop]\nrounds = 8\n[members]\nmin = 3\n"
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        begin(run, "abc")
        run.wait_round(6)
        run.kill()
        run.lead("--resume")
        run.end()
        log, figures = run.log, run.figures()
    resumed = [entry.kind for entry in entries_of(run.run)].index("resumed")
    assert any(entry.kind == "round" for entry in entries_of(run.run)[:resumed])
    assert [entry.round for entry in rounds_of(run.run)] == list(range(1, 9))
    assert "refused" not in log
    assert "other weights" not in log
    assert ejections(run.run) == []
    assert not any(line.get("weights_other") for line in figures)


def test_who_cheats_is_ejected_and_so_is_who_accuses_falsely(tmp_path: Path) -> None:
    """Each by the journal's evidence, which anybody can read; the others go on with the same weights."""
    run_file = (
        AUDITED + "rounds = 30\n[checks]\naudit = 1.0\n[stop]\nrounds = 60\n[members]\nmin = 3\n"
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        begin(run, "abc", ("other", "accuser"))
        run.wait(lambda: "other is ejected: it did not compute" in run.log, "other stays")
        run.wait(lambda: "accuser is ejected: it accused" in run.log, "accuser stays")
        run.wait_round(run.rounds() + 3)
        figures, last, found = run.figures(), latest(run), ejections(run.run)
        folded, verdict = states(run.run), verify_journal(run.run, fault_of_epochs)
        alone = verify_journal(
            Path(shutil.copy(run.run / "journal", tmp_path / "copy")), fault_of_epochs
        )
        said = (tmp_path / "a.log").read_text()
        other = Identity.load(tmp_path / "other" / "identity.key").peer_id
    assert len(last.healthy) == 3
    assert verdict.is_whole, verdict.problem
    assert not verdict.unchecked
    # A journal alone has no rules; who was put out by whose word is seen all the same.
    assert alone.is_whole, alone.problem
    assert "run.toml" in alone.unchecked
    # What the one gave is in no weights any more: from its first round on, for none of its claims held.
    seat, since = next((e.seat, e.since) for e in found if e.peer == other)
    given = [n for n, e in enumerate(rounds_of(run.run), 1) if seat in dict(e.contributions)]
    assert since == 1 <= min(given)
    assert any((seat, 1) in state.taken_back for state in folded)
    assert re.search(rf"results leave the weights: .*seat {seat} from round 1 on", said)
    assert not any(line.get("weights_other") for line in figures)
    verdicts = [open_verdict(each.evidence) for each in found]
    assert len(verdicts) == 2
    assert {evidence.kind for evidence, _ in verdicts} == {Kind.RESULT}
    for event, (evidence, findings) in zip(found, verdicts, strict=True):
        excesses = [each.excess for each in findings.values()]
        if event.peer == evidence.accused:
            assert sum(each > 1 for each in excesses) >= 1
        else:
            assert event.peer == evidence.accuser
            assert sum(each <= 1 for each in excesses) >= 2


def test_who_cheats_in_the_last_round_is_found_and_so_is_who_covers_for_it(tmp_path: Path) -> None:
    """Before the run is finished: the one did not compute, the other says that it did."""
    run_file = (
        AUDITED
        + "rounds = 5\n[checks]\naudit = 1.0\nauditors = 2\n[stop]\nrounds = 1\n[members]\nmin = 5\n"
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        begin(run, "abc", ("random", "cover"))
        run.end()
        log, found, last = run.log, ejections(run.run), latest(run)
    assert "random is ejected: it did not compute" in log
    assert re.search(r"cover is ejected: it says that the claim of \S*random\S* .* holds", log)
    assert len(last.healthy) == 3
    (evidence, findings), (other, others) = (open_verdict(each.evidence) for each in found)
    assert evidence.claim == other.claim
    assert {each.peer for each in found} <= {evidence.accused, *findings, *others}
    assert sorted(each.excess > 2 for each in others.values()) in ([False, True, True], [False])


def test_who_says_two_things_is_ejected(tmp_path: Path) -> None:
    """Two claims of one result, or two results of one round: either is signed twice, and needs no judging."""
    run_file = (
        AUDITED
        + "rounds = 30\n[checks]\naudit = 1.0\nworth = 1.0\n[stop]\nrounds = 600\n[members]\nmin = 2\n"
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        begin(run, "ab", ("twofold",), ("whisperer",))
        run.wait(lambda: "twofold is ejected: it has signed two claims" in run.log, "it stays")
        run.wait(lambda: "whisperer is out of the epoch" in run.log, "whisperer stays")
        run.wait_round(run.rounds() + 2)
        figures, last, found = run.figures(), latest(run), ejections(run.run)
        shown = status(run)
        told = preloaded.run([*TRAIN, "status", "run"], cwd=tmp_path)
        verdict = verify_journal(run.run, fault_of_epochs)
    twofold, whisperer = (
        Identity.load(tmp_path / name / "identity.key").peer_id for name in ("twofold", "whisperer")
    )
    assert set(last.barred) == {twofold, whisperer}
    (eject,) = found  # of two commitments the machine knows by itself
    assert open_verdict(eject.evidence)[0].kind is Kind.CONFLICT
    assert not any(line.get("weights_other") for line in figures)
    assert verdict.is_whole, verdict.problem
    # On the page, among the alarms, and in `train status`.
    checks = shown["checks"]
    assert checks["num_made"] >= checks["num_held"] > 0
    assert [each["kind"] for each in checks["last"]].count("ejected") == 1
    assert "cheating" in [each["kind"] for each in shown["alarms"]]
    assert f"ejected      {twofold}: with evidence" in told.stdout, told.stderr
    assert "results that were computed again hold" in told.stdout
    # What results are worth, too: of those that are members yet.
    assert {each["seat"] for each in checks["worths"]} <= set(last.healthy)
    assert all(each["num"] > 0 and abs(each["gain"]) < 1 for each in checks["worths"])
    assert re.search(r"worth +\d+ results were measured; each alone lowers the loss", told.stdout)


def test_what_is_forged_is_refused_and_who_gives_nothing_is_dropped(tmp_path: Path) -> None:
    """A forger harms nobody; one that gives no momenta, and one that claims nothing, are members no more."""
    run_file = (
        AUDITED.replace("train = 60", "train = 6").replace("witness = 10", "witness = 3")
        + "rounds = 8\n[checks]\naudit = 1.0\n[stop]\nrounds = 60\n[members]\nmin = 2\n"
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        begin(run, "abc", ("forger", "silent", "mute"))
        run.wait(lambda: "silent gives nobody what its claim" in run.log, "silent stays")
        run.wait(lambda: "commits to a result without a claim" in run.log, "mute is heard")
        run.wait(lambda: "forger sends what is refused: a finding" in run.log, "nobody heard it")
        run.wait_round(run.rounds() + 2)
        figures, found = run.figures(), ejections(run.run)
    assert found == []
    assert not any(line.get("weights_other") for line in figures)
