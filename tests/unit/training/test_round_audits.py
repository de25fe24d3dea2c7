"""What a leader makes of claims, findings and strangers' trials: driven through the machine of the run itself."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.checks import (
    Claim,
    ClaimRules,
    Finding,
    Settings,
    fault_of_epochs,
    open_proof,
    open_verdict,
    pack_conflict,
    pack_evidence,
    pack_verdict,
    sign_claim,
    sign_finding,
)
from neurogrid.training.joining import Invitation
from neurogrid.training.leading.witnessed.audits import RoundAudits
from neurogrid.training.leading.witnessed.epoch_messages import round_works
from neurogrid.training.leading.witnessed.trials import Trials
from neurogrid.training.runs.entries import Entry, EpochEntry, JoinedEntry, RunEntry
from neurogrid.training.runs.machine import Rules
from neurogrid.training.runs.run_file import ChecksSection
from neurogrid.training.runs.signatures import sign
from neurogrid.training.runs.state import RunState
from neurogrid.training.runs.witnessed_machine import WitnessedMachine, begun_epochs
from neurogrid.training.wire.runs import (
    RoundCommitment,
    RoundEvidence,
    RoundFinding,
    RoundMeasure,
)
from neurogrid.training.witnessed import (
    Admitted,
    Commitment,
    Committed,
    Eject,
    EpochPhase,
    EpochRules,
    Event,
    Health,
    Joined,
    Left,
    Refused,
    Trial,
    Warm,
    Witnessed,
    WitnessProof,
    event_json,
)

RUN, START = bytes(range(16)), bytes(32)
SIZES = (4000,)
LEADER = Identity.generate()
IDENTITIES = [Identity.generate() for _ in range(8)]
SEAT_OF = {each.peer_id: number for number, each in enumerate(IDENTITIES)}
RULES = ClaimRules(RUN, Settings(((4, 4),), 2), lambda step: 0.1, lambda seat, number: 7, START)
EPOCHS = EpochRules(
    min_members=2, max_members=8, rounds=50, batches=0, warmup=9, train=9, witness=9, cooldown=9
)
OFF = {"holds": 0.0, "between": 1.5, "accuses": 5.0}


def named(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


class Audited:
    """A run whose members claim as they are to, as its leader has it.

    Attributes:
        warned: what people were told.
        claims: of the last round, by seat: the claim, and its signed form.
    """

    def __init__(self, num: int = 6, **checks: Any) -> None:
        self.section = ChecksSection(**{"audit": 1.0, **checks})
        rules = Rules(2, 8, 4, 1, 1, False, None, None)
        self.machine = WitnessedMachine(rules, EPOCHS, RunState(SIZES, seed=7), begun_epochs())
        self.warned: list[str] = []
        self.entries: list[Entry] = [RunEntry(RUN, LEADER.peer_id, START, START, SIZES, 7)]
        self.audits = RoundAudits(
            RULES, self.section, self.machine, 30.0, lambda step: b"", self.called, self.warned.append
        )  # fmt: skip
        self.now, self.num_draws = 100.0, 0
        self.num_claims: dict[int, int] = {}
        self.momenta: dict[int, bytes] = {}
        self.claims: dict[int, tuple[Claim, bytes]] = {}
        self.key = (0, 0)
        self.tick(*(Joined(each.peer_id, 1) for each in IDENTITIES[:num]))

    def called(self, peer: str) -> str:
        return f"m{SEAT_OF.get(peer, '?')}"

    def tick(self, *events: Event, seconds: float = 0.0) -> bool:
        self.now += seconds
        self.num_draws += 1
        before = self.machine.epoch
        draw = named("draw", self.num_draws)
        changed = self.machine.tick(self.now, list(events), draw, self.called)
        self.entries += self.machine.drain()
        if changed:
            self.audits.ticked(before)
        return changed

    def begin(self) -> None:
        epoch = self.machine.epoch
        self.tick(*(Warm(seat, epoch.epoch) for seat in epoch.healthy))
        self.tick()
        assert self.machine.epoch.phase is EpochPhase.ROUND_TRAIN

    def claim(self, seat: int) -> tuple[RoundCommitment, Commitment]:
        """What a seat says that it computed in the round under way."""
        epoch = self.machine.epoch
        member, work = (
            epoch.member(seat),
            next(w for w in round_works(self.machine) if w.seat == seat),
        )
        assert member is not None
        facts = RULES.facts(
            (seat, member.incarnation), epoch.epoch, epoch.round, epoch.made,
            ((each.slice, each.start, each.stop) for each in work.ranges), named("weights", epoch.made),
        )  # fmt: skip
        self.num_claims[seat] = number = self.num_claims.get(seat, 0) + 1
        new = [named(seat, number, each) for each in range(3)]
        claim = Claim(
            RUN, seat, member.incarnation, number, facts.round, facts.weights, facts.settings,
            facts.samples, self.momenta.get(seat, START), *new,
        )  # fmt: skip
        signed = sign_claim(claim, IDENTITIES[SEAT_OF[member.peer]])
        self.claims[seat] = claim, signed
        commitment = Commitment(
            seat, epoch.epoch, epoch.round, work.first_batch, work.num_batches, claim.result
        )
        said = RoundCommitment(
            RUN, seat, epoch.epoch, epoch.round, work.first_batch, work.num_batches, claim.result,
            bytes(64), signed,
        )  # fmt: skip
        return said, commitment

    def make_round(self) -> None:
        """One round: each member claims, and each that counts bears witness."""
        epoch = self.machine.epoch
        self.key, self.claims = (epoch.epoch, epoch.round), {}
        told = []
        for work in round_works(self.machine):
            if work.seat not in epoch.healthy:
                continue
            said, commitment = self.claim(work.seat)
            member = epoch.member(work.seat)
            assert member is not None
            self.audits.take_claim(said, member)
            signature = sign(IDENTITIES[SEAT_OF[member.peer]], commitment.signed_bytes(RUN))
            told.append(Committed(commitment, signature))
        self.tick(*told)
        commitments = [each.commitment for each in told]
        for seat in sorted(set(epoch.healthy) & set(epoch.seats)):
            member = epoch.member(seat)
            assert member is not None
            proof = WitnessProof.of(seat, epoch.seed, epoch.epoch, epoch.round, commitments)
            signature = sign(IDENTITIES[SEAT_OF[member.peer]], proof.signed_bytes(RUN))
            self.tick(Witnessed(proof, signature))
        while self.key == (self.machine.epoch.epoch, self.machine.epoch.round):
            self.tick(seconds=10)  # whatever is waited for
        for seat, (claim, _) in self.claims.items():
            if seat in {each.seat for each in self.machine.epoch.agreed}:
                self.momenta[seat] = claim.sent

    def peer(self, seat: int) -> str:
        member = self.machine.epoch.member(seat)
        assert member is not None
        return member.peer

    def finding(self, about: int, by: int, what: str) -> RoundFinding:
        claim, signed = self.claims[about]
        form = b""
        if what != "missing":
            found = Finding(claim.digest(), START, START, START, OFF[what])
            form = sign_finding(found, IDENTITIES[SEAT_OF[self.peer(by)]])
        return RoundFinding(RUN, by, *self.key, about, signed, form)

    def drawn(self) -> list[tuple[int, int]]:
        """Who is to look at whom, of the last round."""
        round_ = self.audits._round(*self.key)
        assert round_ is not None
        return [(each.seat, each.auditor) for each in round_.audits or ()]

    def judge(self, say: Callable[[int, int], str]) -> None:
        """Have all that are asked say what they find about a seat's claim."""
        while asked := list(self.audits.to_judge()):
            for peer, said in asked:
                by = next(m.seat for m in self.machine.epoch.members if m.peer == peer)
                self.audits.take_finding(
                    self.finding(said.about, by, say(said.about, by)), peer, self.now
                )
            self.take(self.audits.look(self.now))

    def take(self, events: Iterable[Event]) -> list[Event]:
        found = list(events)
        if found:
            self.happened += found
            self.tick(*found)
        return found

    happened: list[Event]

    @property
    def out(self) -> set[int]:
        """Seats that were put out."""
        return {each.seat for each in self.happened if isinstance(each, Eject | Left)}


