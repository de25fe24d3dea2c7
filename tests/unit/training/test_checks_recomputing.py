"""Claims of a real model computed again: what holds, what does not, and whom evidence is against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.checks import (
    Audited,
    Band,
    Claim,
    EvidenceError,
    Facts,
    Made,
    Material,
    MaterialError,
    Named,
    Place,
    Settings,
    apart,
    audit,
    check_evidence,
    make_claim,
    measured_band,
    pack_conflict,
    pack_evidence,
    pack_plainly,
    result_id,
    sign_claim,
    sign_finding,
    start_of,
    sums_of,
    vector_id,
)
from neurogrid.training.checks.comparing import encoding_error
from neurogrid.training.optimizers import Coefficients, Distro
from neurogrid.training.runs.outer_state import digest_of

MEMBER, AUDITOR, OTHER = Identity.generate(), Identity.generate(), Identity.generate()
RUN, SAMPLES = bytes(16), bytes(32)
LR = 2e-3
Gradient = Callable[[Tensor], Tensor]


@cache
def model() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return tf.LlamaForCausalLM(
            tf.LlamaConfig(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=64, max_position_embeddings=32,
            )
        )  # fmt: skip


def parameters() -> list[Tensor]:
    return list(model().parameters())


@cache
def start() -> Tensor:
    return torch.cat([each.detach().flatten() for each in parameters()])


SETTINGS = Settings(
    tuple(tuple(each.shape) for each in model().parameters()), 4, 16, 0.999, is_one_bit=True
)


def gradient(weights: Tensor, seed: int, *, at_once: int = 4, in_bfloat16: bool = False) -> Tensor:
    """Of the mean loss of four rows that follow from a seed."""
    ids_BT = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for each, piece in zip(parameters(), weights.split(SETTINGS.sizes), strict=True):
            each.copy_(piece.view(each.shape))
    model().zero_grad()
    for part in ids_BT.split(at_once):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bfloat16):
            loss = model()(input_ids=part, labels=part).loss * len(part) / len(ids_BT)
        loss.backward()
    return torch.cat([each.grad.flatten() for each in parameters()])


def distro(settings: Settings = SETTINGS) -> Distro:
    return Distro(
        start(),
        settings.shapes,
        top_k=settings.top_k,
        max_side=settings.max_side,
        decay=settings.decay,
        one_bit=settings.is_one_bit,
    )


@dataclass
class Member:
    """A member, and rounds of it alone, all agreed on."""

    settings: Settings = SETTINGS
    own: Distro = field(init=False)
    number: int = 1
    weights: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.own = distro(self.settings)

    def place(self) -> Place:
        self.weights = self.own.theta.clone()
        return Place(RUN, 0, 1, self.number, self.number, digest_of(self.weights), SAMPLES)

    def make(self, given: Tensor | None = None) -> Made:
        place = self.place()
        given = gradient(self.weights, self.number) if given is None else given
        return make_claim(self.own, given, LR, self.settings, place)

    def commit(self, made: Made) -> None:
        self.own.commit(self.own.mean([made.coefficients]))
        self.number += 1


def looked_at(
    made: Made,
    again: Tensor,
    *,
    is_agreed: bool = True,
    settings: Settings = SETTINGS,
    band: Band | None = None,
) -> Audited:
    """As an auditor does: fetches what it needs, when it needs it."""
    computed = partial(
        audit, made.claim, made.coefficients, gradient=again, lr=LR, settings=settings, band=band or Band(),
        is_agreed=is_agreed,
    )  # fmt: skip
    try:
        return computed(Material(made.material.before))
    except MaterialError:
        return computed(made.material)


@pytest.mark.parametrize("is_one_bit", [True, False])
def test_what_an_honest_member_claims_is_computed_again_bit_for_bit(is_one_bit: bool) -> None:
    settings = replace(SETTINGS, is_one_bit=is_one_bit)
    member = Member(settings)
    before = start_of(settings)
    for _ in range(3):
        made = member.make()
        assert made.claim.before == before
        again = gradient(member.weights, member.number)
        for is_agreed in (True, False):
            found = looked_at(made, again, is_agreed=is_agreed, settings=settings)
            assert (found.is_equal, found.finding.excess) == (True, 0.0)
        member.commit(made)
        # What is left after the commit is what was claimed.
        before = made.claim.momentum_after(is_agreed=True)
        assert vector_id(member.own.own_vectors()[0]) == before
        assert torch.equal(member.own.own_vectors()[0], made.material.sent)
    made = member.make()
    member.own.roll_back()
    assert vector_id(member.own.own_vectors()[0]) == made.claim.momentum_after(is_agreed=False)


@pytest.mark.parametrize("other", [{"in_bfloat16": True}, {"at_once": 1}, {"at_once": 2}])
@pytest.mark.parametrize("is_one_bit", [True, False])
def test_other_arithmetic_is_within_the_band(other: dict[str, Any], is_one_bit: bool) -> None:
    settings = replace(SETTINGS, is_one_bit=is_one_bit)
    member = Member(settings)
    seen = []
    for _ in range(4):
        made = member.make()
        again = gradient(member.weights, member.number, **other)
        found = looked_at(made, again, settings=settings)
        assert 0 < found.finding.excess < 0.5
        assert not found.is_equal
        seen.append(apart(sums_of(gradient(member.weights, member.number), again, settings), 1e-7))
        member.commit(made)
    band = measured_band(seen, floor=1e-7)
    assert band.angle < Band().angle
    made = member.make()
    again = gradient(member.weights, member.number, **other)
    assert looked_at(made, again, band=band, settings=settings).finding.holds


def own_of(member: Member) -> Tensor:
    return gradient(member.weights, member.number)


def with_another_layer(member: Member) -> Tensor:
    """The smallest gradient of a matrix replaced by noise of the same size."""
    found = own_of(member)
    pieces = [
        piece
        for piece, shape in zip(found.split(SETTINGS.sizes), SETTINGS.shapes, strict=True)
        if len(shape) == 2
    ]
    smallest = min(pieces, key=lambda piece: float(piece.norm()))
    noise = torch.randn(smallest.shape, generator=torch.Generator().manual_seed(1))
    smallest.copy_(noise * smallest.norm() / noise.norm())
    return found


CHEATS: dict[str, Callable[[Member], Tensor]] = {
    "does not compute": lambda member: torch.zeros_like(start()),
    "computes half": lambda member: gradient_of_half(member),
    "other data": lambda member: gradient(member.weights, 1000 + member.number),
    "sign": lambda member: -own_of(member),
    "scaled": lambda member: 1.5 * own_of(member),
    "noise": lambda member: own_of(member) + own_of(member).std() * torch.randn(
        len(start()), generator=torch.Generator().manual_seed(member.number)
    ),
    "one layer": with_another_layer,
    "stale": lambda member: gradient(start(), member.number),
}  # fmt: skip


def gradient_of_half(member: Member) -> Tensor:
    """Of two of the four rows."""
    ids_BT = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(member.number))[
        :2
    ]
    model().zero_grad()
    with torch.no_grad():
        for each, piece in zip(parameters(), member.weights.split(SETTINGS.sizes), strict=True):
            each.copy_(piece.view(each.shape))
    model()(input_ids=ids_BT, labels=ids_BT).loss.backward()
    return torch.cat([each.grad.flatten() for each in parameters()])


def cheated(kind: str) -> tuple[Member, Made]:
    """The third round of a member that was honest until then."""
    member = Member()
    for _ in range(2):
        member.commit(member.make())
    member.place()
    return member, member.make(CHEATS[kind](member))


@pytest.mark.parametrize("kind", CHEATS)
@pytest.mark.parametrize("other", [{}, {"in_bfloat16": True}], ids=["alike", "another processor"])
def test_what_was_not_computed_is_found(kind: str, other: dict[str, Any]) -> None:
    member, made = cheated(kind)
    found = looked_at(made, gradient(member.weights, member.number, **other))
    assert found.finding.accuses, found


def changed(made: Made, **changes: bytes) -> Claim:
    return replace(made.claim, **changes)


def test_a_momentum_or_a_result_that_does_not_follow_is_found() -> None:
    """The gradient is right, and something else is claimed besides."""
    member = Member()
    member.commit(member.make())
    made = member.make()
    again = own_of(member)
    other = made.material.sent * -3
    claim = changed(made, sent=vector_id(other))
    material = replace(made.material, sent=other)
    lying = Made(claim, made.coefficients, material)
    assert looked_at(lying, again).finding.accuses
    # Where the result was not agreed on, that momentum is in force nowhere.
    assert looked_at(lying, again, is_agreed=False).finding.holds
    for bad in (float("nan"), float("inf")):
        sent = made.material.sent.clone()
        sent[5] = bad
        lying = Made(
            changed(made, sent=vector_id(sent)),
            made.coefficients,
            replace(made.material, sent=sent),
        )
        assert looked_at(lying, again).finding.accuses
    kept = made.material.kept * 2
    lying = Made(
        changed(made, kept=vector_id(kept)), made.coefficients, replace(made.material, kept=kept)
    )
    assert looked_at(lying, again, is_agreed=False).finding.accuses
    flipped = Coefficients(made.coefficients.positions, -made.coefficients.values)
    claim = changed(made, result=result_id(pack_plainly(flipped)))
    assert looked_at(Made(claim, flipped, made.material), again).finding.accuses


def test_a_momentum_that_is_not_finite_is_found() -> None:
    member = Member()
    made = member.make()
    before = made.material.before.clone()
    before[0] = float("nan")
    lying = Made(changed(made, before=vector_id(before)), made.coefficients, Material(before))
    assert looked_at(lying, own_of(member)).finding.accuses


def test_a_momentum_from_which_nobody_could_go_on_is_found() -> None:
    """Finite, and so large that its frequencies are not: a result of it can be written by nobody, nor an auditor."""
    values = replace(SETTINGS, is_one_bit=False)
    member = Member(values)
    made = member.make()
    before = torch.full_like(made.material.before, 3e38)
    lying = changed(made, before=vector_id(before))

    def pack(coefficients: Coefficients) -> bytes:
        if not bool(torch.isfinite(coefficients.values).all()):
            raise ValueError("a value is infinite or no number")
        return pack_plainly(coefficients)

    found = audit(
        lying, made.coefficients, Material(before), own_of(member), LR, values, Band(), is_agreed=True, pack=pack
    )  # fmt: skip
    assert found.finding.accuses


def test_what_was_fetched_is_checked() -> None:
    member = Member()
    made = member.make()
    again = own_of(member)
    call = partial(audit, gradient=again, lr=LR, settings=SETTINGS, band=Band(), is_agreed=True)
    for material in (Material(torch.ones_like(start())), Material(torch.zeros(3))):
        with pytest.raises(MaterialError) as caught:
            call(made.claim, made.coefficients, material)
        assert caught.value.wanted == (made.claim.before,)
    flipped = Coefficients(made.coefficients.positions, -made.coefficients.values)
    with pytest.raises(MaterialError, match="result"):
        call(made.claim, flipped, made.material)
    rough = gradient(member.weights, 1, at_once=1)
    wrong = replace(made.material, kept=torch.ones_like(start()))
    with pytest.raises(MaterialError, match="kept"):
        audit(made.claim, made.coefficients, wrong, rough, LR, SETTINGS, Band(), is_agreed=True)


def test_of_a_chunk_of_zeros_nothing_may_be_sent_and_of_others_something_must() -> None:
    settings = Settings(((4, 8),), 3, 4, 0.999, is_one_bit=True)
    distro = Distro(torch.zeros(32), settings.shapes, top_k=3, max_side=4, one_bit=True)
    half = torch.linspace(-1, 1, 32).reshape(4, 8)
    half[:, 4:] = 0
    right = distro.encode(half.flatten(), 0.5)
    (kept,) = distro.own_vectors()
    assert encoding_error(kept, right, settings) < 1e-6
    values = right.values.clone()
    values[3:] = 1.0
    assert encoding_error(kept, Coefficients(right.positions, values), settings) == math.inf
    none = Coefficients(torch.tensor([0, 1, 2, 16, 17, 18]), torch.zeros(6))
    distro.check(none)
    assert encoding_error(kept, none, settings) > 0.1


# Evidence


def facts_of(claim: Claim) -> Facts:
    return Facts(
        RUN, 0, 1, claim.round, claim.weights, SETTINGS.digest(LR), SAMPLES, start_of(SETTINGS)
    )


def judged(data: bytes, member: Member, made: Made, **arguments: Any) -> tuple[Named, str]:
    """As a third does, on a processor of another kind."""
    again = gradient(member.weights, member.number, at_once=2)
    arguments = {
        "facts": facts_of(made.claim), "auditors": {AUDITOR.peer_id}, "peer": MEMBER.peer_id,
        "compute": lambda evidence: looked_at(replace_claim(made, evidence.claim), again),
        **arguments,
    }  # fmt: skip
    return check_evidence(data, **arguments)


def replace_claim(made: Made, claim: Claim) -> Made:
    assert claim == made.claim
    return made


def evidence_of(made: Made, found: Audited) -> bytes:
    return pack_evidence(
        MEMBER.peer_id,
        AUDITOR.peer_id,
        sign_claim(made.claim, MEMBER),
        sign_finding(found.finding, AUDITOR),
    )


@pytest.mark.parametrize("kind", CHEATS)
def test_a_third_confirms_who_cheated(kind: str) -> None:
    member, made = cheated(kind)
    found = looked_at(made, gradient(member.weights, member.number, in_bfloat16=True))
    data = evidence_of(made, found)
    assert judged(data, member, made) == (Named.ACCUSED, MEMBER.peer_id)


def test_a_false_accusation_names_the_accuser() -> None:
    member = Member()
    made = member.make()
    finding = looked_at(made, own_of(member)).finding
    data = evidence_of(made, Audited(replace(finding, excess=1e6, kept=bytes(32)), False))
    assert judged(data, member, made) == (Named.ACCUSER, AUDITOR.peer_id)


def test_evidence_of_something_else_is_against_nobody() -> None:
    member, made = cheated("sign")
    data = evidence_of(made, looked_at(made, own_of(member)))

    def never(evidence: object) -> Audited:
        raise AssertionError("nothing is computed for this")

    facts = facts_of(made.claim)
    for arguments in (
        {"auditors": {OTHER.peer_id}},
        {"peer": OTHER.peer_id},
        {"facts": replace(facts, run=bytes(15) + b"1")},
        {"facts": replace(facts, incarnation=2)},
        {"facts": replace(facts, round=facts.round + 1)},
        {"facts": replace(facts, samples=bytes(31) + b"1")},
        {"facts": replace(facts, weights=bytes(32))},
    ):
        with pytest.raises(EvidenceError):
            judged(data, member, made, compute=never, **arguments)
    with pytest.raises(RemoteProtocolError):
        judged(data[:-1], member, made, compute=never)


def test_two_claims_of_one_round_name_the_member_without_computing() -> None:
    member = Member()
    made = member.make()
    twice = changed(made, result=bytes(32))
    data = pack_conflict(MEMBER.peer_id, sign_claim(made.claim, MEMBER), sign_claim(twice, MEMBER))

    def never(evidence: object) -> Audited:
        raise AssertionError("nothing is computed for this")

    assert judged(data, member, made, compute=never) == (Named.ACCUSED, MEMBER.peer_id)
    with pytest.raises(EvidenceError):
        judged(data, member, made, peer=OTHER.peer_id)
