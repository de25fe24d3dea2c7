"""Four members in one process, with our classes, against the arithmetic written out by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from neurogrid.training.averaging.parts import Fragments, Layout, gather, scatter
from neurogrid.training.optimizers import OuterOptimizer, StreamingOuter, StreamingSchedule

NUM_MEMBERS, NUM_STEPS = 4, 33
# The fragment of each tensor, of 48, 8, 24 and 3 elements, by how many there are.
DEALT = {1: (0, 0, 0, 0), 2: (0, 1, 1, 1), 3: (0, 2, 1, 2), 4: (0, 2, 1, 3)}
# What a member's vector is after the wire.
Codec = Callable[[Tensor], Tensor]


class Members:
    """Members with a tiny model each and AdamW inside: where their weights are, and how they take a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.models = [
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(NUM_MEMBERS)
        ]
        for model in self.models[1:]:
            model.load_state_dict(self.models[0].state_dict())
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False) for model in self.models
        ]
        self.data = torch.Generator().manual_seed(5)
        self.layout = Layout.of(dict(self.models[0].named_parameters()))

    def step(self) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            inputs = torch.randn(7, 6, generator=self.data)
            optimizer.zero_grad()
            (model(inputs) - inputs[:, :3].sin()).square().mean().backward()
            optimizer.step()

    def theta(self, member: int) -> Tensor:
        theta = torch.empty(self.layout.num_elements)
        self.layout.flatten(dict(self.models[member].named_parameters()), theta)
        return theta

    def put(self, member: int, theta: Tensor) -> None:
        self.models[member].load_state_dict(self.layout.views(theta))


@dataclass
class Setting:
    every: int = 5
    num_fragments: int = 1
    overlap: int = 0
    lr: float = 0.7
    momentum: float = 0.9
    codec: Codec = field(default=lambda vector: vector)
    # Of what the wire lost, the share that is sent next time.
    feedback: float = 0.0
    last_step: int | None = None


def top_16th(vector: Tensor) -> Tensor:
    """The sixteenth that is greatest, in two magnitudes."""
    kept = vector.abs().topk(max(vector.numel() // 16, 1))
    sent = torch.zeros_like(vector)
    magnitudes = torch.where(kept.values > 0.5 * kept.values.max(), 0.75, 0.33)
    sent[kept.indices] = magnitudes * kept.values.max() * vector[kept.indices].sign()
    return sent


def run_ours(setting: Setting) -> list[Tensor]:
    """Weights at the last sync after each step, then those of each member."""
    members = Members()
    schedule = StreamingSchedule(
        setting.num_fragments, setting.every, setting.overlap, setting.last_step
    )
    turns = Fragments(members.layout, setting.num_fragments)
    fragments = [turns.spans(number) for number in range(setting.num_fragments)]
    streams = []
    for member in range(NUM_MEMBERS):
        outer = OuterOptimizer(members.theta(member), lr=setting.lr, momentum=setting.momentum)
        streams.append(StreamingOuter(outer, fragments, schedule))
    lost = [torch.zeros(members.layout.num_elements) for _ in range(NUM_MEMBERS)]
    found = []
    for step in range(1, NUM_STEPS + 1):
        members.step()
        thetas = [members.theta(member) for member in range(NUM_MEMBERS)]
        sent: dict[int, list[Tensor]] = {}
        for member, stream in enumerate(streams):
            for fragment, difference in stream.send(step, thetas[member]):
                spans = fragments[fragment]
                wanted = difference + gather(lost[member], spans)
                sent.setdefault(fragment, []).append(setting.codec(wanted))
                remains = setting.feedback * (wanted - sent[fragment][-1])
                scatter(remains, lost[member], spans)
        for fragment, vectors in sent.items():
            mean = torch.stack(vectors).mean(0)
            for stream in streams:
                stream.receive(fragment, mean)
        for member, stream in enumerate(streams):
            if stream.apply(step, thetas[member]):
                members.put(member, thetas[member])
            assert torch.equal(stream.outer.theta0, streams[0].outer.theta0)
        found.append(streams[0].outer.theta0.clone())
    return found + [members.theta(member) for member in range(NUM_MEMBERS)]


def run_written_out(setting: Setting) -> list[Tensor]:
    """The same, in float64 and with lists of indices."""
    members = Members()
    numels = [parameter.numel() for parameter in members.models[0].parameters()]
    indices = [
        torch.tensor(
            [
                sum(numels[:number]) + offset
                for number, numel in enumerate(numels)
                if DEALT[setting.num_fragments][number] == fragment
                for offset in range(numel)
            ]
        )
        for fragment in range(setting.num_fragments)
    ]
    theta0 = members.theta(0).double()
    velocity = torch.zeros_like(theta0)
    lost = [torch.zeros_like(theta0) for _ in range(NUM_MEMBERS)]
    waiting: list[tuple[int, Tensor, Tensor]] = []
    found = []
    for step in range(1, NUM_STEPS + 1):
        members.step()
        is_last = step == setting.last_step
        if is_last:
            waiting = []
        for fragment, own in enumerate(indices):
            offset = setting.every * fragment // setting.num_fragments
            if step % setting.every != offset and not is_last:
                continue
            total = torch.zeros(len(own), dtype=torch.float64)
            for member in range(NUM_MEMBERS):
                wanted = (members.theta(member) - theta0)[own] + lost[member][own]
                sent = setting.codec(wanted.float()).double()
                lost[member][own] = setting.feedback * (wanted - sent)
                total += sent
            waiting.append((step + (0 if is_last else setting.overlap), own, total / NUM_MEMBERS))
        for entry in [entry for entry in waiting if entry[0] <= step]:
            waiting.remove(entry)
            _, own, mean = entry
            gradient = -mean
            velocity[own] = setting.momentum * velocity[own] + gradient
            theta0[own] -= setting.lr * (gradient + setting.momentum * velocity[own])
            for member in range(NUM_MEMBERS):
                theta = members.theta(member).double()
                share = 0.5 if setting.overlap else 1.0
                theta[own] = share * theta0[own] + (1 - share) * theta[own]
                members.put(member, theta.float())
        found.append(theta0.float())
    return found + [members.theta(member) for member in range(NUM_MEMBERS)]


SETTINGS = {
    "diloco": Setting(),
    "averaging": Setting(lr=1.0, momentum=0.0),
    "every step": Setting(every=1, lr=1.0, momentum=0.0),
    "streaming": Setting(every=6, num_fragments=3, last_step=NUM_STEPS),
    "streaming with overlap": Setting(every=8, num_fragments=4, overlap=3, last_step=NUM_STEPS),
    "overlap of the whole": Setting(every=6, overlap=2),
    "sparseloco": Setting(lr=1.0, momentum=0.0, codec=top_16th, feedback=0.95),
    "streaming, overlap and sparse": Setting(
        every=8, num_fragments=2, overlap=3, codec=top_16th, feedback=1.0
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_members_go_where_the_arithmetic_says(name: str) -> None:
    ours, wanted = run_ours(SETTINGS[name]), run_written_out(SETTINGS[name])
    assert not torch.equal(ours[0], ours[NUM_STEPS - 1])
    for found, expected in zip(ours, wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_members_without_overlap_stand_where_they_agreed() -> None:
    found = run_ours(Setting(every=11))
    for theta in found[NUM_STEPS:]:
        assert torch.equal(theta, found[NUM_STEPS - 1])