def audited(num: int = 6, **checks: Any) -> Audited:
    run = Audited(num, **checks)
    run.happened = []
    run.begin()
    return run


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sets(st.integers(0, 5), max_size=2), st.data())
def test_nobody_honest_is_put_out_and_every_cheat_is(odd: set[int], data: st.DataObject) -> None:
    """Two of six at most do not compute, lie about what they find, or give nothing, in whatever order all is said."""
    run = audited(auditors=2)
    kinds = {seat: data.draw(st.sampled_from(["cheats", "lies", "both", "silent"])) for seat in odd}
    run.make_round()

    def say(about: int, by: int) -> str:
        if kinds.get(about) == "silent":
            return "missing"
        is_false = kinds.get(about) in ("cheats", "both")
        if kinds.get(by) in ("lies", "both"):
            is_false = not is_false
        return "accuses" if is_false else "holds"

    for about, by in data.draw(st.permutations(run.drawn())):
        run.audits.take_finding(run.finding(about, by, say(about, by)), run.peer(by), run.now)
    run.take(run.audits.look(run.now))
    run.judge(say)
    assert run.out <= odd
    assert {seat for seat, kind in kinds.items() if kind in ("cheats", "both", "silent")} <= run.out
    assert run.audits.unfinished(lambda peer: True) == ([], 0)
    for event in run.happened:
        if isinstance(event, Eject):
            evidence, found = open_verdict(event.evidence)
            assert event.peer in {evidence.accused, evidence.accuser, *found}
    # What stands in the journal is signed, and that is seen without the run file.
    assert fault_of_epochs(None, RUN, run.entries) == ""
    run.make_round()
    assert {each.seat for each in run.machine.epoch.agreed} == set(range(6)) - run.out


