"""Claims, who looks at them, and evidence: what fits, what is drawn, and that nothing is forged or used again."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.checks import (
    CLAIM_BYTES,
    FINDING_BYTES,
    MAX_EVIDENCE_BYTES,
    Band,
    Claim,
    ClaimError,
    Conflict,
    Facts,
    Finding,
    Ledger,
    Named,
    Samples,
    Settings,
    Sums,
    apart,
    conflict_of,
    draw_audits,
    liars,
    measured_band,
    open_claim,
    open_evidence,
    open_finding,
    pack_conflict,
    pack_evidence,
    probability_of_detection,
    rounds_to_detection,
    sign_claim,
    sign_finding,
)
from neurogrid.training.checks.evidence import judge

MEMBER, AUDITOR, OTHER = Identity.generate(), Identity.generate(), Identity.generate()


def named(number: int) -> bytes:
    return bytes((number,)) * 32


CLAIM = Claim(bytes(range(16)), 3, 7, 1, 12, *(named(each) for each in range(1, 8)))
FACTS = Facts(CLAIM.run, 3, 7, 12, CLAIM.weights, CLAIM.settings, CLAIM.samples, CLAIM.before)
DIGESTS = st.binary(min_size=32, max_size=32)
U64 = st.integers(1, 2**64 - 1)
CLAIMS = st.builds(
    Claim, st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1), U64, U64, U64,
    *[DIGESTS] * 7,
)  # fmt: skip
FINDING = Finding(CLAIM.digest(), named(8), named(9), named(10), 5.0)


def accusation(claim: Claim = CLAIM, finding: Finding = FINDING) -> bytes:
    return pack_evidence(
        MEMBER.peer_id,
        AUDITOR.peer_id,
        sign_claim(claim, MEMBER),
        sign_finding(finding, AUDITOR),
    )


@given(claim=CLAIMS)
def test_a_claim_is_read_as_it_was_signed(claim: Claim) -> None:
    data = sign_claim(claim, MEMBER)
    assert len(data) == CLAIM_BYTES
    assert open_claim(data, MEMBER.peer_id) == claim


@given(data=st.data())
def test_no_bit_of_what_is_signed_can_be_changed(data: st.DataObject) -> None:
    for signed, read in (
        (sign_claim(CLAIM, MEMBER), lambda each: open_claim(each, MEMBER.peer_id)),
        (sign_finding(FINDING, AUDITOR), lambda each: open_finding(each, AUDITOR.peer_id)),
        (accusation(), open_evidence),
    ):
        bit = data.draw(st.integers(0, 8 * len(signed) - 1))
        changed = bytearray(signed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            read(bytes(changed))


def test_a_signature_is_good_for_its_kind_and_its_peer_alone() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        open_claim(sign_claim(CLAIM, MEMBER), OTHER.peer_id)
    assert caught.value.code == ErrorCode.UNAUTHORIZED
    signature = sign_finding(FINDING, MEMBER)[:64]
    with pytest.raises(RemoteProtocolError):
        open_claim(signature + CLAIM.encode(), MEMBER.peer_id)


@given(junk=st.binary(max_size=2 * MAX_EVIDENCE_BYTES))
def test_arbitrary_bytes_are_refused(junk: bytes) -> None:
    for read in (open_evidence, lambda each: open_claim(each, MEMBER.peer_id)):
        with pytest.raises(RemoteProtocolError):
            read(junk)
        with pytest.raises(RemoteProtocolError):
            read(accusation()[: len(junk)] + junk)


@given(length=st.integers(0, MAX_EVIDENCE_BYTES))
def test_what_is_cut_or_longer_is_refused(length: int) -> None:
    whole = accusation()
    if length < len(whole):
        with pytest.raises(RemoteProtocolError):
            open_evidence(whole[:length])
    with pytest.raises(RemoteProtocolError):
        open_evidence(whole + bytes(length + 1))


@pytest.mark.parametrize("name", [field.name for field in fields(Claim)])
def test_each_field_is_in_the_digest(name: str) -> None:
    value = getattr(CLAIM, name)
    other = replace(
        CLAIM, **{name: value + 1 if isinstance(value, int) else value[::-1][:-1] + b"z"}
    )
    assert other.digest() != CLAIM.digest()


@pytest.mark.parametrize(
    "change",
    [{"run": bytes(15)}, {"result": b""}, {"incarnation": 0}, {"number": 0}, {"round": 0}, {"seat": -1},
     {"seat": 2**32}, {"round": 2**64}],
)  # fmt: skip
def test_values_out_of_range_are_refused(change: dict[str, bytes | int]) -> None:
    with pytest.raises(ValueError, match=r"run|digest|seat|at least 1"):
        replace(CLAIM, **change)  # type: ignore[arg-type]


def test_samples_and_settings_have_digests_of_all_that_is_in_them() -> None:
    samples = Samples(((0, 4, 8), (2, 0, 1)), 5, 9)
    others = [
        Samples(((2, 0, 1), (0, 4, 8)), 5, 9),
        Samples(((0, 4, 8),), 5, 9),
        replace(samples, step=6),
        replace(samples, seed=8),
    ]
    assert len({each.digest() for each in (samples, *others)}) == 5
    how = Settings(((4, 4), (3,)), 2, 4, 0.999, True)
    all_of_them = [
        how.digest(0.1),
        how.digest(0.2),
        Settings(((4, 4), (1, 3)), 2, 4, 0.999, True).digest(0.1),
        *(replace(how, **{key: value}).digest(0.1) for key, value in
          (("top_k", 3), ("max_side", 2), ("decay", 0.9), ("is_one_bit", False))),  # type: ignore[arg-type]
    ]  # fmt: skip
    assert len(set(all_of_them)) == 7
    for wrong in (Samples((), 0, 0), Samples(((0, 1, 1),), 0, 0), Samples(((0, 0, 1),), -1, 0)):
        with pytest.raises(ValueError, match=r"ranges|none|64 bits"):
            wrong.digest()
    for change in ({"top_k": 0}, {"max_side": 2**32}, {"decay": 1.1}, {"shapes": ((-1,),)}):
        with pytest.raises(ValueError, match=r"must be|side"):
            replace(how, **change).digest(0.1)  # type: ignore[arg-type]
    for lr in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="learning rate"):
            how.digest(lr)


# The ledger


def after(claim: Claim, *, is_agreed: bool = True, **changes: object) -> tuple[Claim, Facts]:
    """The next claim of an honest member, and the facts of its round."""
    found = replace(
        claim,
        number=claim.number + 1,
        round=claim.round + 1,
        before=claim.momentum_after(is_agreed=is_agreed),
        kept=named(20 + claim.number),
        sent=named(40 + claim.number),
    )
    facts = replace(FACTS, round=found.round)
    return replace(found, **changes), facts  # type: ignore[arg-type]


@given(agreed=st.lists(st.booleans(), max_size=8))
def test_a_chain_of_claims_counts(agreed: list[bool]) -> None:
    ledger, claim, facts = Ledger(), CLAIM, FACTS
    for is_agreed in agreed:
        assert ledger.take(claim, facts) is None
        assert ledger.take(claim, facts) is None  # again
        if is_agreed:
            ledger.agree(3, 7)
        claim, facts = after(claim, is_agreed=is_agreed)
    assert ledger.take(claim, facts) is None
    assert ledger.last(3, 7) == claim
    ledger.forget(3, 7)
    assert ledger.last(3, 7) is None


@pytest.mark.parametrize(
    "name", ["run", "seat", "incarnation", "round", "weights", "settings", "samples"]
)
def test_a_claim_that_is_not_of_its_round_does_not_count(name: str) -> None:
    value = getattr(CLAIM, name)
    other = value + 1 if isinstance(value, int) else value[:-1] + b"z"
    ledger = Ledger()
    with pytest.raises(ClaimError, match=name):
        ledger.take(replace(CLAIM, **{name: other}), FACTS)
    assert ledger.last(3, 7) is None


def test_a_first_claim_begins_with_the_momentum_that_all_begin_with() -> None:
    with pytest.raises(ClaimError, match="another momentum"):
        Ledger().take(replace(CLAIM, before=named(99)), FACTS)
    with pytest.raises(ClaimError, match="1 is due"):
        Ledger().take(replace(CLAIM, number=2), FACTS)


def test_a_claim_that_was_late_is_shown_before_the_next() -> None:
    ledger = Ledger()
    ledger.take(CLAIM, FACTS)
    ledger.agree(3, 7)
    late, facts = after(CLAIM)
    next_, next_facts = after(late, is_agreed=False)
    with pytest.raises(ClaimError, match="2 is due"):
        ledger.take(next_, next_facts)
    assert ledger.take(late, facts) is None
    assert ledger.take(next_, next_facts) is None


def test_who_goes_on_with_the_wrong_one_of_two_momenta_is_refused() -> None:
    for is_agreed in (True, False):
        ledger = Ledger()
        ledger.take(CLAIM, FACTS)
        if is_agreed:
            ledger.agree(3, 7)
        wrong, facts = after(CLAIM, is_agreed=not is_agreed)
        with pytest.raises(ClaimError, match="agreed"):
            ledger.take(wrong, facts)


def test_conflicts_are_evidence_by_themselves() -> None:
    ledger = Ledger()
    ledger.take(CLAIM, FACTS)
    twice = replace(CLAIM, result=named(99))
    forged, facts = after(CLAIM, before=named(99))
    for other, due, what in ((twice, FACTS, Conflict.TWICE), (forged, facts, Conflict.CHAIN)):
        assert ledger.take(other, due) == CLAIM
        data = pack_conflict(MEMBER.peer_id, sign_claim(CLAIM, MEMBER), sign_claim(other, MEMBER))
        evidence = open_evidence(data)
        assert (evidence.conflict, judge(evidence)) == (what, Named.ACCUSED)
        assert len(data) <= MAX_EVIDENCE_BYTES
    assert ledger.last(3, 7) == CLAIM


@given(one=CLAIMS, other=CLAIMS, is_agreed=st.booleans(), gap=st.integers(0, 3))
def test_what_an_honest_member_signs_is_no_conflict(
    one: Claim, other: Claim, is_agreed: bool, gap: int
) -> None:
    """Claims of a chain, of other seats, incarnations and runs, in any order; and after ones that nobody shows."""
    claim = replace(one, number=1, round=1)
    chain = [claim]
    for _ in range(gap + 1):
        claim, _ = after(claim, is_agreed=is_agreed)
        chain.append(claim)
    for each in chain:
        for every in chain:
            assert conflict_of(each, every) is None
    for name in ("run", "seat", "incarnation"):
        assert conflict_of(one, replace(other, **{name: _another(getattr(one, name))})) is None


def _another(value: bytes | int) -> bytes | int:
    return value % 2**31 + 1 if isinstance(value, int) else bytes((value[0] ^ 1,)) + value[1:]


# Drawing


SEATS = st.sets(st.integers(0, 60), max_size=30)
SHARES = st.floats(0, 1).map(lambda share: round(share, 3))
SEED = bytes(range(32))


@given(seed=DIGESTS, claimed=SEATS, auditors=SEATS, share=SHARES, copies=st.integers(1, 3))
def test_what_is_drawn(
    seed: bytes, claimed: set[int], auditors: set[int], share: float, copies: int
) -> None:
    found = draw_audits(seed, claimed, auditors, share, copies=copies)
    assert found == draw_audits(
        seed, sorted(claimed), sorted(auditors, reverse=True), share, copies=copies
    )
    by_seat = Counter(audit.seat for audit in found)
    assert set(by_seat) <= claimed
    assert len(set(found)) == len(found)
    for audit in found:
        assert audit.seat != audit.auditor
        assert audit.auditor in auditors
        assert by_seat[audit.seat] == min(copies, len(auditors - {audit.seat}))
    if len(auditors) > 1:
        assert (
            math.floor(share * len(claimed) - 1e-9)
            <= len(by_seat)
            <= math.ceil(share * len(claimed) + 1e-9)
        )
        load = Counter(dict.fromkeys(auditors, 0))
        load.update(audit.auditor for audit in found)
        # As even as it can be where nobody may look at itself.
        assert max(load.values()) - min(load.values()) <= 2


def seeds(number: int) -> list[bytes]:
    return [each.to_bytes(32, "big") for each in range(number)]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25])
def test_each_claim_is_as_likely_as_any_other(share: float) -> None:
    """Within five standard deviations, of claims and of auditors."""
    number, seats = 2000, range(8)
    drawn = [audit for seed in seeds(number) for audit in draw_audits(seed, seats, seats, share)]
    deviation = math.sqrt(number * share * (1 - share))
    for seat in seats:
        assert abs(sum(a.seat == seat for a in drawn) - number * share) < 5 * deviation
        assert abs(sum(a.auditor == seat for a in drawn) - number * share) < 5 * deviation
    pairs = Counter((audit.seat, audit.auditor) for audit in drawn)
    assert len(pairs) == 8 * 7


def test_what_was_drawn_says_nothing_of_what_is_drawn_next() -> None:
    """Of two rounds with one claim drawn in each, the second is the first's as often as any other."""
    seats = range(10)
    drawn = [draw_audits(seed, seats, seats, 0.1)[0].seat for seed in seeds(3000)]
    again = sum(one == other for one, other in pairwise(drawn))
    assert abs(again - 300) < 5 * math.sqrt(3000 * 0.09)
    # One bit of the seed makes another draw of it.
    flipped = bytes((SEED[0] ^ 1,)) + SEED[1:]
    assert draw_audits(SEED, range(30), range(30), 1) != draw_audits(
        flipped, range(30), range(30), 1
    )


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25])
def test_rounds_until_a_cheat_is_drawn_are_those_of_the_formula(share: float) -> None:
    number, until = 800, 10
    rounds, found = [], 0
    for cheat in range(number):
        for at in range(1, 400):
            seed = (400 * cheat + at).to_bytes(32, "big")
            if any(a.seat == 5 for a in draw_audits(seed, range(8), range(8), share)):
                break
        rounds.append(at)
        found += at <= until
    mean = sum(rounds) / number
    assert mean == pytest.approx(rounds_to_detection(share), rel=0.15)
    due = probability_of_detection(share, until)
    assert abs(found / number - due) < 5 * math.sqrt(due * (1 - due) / number)


