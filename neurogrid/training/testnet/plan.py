"""The plan of a testnet's kills: which processes, and when. All of it follows from a seed. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

from neurogrid.errors import ConfigurationError

__all__ = [
    "LEADER",
    "MAX_KILLS",
    "MAX_WORKERS",
    "Chaos",
    "PlannedKill",
    "planned_kills",
    "worker_name",
]

LEADER: Final = "leader"
MAX_WORKERS: Final = 64
MAX_KILLS: Final = 10_000
# Between two kills lie this many times the mean, from and to.
_SPREAD: Final = (0.5, 1.5)
# Seconds that one is away: shorter and longer than what others take to notice it.
_MAX_DOWN: Final = 3.0


@dataclass(frozen=True, slots=True)
class Chaos:
    """Settings of a testnet: its number of workers, and the kills that it is to have.

    Attributes:
        seed: all else that is drawn follows from it.
        num_workers: that there are, from 1 to `MAX_WORKERS`.
        worker_kills: kills of workers in all.
        leader_kills: kills of the leader in all.
        joins: workers that are killed and come back as new ones, which were never there, of all that are killed.
        mean_seconds: from one kill to the next, on average.
    """

    seed: int
    num_workers: int
    worker_kills: int = 0
    leader_kills: int = 0
    joins: int = 0
    mean_seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.joins > self.worker_kills:
            raise ConfigurationError(
                f"a testnet has a new worker for one that is killed: with {self.worker_kills} kills of workers "
                f"{self.joins} cannot join"
            )
        if not 1 <= self.num_workers <= MAX_WORKERS:
            raise ConfigurationError(
                f"a testnet has 1 to {MAX_WORKERS} workers, not {self.num_workers}"
            )
        if self.worker_kills + self.leader_kills > MAX_KILLS:
            raise ConfigurationError(
                f"a testnet has at most {MAX_KILLS:,} kills, not {self.worker_kills + self.leader_kills:,}"
            )


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """One of them.

    Attributes:
        name: of the process.
        after: seconds after the kill before it, or after the first round.
        down: seconds until the process is started again.
        is_new: it comes back as a worker that was never there.
    """

    name: str
    after: float
    down: float
    is_new: bool = False


def worker_name(number: int) -> str:
    """The name of a worker, by its number from 1."""
    return f"worker-{number}"


def planned_kills(chaos: Chaos) -> tuple[PlannedKill, ...]:
    """All kills in order: the same for the same `chaos`."""
    draw = random.Random(chaos.seed)
    is_leader = [False] * chaos.worker_kills + [True] * chaos.leader_kills
    draw.shuffle(is_leader)
    plan = [
        PlannedKill(
            LEADER if leader else worker_name(draw.randint(1, chaos.num_workers)),
            chaos.mean_seconds * draw.uniform(*_SPREAD),
            draw.uniform(0.0, _MAX_DOWN),
        )
        for leader in is_leader
    ]
    of_workers = [number for number, leader in enumerate(is_leader) if not leader]
    for number in draw.sample(of_workers, chaos.joins):
        plan[number] = replace(plan[number], is_new=True)
    return tuple(plan)