def test_what_is_counted_and_waited_for() -> None:
    run = audited(num=4, audit=0.5)
    run.make_round()
    waited, num_open = run.audits.unfinished(lambda peer: True)
    assert [(each.seat, each.auditor) for each in waited] == run.drawn()
    assert (len(waited), num_open) == (2, 0)
    assert run.audits.unfinished(lambda peer: False) == ([], 0)
    for about, by in run.drawn():
        for _ in range(2):  # the first word counts
            run.audits.take_finding(run.finding(about, by, "holds"), run.peer(by), run.now)
    assert run.audits.unfinished(lambda peer: True) == ([], 0)
    assert run.audits.take_counts() == {"checked": 2, "checked_held": 2}
    assert run.audits.take_counts() == {}
    assert "2 claims were computed again, 2 of them hold" in run.audits.line()
    assert run.audits.look_at().num_made == 2


@pytest.mark.parametrize("what", ["name", "not drawn", "other claim", "unsigned", "measure"])
def test_what_is_refused(what: str) -> None:
    run = audited(num=4, audit=0.25)
    run.make_round()
    ((about, by),) = run.drawn()
    third = next(seat for seat in range(4) if seat not in (about, by))
    said, peer = run.finding(about, by, "accuses"), run.peer(by)
    if what == "name":
        peer = run.peer(third)
    elif what == "not drawn":
        said, peer = run.finding(about, third, "accuses"), run.peer(third)
    elif what == "other claim":
        found = Finding(named("other"), START, START, START, 5.0)
        said = replace(said, finding=sign_finding(found, IDENTITIES[SEAT_OF[peer]]))
    elif what == "unsigned":
        said = replace(said, finding=run.finding(about, third, "accuses").finding)
    measure = RoundMeasure(RUN, by, *run.key, about, (3.0, 2.0, 3.0, 2.0))
    with pytest.raises(RemoteProtocolError):
        _ = (
            run.audits.take_measure(measure, peer)
            if what == "measure"
            else run.audits.take_finding(said, peer, run.now)
        )
    assert list(run.audits.to_judge()) == []
    assert run.audits.look(run.now) == []
    assert len(run.warned) == (what != "unsigned")


def test_a_finding_between_the_two_opens_nothing_and_one_without_judges_neither() -> None:
    run = audited(num=4)
    run.make_round()
    for about, by in run.drawn():
        run.audits.take_finding(run.finding(about, by, "between"), run.peer(by), run.now)
    assert list(run.audits.to_judge()) == []
    two = audited(num=2)
    two.make_round()
    (about, by), *_ = two.drawn()
    two.audits.take_finding(two.finding(about, by, "accuses"), two.peer(by), two.now)
    assert list(two.audits.to_judge()) == []
    assert "nobody can judge" in two.warned[-1]