def test_shares_that_cannot_be_are_refused() -> None:
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="0 to 1"):
            draw_audits(SEED, (1,), (2,), share)
    with pytest.raises(ValueError, match="32 bytes"):
        draw_audits(b"short", (1,), (2,), 0.5)
    assert rounds_to_detection(0) == math.inf
    assert probability_of_detection(0.1, 10, honest=0.5) == pytest.approx(1 - 0.95**10)


# Bands


# No norm is a million times another one: that is out of every band by the norms alone, and leaves angles no digits.
VECTORS = st.lists(st.integers(-1000, 1000).map(lambda each: each / 100), min_size=4, max_size=4)


def distance(a: list[float], b: list[float], floor: float) -> tuple[float, float, float, float]:
    def sums(first: int, end: int) -> Sums:
        x, y = a[first:end], b[first:end]
        return Sums(
            sum(e * e for e in x),
            sum(e * e for e in y),
            sum((e - f) ** 2 for e, f in zip(x, y, strict=True)),
            len(x),
        )

    found = apart([sums(0, 1), sums(1, 4)], floor)
    return found.angle, found.log_ratio, found.tensor_angle, found.tensor_log_ratio


@given(a=VECTORS, b=VECTORS, c=VECTORS, floor=st.sampled_from((0.0, 1e-3, 1.0)))
def test_distances_are_metrics(
    a: list[float], b: list[float], c: list[float], floor: float
) -> None:
    """That honest accusers are never named, and honest members never convicted, rests on the third inequality."""
    ab, bc, ac = distance(a, b, floor), distance(b, c, floor), distance(a, c, floor)
    assert all(each >= 0 for each in ab)
    assert distance(b, a, floor) == pytest.approx(ab, abs=1e-6)
    assert distance(a, a, floor) == pytest.approx((0, 0, 0, 0), abs=1e-6)
    for one, other, whole in zip(ab, bc, ac, strict=True):
        # Angles near a half turn lose half of their digits.
        assert whole <= one + other + 1e-5


