"""Members that train a small Llama by DisTrO in one process, with real gradients, and what some of them do instead.

For `cheats.py`. A cheat is what a member has in the place of its gradient; it claims that as if it had computed it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from neurogrid.training.averaging.aggregators import parse_aggregator
from neurogrid.training.checks import (
    Band,
    Figures,
    Made,
    Material,
    Place,
    Settings,
    Worth,
    figures_of,
    make_claim,
    measures_of,
    pack_plainly,
    result_id,
    step_alone,
    vector_id,
)
from neurogrid.training.optimizers import Coefficients, Distro, OuterOptimizer
from neurogrid.training.runs.outer_state import digest_of

MEMBERS = 8
ROWS, TOKENS = 4, 48
LR = 2e-3
RUN, SAMPLES = bytes(16), bytes(32)


class Llama:
    """A model whose weights are one vector, and the text that it learns."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._model = tf.LlamaForCausalLM(
            tf.LlamaConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=4, vocab_size=256, max_position_embeddings=TOKENS,
            )
        )  # fmt: skip
        self._parameters = list(self._model.parameters())
        shapes = tuple(tuple(each.shape) for each in self._parameters)
        self.settings = Settings(shapes, top_k=8, max_side=32, decay=0.999, is_one_bit=True)
        self.start = torch.cat([each.detach().flatten() for each in self._parameters])
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self._text = torch.frombuffer(
            bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8
        ).long()
        self.held = self.rows(10**9, 24)

    def rows(self, seed: int, number: int = ROWS) -> Tensor:
        """Token ids [number, TOKENS], drawn by a seed."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, len(self._text) - TOKENS, (number,), generator=generator)
        return torch.stack([self._text[start : start + TOKENS] for start in starts.tolist()])

    def gradient(
        self,
        weights: Tensor,
        ids: Tensor,
        *,
        at_once: int = ROWS,
        in_bfloat16: bool = False,
        threads: int = 1,
    ) -> Tensor:
        """Gradient of the mean loss, float32 [n]."""
        self._put(weights)
        self._model.zero_grad()
        torch.set_num_threads(threads)
        for part in ids.split(at_once):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bfloat16):
                loss = self._model(input_ids=part, labels=part).loss * len(part) / len(ids)
            loss.backward()
        torch.set_num_threads(1)
        return torch.cat([each.grad.flatten() for each in self._parameters])

    @torch.no_grad()
    def loss(self, weights: Tensor, ids: Tensor) -> float:
        self._put(weights)
        return float(self._model(input_ids=ids, labels=ids).loss)

    @torch.no_grad()
    def _put(self, weights: Tensor) -> None:
        for each, piece in zip(self._parameters, weights.split(self.settings.sizes), strict=True):
            each.copy_(piece.view(each.shape))


LLAMA = Llama()
SETTINGS = LLAMA.settings


def new_distro(weights: Tensor) -> Distro:
    return Distro(
        weights, SETTINGS.shapes, top_k=SETTINGS.top_k, max_side=SETTINGS.max_side, decay=SETTINGS.decay,
        one_bit=SETTINGS.is_one_bit,
    )  # fmt: skip


class Fleet:
    """The members of a run: their momenta, the weights that all have, and what was in the rounds before."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.round = 1
        self.seats = list(range(MEMBERS))
        self.members = [new_distro(LLAMA.start) for _ in range(MEMBERS)]
        self.past = [self.weights.clone()]
        self.last: dict[int, Coefficients] = {}

    @property
    def weights(self) -> Tensor:
        return self.members[0].theta

    def rows(self, seat: int) -> Tensor:
        return LLAMA.rows(self.seed * 10**6 + self.round * 100 + seat)

    def own(self, seat: int, **processor: Any) -> Tensor:
        """The gradient that a seat is to compute."""
        return LLAMA.gradient(self.weights, self.rows(seat), **processor)

    def place(self, seat: int) -> Place:
        return Place(RUN, seat, 1, self.round, self.round, digest_of(self.weights), SAMPLES)

    def make(self, cheats: dict[int, str]) -> dict[int, Made]:
        """Make what each seat claims and sends."""
        made = {}
        for seat in self.seats:
            kind = cheats.get(seat, "")
            if kind == COPIES:
                made[seat] = self._copied(seat)
            else:
                gradient = CHEATS[kind](self, seat) if kind else self.own(seat)
                made[seat] = make_claim(
                    self.members[seat], gradient, LR, SETTINGS, self.place(seat)
                )
        return made

    def apply(self, made: dict[int, Made], aggregator: str = "") -> None:
        """All take the same step; by DisTrO's mean, or another aggregate of the coefficients."""
        sent = {seat: each.coefficients for seat, each in made.items()}
        if aggregator:
            rows = [dense(each) for each in sent.values()]
            agreed = parse_aggregator(aggregator).aggregate(rows, [1.0] * len(rows))
        else:
            agreed = self.members[0].mean(list(sent.values()))
        # The step of the weights is the same for all: it is taken once, and the momenta go their own ways.
        for seat, each in made.items():
            if seat:
                if each.claim.kept != each.claim.sent:
                    self.members[seat].roll_back()
                assert each.material.sent is not None
                self.members[seat].load_own([each.material.sent])
        self.members[0].commit(agreed)
        self.past = [*self.past[-10:], self.weights.clone()]
        self.last = sent
        self.round += 1

    def _copied(self, seat: int) -> Made:
        """Copy what the seat before it sent a round ago, in its own name, with no gradient in its momentum."""
        (momentum,) = self.members[seat].own_vectors()
        others = [each for each in sorted(self.last) if each != seat]
        coefficients = self.last[max((each for each in others if each < seat), default=others[-1])]
        honest = make_claim(
            copy.deepcopy(self.members[seat]), torch.zeros_like(momentum), LR, SETTINGS, self.place(seat)
        )  # fmt: skip
        same = momentum.clone()
        digest = vector_id(same)
        claim = replace(
            honest.claim, kept=digest, sent=digest, result=result_id(pack_plainly(coefficients))
        )
        return Made(claim, coefficients, Material(same, same, same))