def test_a_case_that_nobody_judges_ends() -> None:
    run = audited(num=5)
    run.make_round()
    about, by = run.drawn()[0]
    run.audits.take_finding(run.finding(about, by, "accuses"), run.peer(by), run.now)
    assert run.audits.unfinished(lambda peer: True)[1] == 1
    assert run.audits.look(run.now) == []
    assert run.audits.look(run.now + 61) == []  # twice the time that members have
    assert run.audits.unfinished(lambda peer: True)[1] == 0
    assert "stays as it is" in run.warned[-1]


def test_two_claims_of_one_result_show_themselves() -> None:
    run = audited(num=4)
    run.make_round()
    claim, signed = run.claims[2]
    other = sign_claim(replace(claim, kept=named("other")), IDENTITIES[2])
    evidence = pack_conflict(run.peer(2), signed, other)
    with pytest.raises(RemoteProtocolError):
        run.audits.take_conflict(RoundEvidence(RUN, *run.key, 1, 0, b"\1"), run.peer(0))
    for _ in range(2):
        run.audits.take_conflict(RoundEvidence(RUN, *run.key, 2, 0, evidence), run.peer(0))
    (event,) = run.take(run.audits.look(run.now))
    assert isinstance(event, Eject)
    assert (event.seat, event.since) == (2, 1)


def test_a_claim_that_does_not_fit_is_refused() -> None:
    run = audited(num=3)
    member = run.machine.epoch.member(1)
    assert member is not None
    said, _ = run.claim(1)
    with pytest.raises(RemoteProtocolError, match="without a claim"):
        run.audits.take_claim(replace(said, claim=b""), member)
    with pytest.raises(RemoteProtocolError):
        run.audits.take_claim(replace(said, result=named("other")), member)
    run.audits.take_claim(said, member)


def test_what_results_are_worth_is_drawn_heard_and_shown() -> None:
    run = audited(num=5, audit=0.2, worth=1.0)
    for _ in range(6):
        run.make_round()
        round_ = run.audits._round(*run.key)
        assert round_ is not None
        assert sorted(each.seat for each in round_.measures) == list(range(5))
        for each in round_.measures:
            losses = (
                (3.0, 3.1, 3.0, 3.1) if each.seat == 3 else (3.0, 2.9, 3.0, 2.95 + each.seat / 1e3)
            )
            said = RoundMeasure(RUN, each.auditor, *run.key, each.seat, losses)
            run.audits.take_measure(said, run.peer(each.auditor))
    run.make_round()
    look = run.audits.look_at()
    assert [each.seat for each in look.worths] == list(range(5))
    assert [each.seat for each in look.worths if each.is_watched] == [3]
    assert look.worths[3].gain == pytest.approx(-0.1)
    assert run.audits.watched == (3,)
    assert run.audits.take_counts()["measured"] == 30
    assert run.audits.look(run.now) == []  # nobody is accused by it


# What a journal shows


def test_nobody_is_put_out_by_evidence_that_is_none_against_it() -> None:
    """A leader's word alone puts nobody out: neither beside evidence of another run, nor beside that against others."""
    run = audited()
    run.make_round()
    about, by = next(each for each in run.drawn() if each[0] == 0)
    run.audits.take_finding(run.finding(about, by, "accuses"), run.peer(by), run.now)
    run.judge(lambda about, by: "holds" if by == 1 else "accuses")
    first, second = (each for each in run.happened if isinstance(each, Eject))
    assert (first.seat, second.seat) == (0, 1)
    assert told(run, first) == told(run, second) == ""
    for event in (
        replace(first, peer=""), replace(first, evidence=b"", peer=run.peer(3)),
        replace(first, seat=3, peer=run.peer(3)), replace(first, seat=by, peer=run.peer(by)),
    ):  # fmt: skip
        is_sound = event.seat == 0 and event.evidence != b""
        assert (told(run, event) == "") == is_sound
    assert "of another run" in told(run, first, bytes(16))
    one, other = (run.claims[seat][0] for seat in (4, 5))
    twice = [sign_claim(each, IDENTITIES[4]) for each in (one, replace(one, sent=other.sent))]
    conflict = pack_verdict(pack_conflict(run.peer(4), *twice))
    assert told(run, Eject(4, conflict, run.peer(4))) == told(run, Eject(4, conflict)) == ""
    assert "not against it" in told(run, Eject(5, conflict))
    # Of three the word of one is none, and strangers have no word.
    evidence, _ = open_verdict(first.evidence)
    signed = run.finding(0, by, "accuses")
    alone = pack_evidence(evidence.accused, run.peer(by), signed.claim, signed.finding)
    assert "not against it" in told(run, replace(first, evidence=pack_verdict(alone)))
    strangers = [Identity.generate() for _ in range(3)]
    found = Finding(evidence.claim.digest(), START, START, START, 5.0)
    said = [(each.peer_id, sign_finding(found, each)) for each in strangers]
    assert "no member" in told(run, replace(first, evidence=pack_verdict(alone, said)))