@given(
    accused=st.floats(0, 10),
    accuser=st.floats(-1, 1),
    third=st.floats(-1, 1),
    width=st.floats(1e-4, 0.4),
)
def test_two_thresholds_never_name_who_is_honest(
    accused: float, accuser: float, third: float, width: float
) -> None:
    """Gradients as points on a line: honest ones lie within one band of each other."""
    accuser, third = accuser / 2, third / 2
    finding = Finding(CLAIM.digest(), named(1), named(2), named(3), abs(accused - accuser))
    seen = abs(accused - third)
    if finding.accuses:
        named_ = judge(open_evidence(accusation(finding=finding)), seen)
        assert named_ == Named.ACCUSED
        assert liars({"auditor": finding}, seen) == ()
    if abs(accused) <= 0.5:
        assert not finding.accuses
        assert seen <= 1


def test_a_band_is_wider_than_what_pairs_were_apart() -> None:
    one = apart([Sums(1.0, 1.0, 1e-4, 10)])
    assert one.angle == pytest.approx(0.01, rel=1e-3)
    band = measured_band([one, apart([Sums(1.0, 1.0, 0.0, 10)])], floor=0.0)
    assert band.angle == pytest.approx(0.08, rel=1e-3)
    assert band.excess(one) == pytest.approx(0.125)
    assert band.log_ratio > 0
    assert Band().excess(one, rounding=1.0) == pytest.approx(1 / Band().rounding)
    with pytest.raises(ValueError, match="one pair"):
        measured_band([], floor=0.0)
    with pytest.raises(ValueError, match="above 0"):
        Band(angle=0.0)


