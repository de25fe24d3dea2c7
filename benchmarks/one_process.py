"""A training run computed in one process, in plain torch: from its journal, its data and its first checkpoint.

Who trained on what, and what was in which round, is taken from the journal; all arithmetic is written out here and has
nothing of the package in it. Nothing goes through a codec; that f16 and bf16 round is taken into account.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from neurogrid.training.data.manifest import SliceInfo
from neurogrid.training.data.slices import read_manifest, slice_path
from neurogrid.training.runs.entries import Assignment, DealtEntry, RoundEntry
from neurogrid.training.runs.journal import read_journal
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import RunFile

__all__ = ["Samples", "compute", "held_out_loss"]

_AT_ONCE = 32


_Forms = tuple[torch.dtype, torch.dtype]
"""What contributions travel in, and what their mean does."""

# Codecs that are rounding and no more; with others the means are computed as if they lost nothing.
_FORMS = {"f16": torch.float16, "bf16": torch.bfloat16}


class Samples:
    """The samples of a data directory: int64 [num, tokens]."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        manifest = read_manifest(directory)
        self._trained = [self._read(info) for info in manifest.slices]
        self.held_out = torch.cat([self._read(info) for info in manifest.held_out])

    def of(self, work: Assignment) -> Tensor:
        return torch.cat([self._trained[r.slice][r.start : r.stop] for r in work.ranges])

    def _read(self, info: SliceInfo) -> Tensor:
        return load_file(slice_path(self._directory, info))["input_ids"].long()


class _Member:
    def __init__(self, model: torch.nn.Module, run: RunFile, num_steps: int) -> None:
        self.model = copy.deepcopy(model)
        self._inner, self._num_steps = run.inner, num_steps
        self._batch = run.inner.batch_tokens // run.data.sequence_length
        self.parameters = list(self.model.parameters())
        self._optimizer = torch.optim.AdamW(
            self.parameters,
            betas=run.inner.betas,
            eps=run.inner.eps,
            weight_decay=run.inner.weight_decay,
        )
        self.works: deque[Assignment] = deque()

    def learn(self, work: Assignment, samples: Tensor) -> None:
        """The inner steps of a work."""
        for number, batch in enumerate(samples.split(self._batch)):
            self._optimizer.zero_grad()
            self._loss(batch).backward()
            self.step(int(work.position + number * work.stride))

    def gradients(self, samples: Tensor) -> list[Tensor]:
        """The mean gradients of some samples."""
        batches = samples.split(self._batch)
        self._optimizer.zero_grad()
        for batch in batches:
            (self._loss(batch) * (len(batch) / len(samples))).backward()
        return [
            parameter.grad.clone() for parameter in self.parameters if parameter.grad is not None
        ]

    def step(self, number: int) -> None:
        """A step by the gradients that are there, the `number`-th of the run."""
        torch.nn.utils.clip_grad_norm_(self.parameters, self._inner.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = self._inner.lr * self._factor(number)
        self._optimizer.step()

    def _loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def _factor(self, number: int) -> float:
        warmup = self._inner.warmup_steps(self._num_steps)
        if number < warmup:
            return number / warmup
        if self._inner.schedule == "constant":
            return 1.0
        assert self._inner.schedule == "cosine"
        return 0.5 * (1 + math.cos(math.pi * (number - warmup) / (self._num_steps - warmup)))


def compute(
    run_directory: Path, start: Path, samples: Samples, num_members: int
) -> torch.nn.Module:
    """The model that a run has to come to in which nobody was late or lost.

    Args:
        start: the checkpoint that the run began with.
    """
    run = RunDirectory(run_directory).read_run()
    assert run.stop.steps is not None
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    members = [_Member(model, run, run.stop.steps) for _ in range(num_members)]
    common = [parameter.detach().clone() for parameter in members[0].parameters]
    momenta = [torch.zeros_like(each) for each in common]
    sent = (
        _FORMS.get(run.outer.codec, torch.float32),
        _FORMS.get(run.outer.result_codec, torch.float32),
    )
    fragments = _fragments([each.numel() for each in common], run.outer.fragments)
    for recorded in read_journal(run_directory / "journal"):
        if isinstance(recorded.entry, DealtEntry):
            for seat, work in recorded.entry.works:
                members[seat].works.append(work)
        if not isinstance(recorded.entry, RoundEntry):
            continue
        contributions = recorded.entry.contributions
        assert sorted(contributions) == [(seat, 1) for seat in range(num_members)], (
            "somebody was late"
        )
        works = [members[seat].works.popleft() for seat, _ in contributions]
        shares = [work.share / sum(each.share for each in works) for work in works]
        taking_part = [members[seat] for seat, _ in contributions]
        if run.outer.method == "data_parallel":
            _step_together(members[0], works, shares, samples, recorded.entry.round, sent)
            continue
        for member, work in zip(taking_part, works, strict=True):
            if work.ranges:
                member.learn(work, samples.of(work))
        for place in fragments[(recorded.entry.round - 1) % run.outer.fragments]:
            mean = _mean(
                [member.parameters[place].detach() - common[place] for member in taking_part],
                shares,
                sent,
            )
            if any(work.ranges for work in works):
                momenta[place].mul_(run.outer.momentum).add_(mean)
                mean = run.outer.lr * (mean + run.outer.momentum * momenta[place])
            common[place].add_(mean)
            for member in members:
                member.parameters[place].data.copy_(common[place])
    return members[0].model


def _fragments(sizes: list[int], number: int) -> list[list[int]]:
    """The tensors of each fragment: the largest is dealt first, to the fragment that has fewest elements."""
    fragments: list[list[int]] = [[] for _ in range(number)]
    totals = [0] * number
    for tensor in sorted(range(len(sizes)), key=lambda tensor: (-sizes[tensor], tensor)):
        fragment = totals.index(min(totals))
        fragments[fragment].append(tensor)
        totals[fragment] += sizes[tensor]
    return fragments


def _mean(tensors: list[Tensor], shares: list[float], sent: _Forms) -> Tensor:
    """As it arrives: what each sends is rounded on its way, and so is what comes of it."""
    one, all_ = sent
    arrived = [share * each.to(one).float() for share, each in zip(shares, tensors, strict=True)]
    return torch.stack(arrived).sum(0).to(all_).float()


def _step_together(
    member: _Member,
    works: list[Assignment],
    shares: list[float],
    samples: Samples,
    round_: int,
    sent: _Forms,
) -> None:
    """A step of data parallel training. All members are alike: the model and the optimiser of one stand for all."""
    gradients = [member.gradients(samples.of(work)) for work in works]
    for place, parameter in enumerate(member.parameters):
        parameter.grad = _mean([of_one[place] for of_one in gradients], shares, sent)
    member.step(round_ - 1)


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, samples: Tensor) -> float:
    """Nats a token."""
    model.eval()
    losses = [model(input_ids=b, labels=b).loss.item() * len(b) for b in samples.split(_AT_ONCE)]
    return math.fsum(losses) / len(samples)