def told(run: Audited, event: Event, run_id: bytes = RUN) -> str:
    """What is wrong with a journal that has the members of a run, and this event."""
    joined = [each for each in run.entries if isinstance(each, JoinedEntry)]
    entry = EpochEntry(1.0, bytes(32), 0, (event_json(event),), bytes(32))
    return fault_of_epochs(None, run_id, [*joined, entry])


# Trials


class Open(Audited):
    """The same with strangers: the first three come by an invitation of the leader's."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self.refused: list[tuple[str, str]] = []
        self.waits: list[float | None] = []
        self.happened = []
        self.gone: set[str] = set()
        super().__init__(num=0)
        self.trials = Trials(
            RUN, LEADER.peer_id, 8, entries, self.machine, self.audits, self.called, self.warned.append,
            self.warned.append, self.refuse, lambda peer: peer not in self.gone,
        )  # fmt: skip
        now = int(time.time())
        self.invitation = Invitation(RUN, LEADER.peer_id, 5, now - 9, now + 999).sign(LEADER)

    def refuse(self, peer: str, reason: str, seconds: float | None) -> None:
        self.refused.append((peer, reason))
        self.waits.append(seconds)

    def come(self, seat: int, invitation: bytes = b"") -> list[Event]:
        events = self.trials.takes(IDENTITIES[seat].peer_id, 1, invitation)
        self.tick(*events)
        return events

    def start(self, strangers: Collection[int] = (3,)) -> None:
        for seat in range(3):
            self.come(seat, self.invitation)
        for seat in strangers:
            self.come(seat)
        self.begin()

    def look(self) -> list[Event]:
        return self.take(self.trials.look())


def test_a_stranger_is_let_in_by_a_claim_that_holds() -> None:
    run = Open()
    run.start()
    stranger = IDENTITIES[3].peer_id
    assert run.machine.epoch.trials == (stranger,)
    assert run.come(3) == [Joined(stranger, 1)]  # it says so again
    run.make_round()
    assert {each.seat for each in run.machine.epoch.agreed} == {0, 1, 2}
    assert run.look() == []
    tried = [(about, by) for about, by in run.drawn() if about == 3]
    assert len(tried) == 2  # one more than of members
    for number, (about, by) in enumerate(tried):
        assert run.audits.found_right(stranger, run.key[1]) is None
        run.audits.take_finding(run.finding(about, by, "holds"), run.peer(by), run.now)
        assert bool(run.look()) == (number == 1)
    (event,) = [each for each in run.happened if isinstance(each, Admitted)]
    claim, findings = open_proof(event.evidence, stranger)
    assert claim.seat == 3
    assert findings.keys() == {run.peer(by) for _, by in tried}
    assert run.machine.epoch.trials == ()
    assert fault_of_epochs(None, RUN, run.entries) == ""
    assert fault_of_epochs(None, bytes(16), run.entries) != ""


@settings(max_examples=3, deadline=None)
@given(st.permutations(["accuses", "accuses", "missing"]))
def test_a_stranger_whose_claim_is_false_is_banned(said: list[str]) -> None:
    run = Open()
    run.start()
    run.make_round()
    votes = dict(zip(range(3), said, strict=True))
    for about, by in run.drawn():
        what = votes[by] if about == 3 else "holds"
        run.audits.take_finding(run.finding(about, by, what), run.peer(by), run.now)
    run.judge(lambda about, by: votes[by])
    run.look()
    stranger = IDENTITIES[3].peer_id
    (event,) = [each for each in run.happened if isinstance(each, Refused)]
    assert event.peer == open_verdict(event.evidence)[0].accused == stranger
    assert run.machine.state.ban_of(stranger, time.time()) is not None
    assert run.refused[-1][0] == stranger
    assert run.come(3) == []
    assert run.machine.epoch.trials == ()
    # Members are none the worse.
    assert run.machine.epoch.healthy == (0, 1, 2)


@pytest.mark.parametrize("is_banned", [True, False])
def test_who_waited_is_on_trial_once_there_is_a_place(is_banned: bool) -> None:
    """The place is free since somebody was banned, or has left: whoever waited does not count without its trial."""
    run, waiter = Open(), Identity.generate().peer_id
    run.start(strangers=range(3, 8))
    run.look()
    assert run.trials.takes(waiter, 1, b"") == []
    if is_banned:
        run.audits.false_trials[IDENTITIES[3].peer_id] = "its claim is false", b""
    else:
        run.tick(Left(0, Health.DROPPED))
    assert Trial(waiter) in run.look()
    assert waiter in run.machine.epoch.trials
    assert run.trials.takes(waiter, 1, b"") == [Joined(waiter, 1)]


def test_who_waited_for_a_trial_and_is_gone_takes_no_place() -> None:
    run = Open()
    gone, waiter = (Identity.generate().peer_id for _ in range(2))
    run.start(strangers=range(3, 8))
    run.look()
    for peer in (gone, waiter):
        assert run.trials.takes(peer, 1, b"") == []
    run.gone.add(gone)
    run.tick(Left(0, Health.DROPPED))
    run.look()
    assert waiter in run.machine.epoch.trials
    assert gone not in run.machine.epoch.trials
    assert run.trials.takes(waiter, 1, b"") == [Joined(waiter, 1)]


def test_who_is_gone_when_its_trial_begins_is_on_trial_nowhere() -> None:
    run = Open()
    gone = Identity.generate().peer_id
    run.start(strangers=range(3, 8))
    run.look()
    assert run.trials.takes(gone, 1, b"") == []
    run.tick(Left(0, Health.DROPPED))
    events = run.trials.look()
    assert Trial(gone) in events
    run.gone.add(gone)  # before the machine has heard of it
    events += run.trials.look()
    run.take(events)
    assert gone not in run.machine.epoch.trials
    assert run.refused[-1][0] == gone


def test_who_leaves_its_trial_is_refused_for_a_while() -> None:
    run = Open()
    run.start()
    run.look()
    run.tick(Left(3, Health.DROPPED))
    assert [type(each) for each in run.look()] == [Refused]
    assert run.come(3) == []
    assert run.refused[-1] == (IDENTITIES[3].peer_id, run.refused[-1][1])
    assert not any("banned" in each for each in run.warned)


def test_who_shows_what_is_no_invitation_takes_no_part() -> None:
    run = Open()
    assert run.come(4, b"open") == []
    assert run.come(4, replace_last(run.invitation)) == []
    now = int(time.time())
    over = Invitation(RUN, LEADER.peer_id, 6, now - 9, now - 1).sign(LEADER)
    assert run.come(4, over) == []
    assert [peer for peer, _ in run.refused] == 3 * [IDENTITIES[4].peer_id]
    assert run.waits == [300.0] * 3  # who has another one then, may show it
    assert [type(each) for each in run.come(4, run.invitation)] == [Joined]
    assert [type(each) for each in run.come(5)] == [Trial, Joined]


def test_those_that_were_admitted_before_the_leader_came_back_fill_no_run() -> None:
    long_gone = [Identity.generate().peer_id for _ in range(7)]
    admitted = *long_gone, IDENTITIES[5].peer_id, IDENTITIES[6].peer_id
    events = [("admitted", each) for each in admitted]
    events += [("trial", IDENTITIES[6].peer_id)]  # it had left, and is on trial again
    told = tuple({"kind": kind, "peer": each} for kind, each in events)
    run = Open([EpochEntry(1.0, bytes(32), 0, told, bytes(32))])
    assert [type(each) for each in run.come(4, run.invitation)] == [Joined]
    assert [type(each) for each in run.come(5)] == [Joined]
    assert [type(each) for each in run.come(6)] == [Trial, Joined]
    assert not run.refused
    assert "m5 counts, as before this leader came back" in run.warned


def replace_last(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])
