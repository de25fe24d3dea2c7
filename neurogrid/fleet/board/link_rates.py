"""Rates of traffic between a coordinator and its workers, and from stage to stage, by the coordinator's own counters.

What goes from worker to worker is not counted here. Each activation that enters a chain leaves every stage of it but
the last for the next, in the same size: that is what such a link is said to carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from neurogrid.fleet.board.status import LinkStatus
from neurogrid.node.rates import TotalRate
from neurogrid.p2p.exchange.counters import Direction, Traffic, TrafficCounters

__all__ = ["LinkRates"]

_ACTIVATIONS = ("activation", "traced_activation")
_RESPONSES = ("response", "traced_response")


@dataclass(frozen=True)
class _Rates:
    """A second, in one direction between coordinator and one worker."""

    num_bytes: float
    weight_bytes: float
    passes: float  # messages with hidden states
    pass_bytes: float


_NONE = _Rates(0.0, 0.0, 0.0, 0.0)


class LinkRates:
    """Rates between updates. `update` is called now and then, by one caller."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str, Direction], tuple[TotalRate, ...]] = {}
        self._now: dict[tuple[str, Direction], _Rates] = {}
        self.total_bytes: dict[tuple[str, Direction], int] = {}

    def update(self, now: float, counters: TrafficCounters) -> None:
        """Look at the counters at `now`, in seconds."""
        totals: dict[tuple[str, Direction], int] = {}
        for peer_id, by_direction in counters.snapshot().items():
            for direction in Direction:
                rows = by_direction.get(direction.value, {})
                key = (peer_id, direction)
                totals[key] = sum(traffic.num_bytes for traffic in rows.values())
                self._now[key] = self._update(now, key, rows, totals[key])
        for key in set(self._rates) - set(totals):
            del self._rates[key], self._now[key]
        self.total_bytes = totals

    def links(
        self, coordinator: str, stages: Sequence[str], latencies: Mapping[str, float | None]
    ) -> tuple[LinkStatus, ...]:
        """The links to all of `latencies`, along `stages`, and back.

        Args:
            coordinator: its peer id.
            stages: peer ids, in order; the coordinator's for a stage of its own.
            latencies: of each worker there is.
        """
        found = [
            _link(coordinator, peer_id, latency, self._of(peer_id, Direction.SENT))
            for peer_id, latency in latencies.items()
            if peer_id != coordinator
        ]
        remote = [peer_id for peer_id in stages if peer_id != coordinator]
        entering = self._of(remote[0], Direction.SENT) if remote else _NONE
        for before, behind in pairwise([*stages, coordinator]):
            if before == coordinator:
                continue  # a stage of its own, or the end of one: what it sends is counted
            if behind == coordinator:
                back = self._of(before, Direction.RECEIVED)
                found.append(_link(before, behind, latencies.get(before), back))
                continue
            direct = self._of(behind, Direction.SENT)  # in a star it comes from the coordinator
            share = max(1.0 - direct.passes / entering.passes, 0.0) if entering.passes else 0.0
            size = share * entering.pass_bytes
            rates = _Rates(size, 0.0, share * entering.passes, size)
            found.append(_link(before, behind, None, rates, is_counted=False))
        return tuple(found)

    def _of(self, peer_id: str, direction: Direction) -> _Rates:
        return self._now.get((peer_id, direction), _NONE)

    def _update(
        self, now: float, key: tuple[str, Direction], rows: Mapping[str, Traffic], num_bytes: int
    ) -> _Rates:
        if key not in self._rates:
            self._rates[key] = tuple(TotalRate() for _ in range(4))
        names = _ACTIVATIONS if key[1] is Direction.SENT else _RESPONSES
        passes = [rows[name] for name in names if name in rows]
        totals = (
            num_bytes,
            rows["weights"].num_bytes if "weights" in rows else 0,
            sum(traffic.num_messages for traffic in passes),
            sum(traffic.num_bytes for traffic in passes),
        )
        rates = zip(self._rates[key], totals, strict=True)
        return _Rates(*(rate.update(now, total) for rate, total in rates))


def _link(
    source: str, target: str, latency: float | None, rates: _Rates, *, is_counted: bool = True
) -> LinkStatus:
    return LinkStatus(
        source=source,
        target=target,
        latency=latency,
        bytes_per_second=rates.num_bytes,
        weight_bytes_per_second=rates.weight_bytes,
        activations_per_second=rates.passes,
        is_counted=is_counted,
    )
