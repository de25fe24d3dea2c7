"""Claims of gradients that trainers computed in processes of their own, computed again in others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import trio

from neurogrid.training.checks import (
    Audited,
    Band,
    Made,
    Place,
    Samples,
    Settings,
    audit,
    make_claim,
)
from neurogrid.training.optimizers import Distro
from neurogrid.training.runs.outer_state import digest_of
from neurogrid.training.trainer import FileRange, Trainer, open_trainer
from tests.e2e.training.trainer_models import (
    INNER,
    batches_of,
    dropping_config,
    settings_of,
    write_slice,
)

NOT_FOREVER = 120.0  # seconds
LR, STEP, SEED = 1e-3, 3, 11


async def test_what_one_process_claims_another_computes_again(tmp_path: Path) -> None:
    """With dropout, whose seed is in the claim."""
    member_settings = settings_of(dropping_config(), replace(INNER, micro_batch=8))
    batches = batches_of(write_slice(tmp_path / "slice"), 2)
    with trio.fail_after(NOT_FOREVER):
        async with open_trainer(member_settings) as member:
            weights = member.weights.clone()
            how = Settings(member.layout.shapes, top_k=4, max_side=16, is_one_bit=True)
            honest = await made_by(member, batches[0], how)
            lazy = await made_by(member, batches[1], how)
        async with open_trainer(replace(member_settings, seed=99)) as auditor:
            auditor.weights.copy_(weights)
            again = await computed(auditor, batches[0])
            other_seed = await computed(auditor, batches[0], seed=SEED + 1)
    found = looked_at(honest, again, how)
    assert (found.is_equal, found.finding.excess) == (True, 0.0)
    # Its claim is of the first batch, and it was the second.
    assert looked_at(lazy, again, how).finding.accuses
    assert looked_at(honest, other_seed, how).finding.accuses


async def computed(trainer: Trainer, batch: list[FileRange], seed: int = SEED) -> torch.Tensor:
    gradient = await trainer.gradient(batch, step=STEP, seed=seed)
    assert gradient.not_finite == ""
    return trainer.gradients.clone()


async def made_by(trainer: Trainer, batch: list[FileRange], how: Settings) -> Made:
    """The claim of a member's first round, which says that it is of the first eight samples."""
    gradient = await computed(trainer, batch)
    distro = Distro(
        trainer.weights.clone(), how.shapes, top_k=how.top_k, max_side=how.max_side, decay=how.decay, one_bit=True
    )  # fmt: skip
    samples = Samples(((0, 0, 8),), STEP, SEED).digest()
    place = Place(bytes(16), 0, 1, 1, 1, digest_of(trainer.weights), samples)
    return make_claim(distro, gradient, LR, how, place)


def looked_at(made: Made, again: torch.Tensor, how: Settings) -> Audited:
    return audit(
        made.claim, made.coefficients, made.material, again, LR, how, Band(), is_agreed=True
    )
