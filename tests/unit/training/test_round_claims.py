"""Claims of witnessed runs in turn, whom draws fall on, and what accusations come to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.checks import (
    Case,
    Claim,
    ClaimConflictError,
    ClaimError,
    ClaimRules,
    Finding,
    RoundClaims,
    Settings,
    Verdict,
    Vote,
    audits_of,
    claim_round,
    open_evidence,
    open_proof,
    open_verdict,
    pack_evidence,
    pack_proof,
    pack_verdict,
    sign_claim,
    sign_finding,
    vote_of,
)
from neurogrid.training.checks.ledger import Facts

MEMBER, AUDITOR, THIRD = Identity.generate(), Identity.generate(), Identity.generate()
RUN = bytes(range(16))
START = bytes(32)
RULES = ClaimRules(RUN, Settings(((4, 4),), 2), lambda step: 0.1, lambda seat, number: 7, START)


def named(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Member:
    """One that claims as it is to.

    Attributes:
        number: of its last claim.
        momentum: in force.
    """

    def __init__(self, seat: int = 3) -> None:
        self.seat, self.number, self.momentum = seat, 0, START

    @property
    def key(self) -> tuple[int, int]:
        return self.seat, 9

    def facts(self, round_number: int, epoch: int = 0) -> Facts:
        ranges = [(0, round_number, round_number + 1)]
        return RULES.facts(
            self.key, epoch, round_number, round_number - 1, ranges, named(round_number)
        )

    def claim(self, facts: Facts) -> Claim:
        self.number += 1
        new = [named(1000 * self.number + each) for each in range(3)]
        return Claim(
            RUN, self.seat, 9, self.number, facts.round, facts.weights, facts.settings,
            facts.samples, self.momentum, *new,
        )  # fmt: skip


def take(claims: RoundClaims, claim: Claim, facts: Facts) -> Claim:
    return claims.take(sign_claim(claim, MEMBER), MEMBER.peer_id, facts, claim.result)


@given(agreed=st.lists(st.booleans(), min_size=1, max_size=12), heard=st.data())
def test_honest_claims_count_whatever_is_agreed_on_and_whatever_is_missed(
    agreed: list[bool], heard: st.DataObject
) -> None:
    """With everybody that hears of agreements; also of those that did not get each claim."""
    member, epoch = Member(), 0
    of_leader, of_member = RoundClaims(), RoundClaims(all_from=4)
    for number, is_agreed in enumerate(agreed, 1):
        facts = member.facts(number, epoch)
        claim = member.claim(facts)
        if is_agreed or heard.draw(st.booleans()):
            take(of_leader, claim, facts)
        if heard.draw(st.booleans()):
            take(of_member, claim, facts)
        if is_agreed:
            member.momentum = claim.sent
            for claims in (of_leader, of_member):
                claims.agree({member.key: claim.result})
        else:
            epoch += 1


def test_a_round_that_is_made_again_is_no_conflict() -> None:
    member, claims = Member(), RoundClaims()
    for epoch in (0, 1):
        facts = member.facts(5, epoch)
        take(claims, member.claim(facts), facts)
    assert claim_round(1, 5) == 2**32 + 5


@pytest.mark.parametrize("name", ["weights", "settings", "samples", "before", "run", "incarnation"])
def test_a_claim_of_something_else_does_not_count(name: str) -> None:
    member = Member()
    facts = member.facts(1)
    value = {"run": bytes(16), "incarnation": 8}.get(name, named(77))
    wrong = replace(member.claim(facts), **{name: value})
    with pytest.raises(ClaimError):
        take(RoundClaims(), wrong, facts)


def test_the_momentum_is_what_the_last_agreed_result_left() -> None:
    member, claims = Member(), RoundClaims()
    facts = member.facts(1)
    first = member.claim(facts)
    take(claims, first, facts)
    claims.agree({member.key: first.result})
    facts = member.facts(2)
    with pytest.raises(ClaimError, match="another momentum"):
        take(claims, member.claim(facts), facts)
    later = RoundClaims()
    with pytest.raises(ClaimError, match="another momentum"):
        take(later, replace(first, number=4, round=facts.round, before=named(5),
                            weights=facts.weights, samples=facts.samples), facts)  # fmt: skip


def test_two_claims_of_a_round_show_themselves() -> None:
    member, claims = Member(), RoundClaims()
    facts = member.facts(1)
    claim = member.claim(facts)
    assert take(claims, claim, facts) == take(claims, claim, facts)
    with pytest.raises(ClaimConflictError) as caught:
        take(claims, replace(claim, kept=named(5)), facts)
    assert open_evidence(caught.value.evidence).accused == MEMBER.peer_id


def test_a_claim_of_another_result_or_by_another_is_refused() -> None:
    member, claims = Member(), RoundClaims()
    facts = member.facts(1)
    claim = member.claim(facts)
    with pytest.raises(ClaimError, match="another result"):
        claims.take(sign_claim(claim, MEMBER), MEMBER.peer_id, facts, named(5))
    with pytest.raises(RemoteProtocolError):
        claims.take(sign_claim(claim, AUDITOR), MEMBER.peer_id, facts, claim.result)


@given(
    then=st.sets(st.integers(0, 30), max_size=9),
    now=st.sets(st.integers(0, 30), max_size=9),
    share=st.floats(0, 1),
    copies=st.integers(1, 3),
    data=st.data(),
)
def test_only_those_that_were_and_are_here_are_drawn(
    then: set[int], now: set[int], share: float, copies: int, data: st.DataObject
) -> None:
    agreed = data.draw(st.sets(st.sampled_from(sorted(then)))) if then else set()
    drawn = audits_of(named(3), agreed, sorted(then), sorted(now), share, copies)
    assert {each.seat for each in drawn} <= agreed & now
    assert {each.auditor for each in drawn} <= then & now
    assert all(each.seat != each.auditor for each in drawn)
    assert max(Counter(each.seat for each in drawn).values(), default=0) <= copies


# Cases

VOTES = st.sampled_from(list(Vote))


@given(
    num_judges=st.integers(1, 9),
    votes=st.lists(st.tuples(st.integers(0, 12), VOTES), max_size=30),
    first=st.sampled_from([Vote.CONFIRMS, Vote.MISSING]),
    num_liars=st.integers(0, 9),
    is_false=st.booleans(),
)
def test_whom_most_are_honest_about_is_not_put_out(
    num_judges: int, votes: list[tuple[int, Vote]], first: Vote, num_liars: int, is_false: bool
) -> None:
    """As many liars as do not make half of the judges, the accuser among them, vote as they like and first."""
    judges = frozenset(range(1, num_judges + 1))
    num_liars = min(num_liars, (num_judges - 1) // 2)
    liars = set(range(1, num_liars + 1))
    case = Case(0, 1, judges, until=10.0)
    truth = Vote.CONFIRMS if is_false else Vote.HOLDS
    if 1 in liars:
        case.vote(1, first)
    elif is_false:
        case.vote(1, Vote.CONFIRMS)
    else:
        return  # an honest one does not accuse
    for seat, vote in votes:
        case.vote(seat, vote if seat in liars else truth)
        verdict = case.verdict(0.0)
        if verdict is not Verdict.OPEN:
            break
    verdict = case.verdict(11.0)
    if is_false:
        assert verdict not in (Verdict.ACCUSER, Verdict.SILENT)
    else:
        assert verdict not in (Verdict.ACCUSED, Verdict.SILENT)


@given(votes=st.lists(st.tuples(st.integers(0, 5), VOTES), max_size=20), judges=st.integers(0, 5))
def test_nobody_is_put_out_by_one(votes: list[tuple[int, Vote]], judges: int) -> None:
    case = Case(0, 1, frozenset(range(1, judges + 1)), until=10.0)
    assert case.can_be_judged == (judges >= 2)
    for seat, vote in votes:
        case.vote(seat, vote)
        if case.verdict(0.0) not in (Verdict.OPEN, Verdict.NOBODY):
            assert len(case.votes) >= 2
            assert 2 * max(Counter(case.votes.values()).values()) > judges
    assert case.verdict(10.0) is not Verdict.OPEN


def test_each_has_one_vote_and_the_accused_none() -> None:
    case = Case(0, 1, frozenset({1, 2, 3}), until=10.0)
    assert case.vote(1, Vote.CONFIRMS)
    assert not case.vote(1, Vote.HOLDS)
    assert not case.vote(0, Vote.HOLDS)
    assert not case.vote(9, Vote.HOLDS)
    assert case.verdict(0.0) is Verdict.OPEN
    assert case.verdict(10.0) is Verdict.NOBODY
    assert case.vote(2, Vote.CONFIRMS)
    assert case.verdict(0.0) is Verdict.ACCUSED


def test_who_was_given_nothing_accuses_of_no_lie() -> None:
    """So it is not put out where others were given all."""
    case = Case(0, 1, frozenset({1, 2, 3}), until=10.0)
    for seat, vote in ((1, Vote.MISSING), (2, Vote.HOLDS), (3, Vote.HOLDS)):
        case.vote(seat, vote)
    assert case.verdict(0.0) is Verdict.NOBODY


def test_findings_are_votes() -> None:
    claim = Member().claim(Member().facts(1))
    for excess, vote in ((0.0, Vote.HOLDS), (1.0, Vote.HOLDS), (1.5, Vote.CONFIRMS), (9.0, Vote.CONFIRMS)):  # fmt: skip
        assert vote_of(Finding(claim.digest(), START, START, START, excess)) is vote
    assert vote_of(None) is Vote.MISSING


def test_a_verdict_is_read_as_it_was_written_and_only_as_signed() -> None:
    claim = Member().claim(Member().facts(1))
    finding = Finding(claim.digest(), START, START, START, 5.0)
    evidence = pack_evidence(
        MEMBER.peer_id, AUDITOR.peer_id, sign_claim(claim, MEMBER), sign_finding(finding, AUDITOR)
    )
    other = replace(finding, excess=3.0)
    data = pack_verdict(evidence, [(THIRD.peer_id, sign_finding(other, THIRD))])
    opened, findings = open_verdict(data)
    assert opened == open_evidence(evidence)
    assert findings == {THIRD.peer_id: other}
    strange = replace(other, claim=START)
    wrong = [
        b"",
        data[:-1],
        data + data[2 + len(evidence) :],
        pack_verdict(evidence, [(THIRD.peer_id, sign_finding(strange, THIRD))]),
        pack_verdict(evidence, [(MEMBER.peer_id, sign_finding(other, THIRD))]),
    ]
    for each in wrong:
        with pytest.raises(RemoteProtocolError):
            open_verdict(each)


def test_who_is_let_in_is_so_by_findings_that_hold_and_none_of_its_own() -> None:
    claim = Member().claim(Member().facts(4))
    holds = Finding(claim.digest(), bytes(32), bytes(32), bytes(32), 0.5)
    signed, by = sign_claim(claim, MEMBER), (AUDITOR.peer_id, sign_finding(holds, AUDITOR))
    data = pack_proof(signed, [by, (THIRD.peer_id, sign_finding(holds, THIRD))])
    found, findings = open_proof(data, MEMBER.peer_id)
    assert found == claim
    assert findings == {AUDITOR.peer_id: holds, THIRD.peer_id: holds}
    off, other = replace(holds, excess=1.5), replace(holds, claim=bytes(32))
    for wrong in (
        pack_proof(signed, []),
        pack_proof(signed, [by, by]),
        pack_proof(signed, [by, (THIRD.peer_id, sign_finding(off, THIRD))]),
        pack_proof(signed, [(THIRD.peer_id, sign_finding(other, THIRD))]),
        pack_proof(signed, [(MEMBER.peer_id, sign_finding(holds, MEMBER))]),
        pack_proof(signed, [(THIRD.peer_id, sign_finding(holds, AUDITOR))]),
        pack_proof(sign_claim(claim, AUDITOR), [by]),
        data[:-1],
        data[:300],
        b"",
    ):
        with pytest.raises(RemoteProtocolError):
            open_proof(wrong, MEMBER.peer_id)


def test_all_claims_on_trial_are_looked_at_by_one_more_than_others() -> None:
    seats = range(6)
    for number in range(50):
        seed = named(number)
        plain = audits_of(seed, seats, seats, seats, 0.25, 1)
        found = audits_of(seed, seats, seats, seats, 0.25, 1, tried=(9, 8))
        assert found[: len(plain)] == plain
        assert [each.seat for each in found[len(plain) :]].count(9) == 2
        assert len({each.auditor for each in found if each.seat == 8}) == 2
        assert all(each.auditor in seats for each in found)
