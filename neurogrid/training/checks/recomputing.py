"""Claims made, and computed again: what a member says beside its result, and what auditors and judges do with it.

    made = make_claim(distro, gradient, lr, settings, place)            # the member: signs made.claim, sends, commits
    audited = audit(claim, coefficients, material, gradient, lr, settings, band, is_agreed=True)    # an auditor
    named = check_evidence(data, facts, auditors, peer, lambda evidence: audit(evidence.claim, ...))        # a third

Vectors are on the CPU. The gradient comes from whoever can compute it, on the weights and the samples that the claim
names: in runs from `Trainer.gradient`. Vectors are blobs, and so their digests are ids by which they are fetched: the
momentum before from the member, and where bits differ also those afterwards. A member keeps them until the next round
is agreed on.

Source: protocol_spec/training/checks.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from neurogrid.errors import NeuroGridError
from neurogrid.p2p.wire.blob_id import BlobHasher
from neurogrid.training.checks.band import Band, apart
from neurogrid.training.checks.claims import DIGEST_BYTES, Claim, Settings
from neurogrid.training.checks.comparing import (
    encoding_error,
    gradient_between,
    momentum_error,
    sums_of,
)
from neurogrid.training.checks.evidence import (
    MAX_EXCESS,
    Evidence,
    Finding,
    Kind,
    Named,
    bounded_excess,
    judge,
    open_evidence,
)
from neurogrid.training.checks.ledger import Facts
from neurogrid.training.optimizers import Coefficients, Distro

__all__ = [
    "Audited",
    "EvidenceError",
    "Made",
    "Material",
    "MaterialError",
    "Pack",
    "Place",
    "audit",
    "check_evidence",
    "make_claim",
    "pack_plainly",
    "result_id",
    "start_of",
    "vector_id",
]

_NOTHING: Final = bytes(DIGEST_BYTES)

Pack: TypeAlias = Callable[[Coefficients], bytes]
"""Function from coefficients to the bytes of a result, whose blob id a claim has."""


class MaterialError(NeuroGridError):
    """Material to compute a claim again is not what the claim names, or some of it is still to be fetched.

    Attributes:
        wanted: blob ids that are to be fetched.
    """

    def __init__(self, message: str, wanted: tuple[bytes, ...] = ()) -> None:
        super().__init__(message)
        self.wanted = wanted


class EvidenceError(NeuroGridError):
    """Evidence is not about what happened in this run: it is against nobody."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a claim in a run: the attributes of `Claim` of the same names."""

    run: bytes
    seat: int
    incarnation: int
    number: int
    round: int
    weights: bytes
    samples: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """Momenta of the member that claimed, float32 [n], as far as they were fetched.

    Attributes:
        before: before the round.
        kept: with the gradient in it; needed where bits differ.
        sent: the same without what was sent; needed where bits differ and the result was agreed on.
    """

    before: Tensor
    kept: Tensor | None = None
    sent: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A claim, with the coefficients and momenta that it is about.

    Attributes:
        claim: to be signed and said before the coefficients are sent.
        coefficients: to be sent.
        material: to be kept for auditors.
    """

    claim: Claim
    coefficients: Coefficients
    material: Material


@dataclass(frozen=True, slots=True)
class Audited:
    """Outcome of computing a claim again.

    Attributes:
        finding: to be signed.
        is_equal: whether all bits are the same.
    """

    finding: Finding
    is_equal: bool


def vector_id(vector: Tensor) -> bytes:
    """The blob id of a vector: of its elements, float32 in little endian."""
    hasher = BlobHasher()
    hasher.update(vector.detach().contiguous().numpy().data.cast("B"))
    return hasher.digest()


def start_of(settings: Settings) -> bytes:
    """The blob id of the momentum of a member that has computed nothing yet: zeros."""
    return vector_id(torch.zeros(settings.num_elements))


def pack_plainly(coefficients: Coefficients) -> bytes:
    """Positions as int64 and values as float32, in little endian."""
    return coefficients.positions.numpy().tobytes() + coefficients.values.numpy().tobytes()


def result_id(data: bytes) -> bytes:
    """The blob id of a result, by its bytes."""
    hasher = BlobHasher()
    hasher.update(data)
    return hasher.digest()


def make_claim(
    distro: Distro,
    gradient: Tensor,
    lr: float,
    settings: Settings,
    place: Place,
    *,
    pack: Pack = pack_plainly,
) -> Made:
    """Encode a gradient, and say so. The step is to be committed or rolled back, as after `Distro.encode`.

    Args:
        distro: the member's, made with the same settings.
        gradient, lr: as of `Distro.encode`.
        place: where in the run.

    Raises:
        ValueError, NotFiniteError: as of `Distro.encode`.
    """
    (momentum,) = distro.own_vectors()
    before = momentum.clone()
    coefficients = distro.encode(gradient, lr)
    kept, sent = momentum.clone(), distro.remaining()
    claim = Claim(
        place.run,
        place.seat,
        place.incarnation,
        place.number,
        place.round,
        place.weights,
        settings.digest(lr),
        place.samples,
        vector_id(before),
        vector_id(kept),
        vector_id(sent),
        result_id(pack(coefficients)),
    )
    return Made(claim, coefficients, Material(before, kept, sent))


def audit(
    claim: Claim,
    coefficients: Coefficients,
    material: Material,
    gradient: Tensor,
    lr: float,
    settings: Settings,
    band: Band,
    *,
    is_agreed: bool,
    pack: Pack = pack_plainly,
) -> Audited:
    """Compute a claim again, and see whether it holds.

    Args:
        claim: of which was seen that it is one of its round (`Facts.check`).
        coefficients: the result that it names, as `Distro.check` lets it pass.
        material: momenta of the member.
        gradient: float32 [n], computed by the auditor on the weights and the samples that the claim names.
        lr: of the round.
        is_agreed: whether the result was agreed on.

    Raises:
        MaterialError: a vector is not the one that the claim names; or more of them are needed, which `wanted` names:
            call again with them. A member that does not give them is not one whose results count.
        NotFiniteError: the gradient is not finite.
    """
    _check_vector("before", material.before, claim.before, settings)
    if result_id(pack(coefficients)) != claim.result:
        raise MaterialError("the result is not the one that the claim names", (claim.result,))
    if not bool(torch.isfinite(material.before).all()):
        # No honest member has had it: `Distro.encode` refuses what would make it so.
        return Audited(Finding(claim.digest(), _NOTHING, _NOTHING, _NOTHING, MAX_EXCESS), False)
    own = Distro(
        torch.zeros(settings.num_elements),
        settings.shapes,
        top_k=settings.top_k,
        max_side=settings.max_side,
        decay=settings.decay,
        one_bit=settings.is_one_bit,
    )
    own.load_own([material.before])
    found = own.encode(gradient, lr)
    if not bool(torch.isfinite(found.values).all()):
        # Nor has an honest one gone on from so much: it could not have written what came of it.
        return Audited(Finding(claim.digest(), _NOTHING, _NOTHING, _NOTHING, MAX_EXCESS), False)
    (kept,), sent = own.own_vectors(), own.remaining()
    kept_id, sent_id, found_id = vector_id(kept), vector_id(sent), result_id(pack(found))
    is_equal = (kept_id, sent_id, found_id) == (claim.kept, claim.sent, claim.result)
    excess = 0.0
    if not is_equal:
        claimed_kept = kept if kept_id == claim.kept else material.kept
        claimed_sent = sent if sent_id == claim.sent else material.sent
        wanted = [claim.kept] if claimed_kept is None else []
        if is_agreed and claimed_sent is None:
            wanted.append(claim.sent)
        if wanted or claimed_kept is None:
            raise MaterialError(
                "the bits are not the same: the momenta afterwards are needed", tuple(wanted)
            )
        _check_vector("kept", claimed_kept, claim.kept, settings)
        theirs = gradient_between(material.before, claimed_kept, settings, lr)
        rounding = encoding_error(claimed_kept, coefficients, settings)
        if is_agreed and claimed_sent is not None:
            _check_vector("sent", claimed_sent, claim.sent, settings)
            off = momentum_error(claimed_kept, claimed_sent, coefficients, settings)
            rounding = max(rounding, off)
        distance = apart(sums_of(theirs, gradient, settings), band.floor)
        excess = bounded_excess(band.excess(distance, rounding=rounding))
    return Audited(Finding(claim.digest(), kept_id, sent_id, found_id, excess), is_equal)


def check_evidence(
    data: bytes,
    facts: Facts,
    auditors: Collection[str],
    peer: str,
    compute: Callable[[Evidence], Audited],
) -> tuple[Named, str]:
    """Judge evidence as a third: whom it is against.

    Args:
        data: the evidence, as it came.
        facts: of the round that it is about, for the seat of the accused; as the judge knows them.
        auditors: peers that were drawn to look at this claim.
        peer: who sits on that seat.
        compute: computes the claim of evidence of a result again: `audit`, with what the judge has fetched. Called
            only once all else was found to be in order.

    Returns:
        Which of the two it is against, and the peer id of that one.

    Raises:
        RemoteProtocolError: malformed, or not signed by those that it names.
        EvidenceError: it is not about what happened in this run.
        MaterialError: from `compute`.
    """
    evidence = open_evidence(data)
    claim = evidence.claim
    if evidence.accused != peer:
        raise EvidenceError(f"{evidence.accused} does not sit on seat {claim.seat}")
    if (claim.run, claim.seat, claim.incarnation) != (facts.run, facts.seat, facts.incarnation):
        raise EvidenceError("the claim is of another run, seat or incarnation")
    if evidence.kind == Kind.CONFLICT:
        return Named.ACCUSED, evidence.accused
    try:
        facts.check(claim)
    except ValueError as exc:
        raise EvidenceError(f"nobody counted this claim: {exc}") from exc
    if evidence.accuser not in auditors:
        raise EvidenceError(f"{evidence.accuser} was not drawn to look at this claim")
    own = compute(evidence)
    if own.finding.claim != claim.digest():
        raise ValueError("another claim was computed than the one that the evidence is about")
    named = judge(evidence, own.finding.excess)
    return named, evidence.accused if named == Named.ACCUSED else evidence.accuser


def _check_vector(name: str, vector: Tensor, wanted: bytes, settings: Settings) -> None:
    if vector.dtype != torch.float32 or tuple(vector.shape) != (settings.num_elements,):
        raise MaterialError(
            f"the momentum `{name}` must be float32 [{settings.num_elements}], not {vector.dtype} "
            f"{list(vector.shape)}",
            (wanted,),
        )
    if vector_id(vector) != wanted:
        raise MaterialError(f"the momentum `{name}` is not the one that the claim names", (wanted,))
