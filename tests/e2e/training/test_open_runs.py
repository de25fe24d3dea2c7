"""Open runs in processes of their own: strangers on trial, and what an invitation is good for."""

from __future__ import annotations

import time
from pathlib import Path

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.checks import fault_of_epochs, open_proof, open_verdict
from neurogrid.training.joining import Invitation
from neurogrid.training.runs.entries import BannedEntry, EpochEntry, RunEntry
from neurogrid.training.runs.verdict import verify_journal
from neurogrid.training.witnessed import Admitted, Event, Refused, Trial, event_of
from tests.e2e.training.odd_auditing import PROGRAM
from tests.e2e.training.run_processes import (
    RUN_FILE,
    RunProcesses,
    entries_of,
    open_run,
    rounds_of,
)
from tests.e2e.training.test_witnessed_runs import states
from tests.ports import free_port

OPEN = RUN_FILE + (
    '[outer]\nmethod = "distro"\ngrace = 5.0\n[distro]\ntop_k = 32\n[checks]\naudit = 0.25\n'
    "[epochs]\nrounds = 3\nwarmup = 60\ntrain = 20\nwitness = 10\ncooldown = 60\n"
    "[members]\nmin = 3\nopen = true\n"
)


def invite(run: RunProcesses, *names: str) -> None:
    """Members that the leader trusts."""
    run.wait(lambda: (run.run / "invitation").exists(), "there is no invitation")
    for name in names:
        run.join(name, "--invitation", "run/invitation")


def events_of(run: Path) -> list[Event]:
    return [
        event_of(event)
        for entry in entries_of(run)
        if isinstance(entry, EpochEntry)
        for event in entry.events
    ]


def test_an_honest_stranger_comes_in_and_one_that_cheats_does_not(tmp_path: Path) -> None:
    with open_run(tmp_path, free_port(), OPEN + "[stop]\nrounds = 500\n") as run:
        run.lead()
        invite(run, "a", "b", "c")
        run.join("fine")
        run.join("random", program=(*PROGRAM, "random"))
        run.wait(lambda: "random fails its trial, and is banned for 60 min" in run.log, "no ban")
        run.wait(lambda: "fine counts from the next round" in run.log, "it is not taken")
        run.wait_round(run.rounds() + 4)
        figures, log = run.figures(), run.log
        banned = (tmp_path / "random.log").read_text()
    fine, random = (
        Identity.load(tmp_path / n / "identity.key").peer_id for n in ("fine", "random")
    )
    assert "a is invited" in log
    assert "fine was late" not in log
    assert "banned for 60 min: it did not compute what it claimed" in banned
    assert not any(line.get("weights_other") for line in figures)
    events, folded = events_of(run.run), states(run.run)
    assert {e.peer for e in events if isinstance(e, Trial)} == {fine, random}
    (admitted,) = [each for each in events if isinstance(each, Admitted)]
    claim, findings = open_proof(admitted.evidence, fine)
    assert admitted.peer == fine
    assert len(findings) == 2
    (refused,) = [each for each in events if isinstance(each, Refused)]
    assert refused.peer == random
    verdict = verify_journal(run.run, fault_of_epochs)
    assert verdict.is_whole, verdict.problem
    evidence, _ = open_verdict(refused.evidence)
    assert evidence.accused == random
    (ban,) = [each for each in entries_of(run.run) if isinstance(each, BannedEntry)]
    assert (ban.peer, ban.until - ban.at) == (random, 3600)
    # What they gave on trial is in no round; what the one gave afterwards, is.
    peers = {each.seat: each.peer for state in folded for each in state.members}
    given = [peers[seat] for entry in rounds_of(run.run) for seat, _ in entry.contributions]
    assert random not in given
    assert fine in given
    tried = {peers[each.seat] for state in folded for each in state.tried}
    assert tried == {fine, random}
    first = next(
        n
        for n, entry in enumerate(rounds_of(run.run), 1)
        if any(peers[seat] == fine for seat, _ in entry.contributions)
    )
    assert first > claim.round & 0xFFFFFFFF


def test_an_invitation_is_good_for_its_time_its_run_and_its_uses(tmp_path: Path) -> None:
    with open_run(tmp_path, free_port(), OPEN + "[stop]\nrounds = 500\n") as run:
        run.lead()
        run.wait(lambda: (run.run / "invitation").exists(), "there is no invitation")
        leader = Identity.load(run.run / "cluster" / "identity.key")
        (began,) = [each for each in entries_of(run.run) if isinstance(each, RunEntry)]
        now, other = int(time.time()), Identity.generate()
        this = Invitation(began.run, leader.peer_id, 7, now - 100, now + 10_000, max_uses=1)
        for name, invitation, identity in (
            ("once", this, leader),
            ("expired", Invitation(began.run, leader.peer_id, 8, now - 100, now - 1), leader),
            ("foreign", Invitation(bytes(16), leader.peer_id, 9, now - 100, now + 10_000), leader),
            ("forged", Invitation(began.run, other.peer_id, 7, now - 100, now + 10_000), other),
        ):
            (tmp_path / name).write_bytes(invitation.sign(identity))
        run.join("a", "--invitation", "once")
        run.wait(lambda: "a is invited" in run.log, "a is not taken")
        for name, file in (("b", "once"), ("c", "expired"), ("d", "foreign"), ("e", "forged")):
            run.join(name, "--invitation", file)
        for said in (
            "b takes no part: used up",
            "c takes no part: expired",
            "d takes no part: wrong run",
            "e shows an invitation that is none",
        ):
            run.wait(lambda said=said: said in run.log, f"not said: {said}")  # type: ignore[misc]
        run.wait(
            lambda: "no more: used up" in (tmp_path / "b.log").read_text(), "b is not told why"
        )
        # A leader that comes back knows which uses are spent.
        run.kill()
        run.kill("b")
        run.lead("--resume")
        run.join("b", "--invitation", "once")
        run.wait(lambda: run.log.count("b takes no part: used up") == 2, "b is taken")
        # Whoever was taken is still, or again where the leader was there before it.
        a = Identity.load(tmp_path / "a" / "identity.key").peer_id
        run.wait(lambda: a in dict(states(run.run)[-1].pending), "a is not taken again")
    assert not any(isinstance(each, Trial) for each in events_of(run.run))