def dense(coefficients: Coefficients) -> Tensor:
    """All coefficients, float32 [n]."""
    found = torch.zeros(SETTINGS.num_elements)
    found[coefficients.positions] = coefficients.values
    return found


def random(fleet: Fleet, seat: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(fleet.round * 100 + seat)
    return torch.randn(number, generator=generator)


def one_layer(fleet: Fleet, seat: int) -> Tensor:
    """The gradient of the first layer's largest matrix is noise of its norm."""
    found = fleet.own(seat)
    pieces = found.split(SETTINGS.sizes)
    piece = pieces[5]
    noise = random(fleet, seat, len(piece))
    piece.copy_(noise * piece.norm() / noise.norm())
    return found


def within(fleet: Fleet, seat: int) -> Tensor:
    """Noise that is half as large as the default band: what nobody finds by that, and so of interest."""
    found = fleet.own(seat)
    for piece in found.split(SETTINGS.sizes):
        noise = random(fleet, seat, len(piece))
        piece.add_(noise * (0.5 * Band().angle * piece.norm() / noise.norm()))
    return found


COPIES = "copies another's update"
WITHIN = "noise of half the default band"
SELDOM = "sign flipped, one round in ten"
CHEATS: dict[str, Callable[[Fleet, int], Tensor]] = {
    "does not compute": lambda fleet, seat: torch.zeros_like(fleet.weights),
    "computes one row of four": lambda fleet, seat: LLAMA.gradient(
        fleet.weights, fleet.rows(seat)[:1]
    ),
    "other data": lambda fleet, seat: LLAMA.gradient(fleet.weights, LLAMA.rows(7)),
    COPIES: lambda fleet, seat: torch.zeros_like(fleet.weights),
    "sign flipped": lambda fleet, seat: -fleet.own(seat),
    "scaled by 10": lambda fleet, seat: 10 * fleet.own(seat),
    "noise": lambda fleet, seat: random(fleet, seat, SETTINGS.num_elements) * fleet.own(seat).std(),
    "one layer replaced": one_layer,
    "state of 10 rounds ago": lambda fleet, seat: LLAMA.gradient(fleet.past[0], fleet.rows(seat)),
    SELDOM: lambda fleet, seat: fleet.own(seat) * (-1 if fleet.round % 10 == 0 else 1),
    WITHIN: within,
}


def diloco_figures(rounds: int = 4, steps: int = 20) -> list[Figures]:
    """Figures of honest differences after some steps of AdamW each, with an outer Nesterov step in between."""
    found: list[Figures] = []
    common = LLAMA.start.clone()
    outer = OuterOptimizer(common, lr=0.7, momentum=0.9)
    weights = [common.clone() for _ in range(MEMBERS)]
    inner = [torch.optim.AdamW([each], lr=1e-3) for each in weights]
    for number in range(rounds):
        differences = []
        for seat, (own, optimizer) in enumerate(zip(weights, inner, strict=True)):
            own.copy_(outer.theta0)
            for step in range(steps):
                rows = LLAMA.rows(10**7 + (number * steps + step) * 100 + seat)
                own.grad = LLAMA.gradient(own, rows)
                optimizer.step()
            differences.append(own - outer.theta0)
        found += figures_of(differences)
        outer.step(torch.stack(differences).mean(0))
    return found


def gradient_figures(fleet: Fleet, rounds: int = 6) -> list[Figures]:
    """Figures of honest gradients, of a state that goes on by DisTrO."""
    found: list[Figures] = []
    for _ in range(rounds):
        found += figures_of([fleet.own(seat) for seat in fleet.seats])
        fleet.apply(fleet.make({}))
    return found


def worths(fleet: Fleet, made: dict[int, Made]) -> dict[int, Worth]:
    """Worth of each result, measured by another member as in a run, on the rows that this one was given itself."""
    seed = sha256(b"%d %d" % (fleet.seed, fleet.round)).digest()
    before = {seat: LLAMA.loss(fleet.weights, fleet.rows(seat)) for seat in made}
    found = {}
    for each in measures_of(seed, made, fleet.seats, fleet.seats, 1.0):
        after = step_alone(fleet.weights, made[each.seat].coefficients, SETTINGS, LR)
        found[each.seat] = Worth(
            before[each.seat],
            LLAMA.loss(after, fleet.rows(each.seat)),
            before[each.auditor],
            LLAMA.loss(after, fleet.rows(each.auditor)),
        )
    return found


def begun_at(seed: int, rounds: int) -> Fleet:
    """A run whose members were honest so far."""
    fleet = Fleet(seed)
    for _ in range(rounds):
        fleet.apply(fleet.make({}))
    return fleet