def test_zeros_beside_something_are_out_of_every_band() -> None:
    assert Band().excess(apart([Sums(0.0, 1.0, 1.0, 4)])) == math.inf
    assert Band().excess(apart([Sums(0.0, 0.0, 0.0, 4)])) == 0
    assert Band().excess(apart([Sums(math.inf, 1.0, math.inf, 4)])) == math.inf
    # With a floor, what is far below it is alike.
    assert Band().excess(apart([Sums(1e-20, 4e-20, 1e-20, 4)], floor=1e-3)) < 1


# Evidence


def test_evidence_is_about_one_claim() -> None:
    """A finding about one round accuses nobody in another, on another seat, or of another run."""
    for name in ("round", "seat", "run", "number", "incarnation", "result"):
        other = replace(CLAIM, **{name: _another(getattr(CLAIM, name))})  # type: ignore[arg-type]
        with pytest.raises(RemoteProtocolError, match="another claim"):
            open_evidence(accusation(claim=other))


def test_evidence_that_shows_nothing_is_refused() -> None:
    for excess in (0.0, 1.0, 2.0):
        with pytest.raises(RemoteProtocolError, match="accuses nobody"):
            open_evidence(accusation(finding=replace(FINDING, excess=excess)))
    claim = sign_claim(CLAIM, MEMBER)
    next_, _ = after(CLAIM)
    with pytest.raises(RemoteProtocolError, match="both"):
        open_evidence(pack_conflict(MEMBER.peer_id, claim, sign_claim(next_, MEMBER)))
    own = pack_evidence(MEMBER.peer_id, MEMBER.peer_id, claim, sign_finding(FINDING, MEMBER))
    with pytest.raises(RemoteProtocolError, match="itself"):
        open_evidence(own)
    # Signed by the accuser in the name of the member.
    forged = pack_evidence(
        MEMBER.peer_id, AUDITOR.peer_id, sign_claim(CLAIM, AUDITOR), sign_finding(FINDING, AUDITOR)
    )
    with pytest.raises(RemoteProtocolError) as caught:
        open_evidence(forged)
    assert caught.value.code == ErrorCode.UNAUTHORIZED


@pytest.mark.parametrize("excess", [math.nan, math.inf, -1.0, 2e9])
def test_a_finding_has_a_number(excess: float) -> None:
    with pytest.raises(ValueError, match="bands"):
        replace(FINDING, excess=excess)


def test_who_is_named() -> None:
    evidence = open_evidence(accusation())
    assert judge(evidence, 0.0) == Named.ACCUSER
    assert judge(evidence, 1.0) == Named.ACCUSER
    assert judge(evidence, 1.5) == Named.ACCUSED
    assert judge(evidence, math.inf) == Named.ACCUSED
    with pytest.raises(ValueError, match="computing"):
        judge(evidence)


def test_liars_among_auditors() -> None:
    findings = {
        "covers": replace(FINDING, excess=0.0),
        "accuses": replace(FINDING, excess=9.0),
        "unsure": replace(FINDING, excess=1.5),
    }
    assert liars(findings, 0.5) == ("accuses",)
    assert liars(findings, 1.5) == ()
    assert liars(findings, 5.0) == ("covers",)
    assert FINDING_BYTES < CLAIM_BYTES
