"""A run computed again in this process, from its journal and its data alone: what its weights have to be."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch

from neurogrid.training.averaging.groups import Outcome
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.data.slices import slice_path
from neurogrid.training.leading.opening import rules_of
from neurogrid.training.optimizers.distro import Distro
from neurogrid.training.runs.common_steps import CommonSteps
from neurogrid.training.runs.entries import (
    Assignment,
    DealtEntry,
    JoinedEntry,
    LeftEntry,
    RoundEntry,
)
from neurogrid.training.runs.inner_optimizer import rates_of
from neurogrid.training.runs.methods import weights_by
from neurogrid.training.runs.outer_state import OuterState
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.trainers import cut_batches, trainer_settings, work_seed
from neurogrid.training.trainer import FileRange
from neurogrid.training.trainer.learner import Learner
from tests.e2e.training.run_processes import entries_of

__all__ = ["recompute", "recompute_witnessed"]


class _Seat:
    """One member: a model, its optimiser, and weights of its own."""

    def __init__(self, number: int, run: Path, config: str) -> None:
        self.number = number
        directory = RunDirectory(run)
        self.run_file = directory.read_run()
        data = self.run_file.place(self.run_file.data.path)
        self.data = data if (data / "manifest.json").exists() else run / "data"
        self.manifest = Manifest.decode((self.data / "manifest.json").read_bytes())
        self.rules = rules_of(self.run_file, self.manifest)
        settings = trainer_settings(
            self.run_file, config, total_steps=self.rules.total_steps, threads=1
        )
        self.learner = Learner(settings, None)
        self.weights = torch.empty(self.learner.layout.num_elements)
        self.learner.write_weights(self.weights)
        self.state = weights_by(self.run_file, self.learner.layout, self.weights, settings)
        self.works: deque[Assignment] = deque()

    def train(self, work: Assignment) -> None:
        ranges = self._ranges(work)
        seed = work_seed(self.run_file.seed, self.number, work.number)
        self.learner.read_weights(self.weights)
        for number, ranges_of_batch in enumerate(cut_batches(ranges, self.rules.batch_samples)):
            if not ranges_of_batch:
                continue
            batch = self.learner.reader.read(ranges_of_batch)
            step = int(work.position + number * work.stride)
            if isinstance(self.state, CommonSteps):
                self.learner.compute_gradients(batch, number=step, seed=seed)
                gradient = torch.empty_like(self.weights)
                self.learner.take_gradients(gradient)
                self.state.add(gradient, float(batch.num_samples))
            else:
                self.learner.step(batch, number=step, seed=seed)
                self.learner.write_weights(self.weights)
        if isinstance(self.state, OuterState):
            self.state.settle()

    def gradient(self, work: Assignment) -> torch.Tensor:
        """Of the one batch of a work, at the weights."""
        (ranges,) = cut_batches(self._ranges(work), self.rules.batch_samples)
        self.learner.read_weights(self.weights)
        self.learner.compute_gradients(self.learner.reader.read(ranges), number=0, seed=0)
        gradient = torch.empty_like(self.weights)
        self.learner.take_gradients(gradient)
        return gradient

    def _ranges(self, work: Assignment) -> list[FileRange]:
        return [
            FileRange(
                slice_path(self.data, self.manifest.slices[each.slice]), each.start, each.stop
            )
            for each in work.ranges
        ]


def recompute(run: Path, config: str, num_seats: int) -> torch.Tensor:
    """The common weights after the last round of a run in which nobody was late: float32 [n].

    A member that was lost begins anew on another seat, with another inner optimiser.

    Args:
        num_seats: that the run begins with.
    """
    seats = {number: _Seat(number, run, config) for number in range(num_seats)}
    for entry in entries_of(run):
        if isinstance(entry, LeftEntry):
            common = seats.pop(entry.seat).state.state()
        elif isinstance(entry, JoinedEntry) and entry.seat >= num_seats:
            seats[entry.seat] = _Seat(entry.seat, run, config)
            others = [
                each.state.state() for each in seats.values() if each is not seats[entry.seat]
            ]
            seats[entry.seat].state.load(others[0] if others else common)
        elif isinstance(entry, DealtEntry):
            for number, work in entry.works:
                seats[number].works.append(work)
        elif isinstance(entry, RoundEntry):
            weights = []
            for number, num_works in entry.contributions:
                assert num_works == 1, "somebody was late"
                work = seats[number].works.popleft()
                seats[number].train(work)
                weights.append(work.share)
            shares = torch.tensor(weights) / sum(weights)
            mean = sum(
                share * seats[number].state.contribution()
                for share, (number, _) in zip(shares, entry.contributions, strict=True)
            )
            assert isinstance(mean, torch.Tensor)
            for seat in seats.values():
                seat.state.apply(Outcome(entry.round, mean, (), tuple(weights), True))
            last = seat.state.common
    return last


def recompute_witnessed(run: Path, config: str) -> torch.Tensor:
    """The weights after the last round of a witnessed run that was not resumed: float32 [n]."""
    one = _Seat(0, run, config)
    inner, distro = one.run_file.inner, one.run_file.distro
    rate_of = rates_of(inner, one.rules.total_steps)
    theta, shapes = one.weights.clone(), one.learner.layout.shapes
    momenta: dict[int, Distro] = {}
    works: dict[int, Assignment] = {}
    rounds = 0
    for entry in entries_of(run):
        if isinstance(entry, DealtEntry):
            works = dict(entry.works)
        elif isinstance(entry, RoundEntry):
            rate, sent = max(rate_of(rounds), 1e-6 * inner.lr), []
            for number, _ in entry.contributions:
                own = momenta.setdefault(
                    number,
                    Distro(
                        theta,
                        shapes,
                        top_k=distro.top_k,
                        max_side=distro.chunk,
                        decay=distro.decay,
                        one_bit=distro.one_bit,
                    ),
                )
                own.load([theta])
                one.weights.copy_(theta)
                sent.append(own.encode(one.gradient(works[number]), rate))
            mean = own.mean(sent)
            for number, _ in entry.contributions:
                momenta[number].commit(mean)
            theta = own.theta.clone()
            rounds += 1
    return theta
