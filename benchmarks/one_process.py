"""A training run computed in one process, in plain torch: from its journal, its data and its first checkpoint.

Who trained on what, and what was in which round, is taken from the journal; all arithmetic is written out here and has
nothing of the package in it. Sums are made in the order that the specification says (`protocol_spec/training/forms.md`,
"The mean"): a float32 sum in another order is another number, and some hundred steps make much of a last bit. Nothing
goes through a codec; that f16 and bf16 round is taken into account.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping
from itertools import product
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
"""Dtypes that contributions travel in, and that their mean does."""

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
        self._batch = run.inner.batch_tokens // run.data.sequence_length
        self.parameters = list(self.model.parameters())
        self._stepper = _Stepper(self.parameters, run, num_steps)
        self.works: deque[Assignment] = deque()

    def learn(self, work: Assignment, samples: Tensor) -> None:
        """The inner steps of a work."""
        for number, batch in enumerate(samples.split(self._batch)):
            self.model.zero_grad()
            self._loss(batch).backward()
            self._stepper.step(int(work.position + number * work.stride))

    def gradient(self, samples: Tensor) -> Tensor:
        """The mean gradient of some samples, one vector."""
        self.model.zero_grad()
        for batch in samples.split(self._batch):
            (self._loss(batch) * (len(batch) / len(samples))).backward()
        return torch.cat([each.grad.flatten() for each in self.parameters if each.grad is not None])

    def _loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


class _Stepper:
    """Clipping, AdamW and the schedule of a run."""

    def __init__(self, parameters: list[torch.nn.Parameter], run: RunFile, num_steps: int) -> None:
        self._inner, self._num_steps = run.inner, num_steps
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(
            parameters,
            betas=run.inner.betas,
            eps=run.inner.eps,
            weight_decay=run.inner.weight_decay,
        )

    def step(self, number: int) -> None:
        """A step by the gradients that are there, the `number`-th of the run."""
        torch.nn.utils.clip_grad_norm_(self._parameters, self._inner.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = self._inner.lr * self._factor(number)
        self._optimizer.step()

    def _factor(self, number: int) -> float:
        warmup = self._inner.warmup_steps(self._num_steps)
        if number < warmup:
            return number / warmup
        if self._inner.schedule == "constant":
            return 1.0
        assert self._inner.schedule == "cosine"
        return 0.5 * (1 + math.cos(math.pi * (number - warmup) / (self._num_steps - warmup)))


class _Common:
    """The weights that all members have, as tensors: what a mean of differences makes of them, by torch's own SGD."""

    def __init__(self, parameters: list[torch.nn.Parameter], run: RunFile) -> None:
        self.tensors = [torch.nn.Parameter(each.detach().clone()) for each in parameters]
        outer = run.outer
        self._optimizer = torch.optim.SGD(
            self.tensors, lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0
        )

    @torch.no_grad()
    def take(self, means: Mapping[int, Tensor], *, has_trained: bool) -> None:
        """Take the means of some tensors; where nobody has trained anything, as they are."""
        for place, mean in means.items():
            if has_trained:
                self.tensors[place].grad = -mean
            else:
                self.tensors[place].add_(mean)
        self._optimizer.step()
        self._optimizer.zero_grad()


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
    if run.outer.method == "data_parallel":
        vector = torch.cat([each.detach().flatten() for each in members[0].parameters])
        weights = torch.nn.Parameter(vector)
        stepper = _Stepper([weights], run, run.stop.steps)
    common = _Common(members[0].parameters, run)
    sent = (
        _FORMS.get(run.outer.codec, torch.float32),
        _FORMS.get(run.outer.result_codec, torch.float32),
    )
    sizes = [each.numel() for each in members[0].parameters]
    fragments = _fragments(sizes, run.outer.fragments)
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
        shares = [work.share for work in works]
        if run.outer.method == "data_parallel":
            # All members are alike: the model and the optimiser of one stand for all.
            gradients = [members[0].gradient(samples.of(work)) for work in works]
            weights.grad = _mean(gradients, shares, sent)
            stepper.step(recorded.entry.round - 1)
            for parameter, part in zip(members[0].parameters, weights.split(sizes), strict=True):
                parameter.data.copy_(part.detach().view_as(parameter))
            continue
        taking_part = [members[seat] for seat, _ in contributions]
        for member, work in zip(taking_part, works, strict=True):
            if work.ranges:
                member.learn(work, samples.of(work))
        means = {}
        for place in fragments[(recorded.entry.round - 1) % run.outer.fragments]:
            before = common.tensors[place].detach()
            learned = [member.parameters[place].detach() - before for member in taking_part]
            means[place] = _mean(learned, shares, sent)
        common.take(means, has_trained=any(work.ranges for work in works))
        for place, member in product(means, members):
            member.parameters[place].data.copy_(common.tensors[place].detach())
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


def _mean(tensors: list[Tensor], weights: list[float], sent: _Forms) -> Tensor:
    """Mean as it arrives: what each sends is rounded on its way, and so is what comes of it."""
    one, all_ = sent
    ratios = [float(torch.tensor(weight / weights[0])) for weight in weights]
    total = torch.zeros_like(tensors[0])
    for row, ratio in zip(tensors, ratios, strict=True):
        total += row.to(one).float() * ratio
    return (total / float(torch.tensor(sum(ratios)))).to(all_).float()


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, samples: Tensor) -> float:
    """Nats a token."""
    model.eval()
    losses = [model(input_ids=b, labels=b).loss.item() * len(b) for b in samples.split(_AT_ONCE)]
    return math.fsum(losses) / len(samples)
