"""Routing of sessions through the stages: in chains where workers reach each other, by the coordinator where not.

A link that cannot be made, or breaks again and again, is relayed by the coordinator for a while, which is said aloud,
and then tried again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import trio

from neurogrid.errors import ConfigurationError
from neurogrid.inference.pipeline.chain import AskedAlone, Chain
from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.slow_watch import SlowWatch
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.exchange.routes import can_sign, sign_route
from neurogrid.p2p.wire import (
    CONFIG_DTYPES,
    MAX_ADDRESS_CHARS,
    MAX_STAGE_ADDRESSES,
    MAX_STAGES,
    Route,
)

__all__ = ["ROUTINGS", "ACTIVATION_DTYPES", "Routing", "RoutingMode"]

logger = logging.getLogger(__name__)

RoutingMode = Literal["chain", "star"]
ROUTINGS: Final[tuple[RoutingMode, ...]] = ("chain", "star")

ACTIVATION_DTYPES: Final[Mapping[str, str]] = {**CONFIG_DTYPES, "int8": "I8"}
"""Names of `--wire-dtype`, and those on the wire."""

# Seconds that a route is good for: the longest generation, and more. What ends a session sooner is its close.
ROUTE_LIFETIME = 24 * 3600
# Seconds until a link that failed is tried again.
RELAY_FOR = 300.0


class Routing:
    """The routing of one coordinator.

    Args:
        protocol: the coordinator's.
        mode: `chain`, or `star` for everything through the coordinator.
        wire_dtype: in what activations travel; None for what the stages compute in.
        watch: over the steps of its chains; None for nobody.

    Attributes:
        distrusted: peer ids of workers that are to hand on to nobody, and nobody to them.

    Raises:
        ConfigurationError: another mode or dtype.
    """

    def __init__(
        self,
        protocol: Exchange,
        mode: RoutingMode = "chain",
        *,
        wire_dtype: str | None = None,
        watch: SlowWatch | None = None,
    ) -> None:
        self.watch = watch
        if wire_dtype is not None and wire_dtype not in ACTIVATION_DTYPES:
            raise ConfigurationError(
                f"activations do not travel in {wire_dtype!r}: choose {', '.join(ACTIVATION_DTYPES)}"
            )
        self.wire = "" if wire_dtype is None else ACTIVATION_DTYPES[wire_dtype]
        if mode not in ROUTINGS:
            raise ConfigurationError(f"no routing {mode!r}: choose {' or '.join(ROUTINGS)}")
        self.protocol = protocol
        self._is_chained = mode == "chain"
        self.distrusted: frozenset[str] = frozenset()
        self._relayed: dict[tuple[str, str], float] = {}
        self._cut_at: dict[tuple[str, str], float] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        if self._is_chained and not can_sign(protocol.host.identity):
            logger.warning(
                "every activation goes through here: the key in the identity file is not an Ed25519 key, "
                "and routes between workers cannot be signed with it"
            )
            self._is_chained = False

    def chains(self, stages: Sequence[PipelineStage]) -> list[Chain]:
        """The stages, cut where the worker before cannot or shall not hand on to the one behind."""
        runs: list[list[PipelineStage]] = []
        for item in stages:
            if runs and len(runs[-1]) < MAX_STAGES and self._hands_on(runs[-1], item):
                runs[-1].append(item)
            else:
                runs.append([item])
        return [Chain(self.protocol, run, wire=self.wire, watch=self.watch) for run in runs]

    def _hands_on(self, run: Sequence[PipelineStage], item: PipelineStage) -> bool:
        before = run[-1]
        is_there = trio.current_time() < self._relayed.get((before.peer_id, item.peer_id), 0.0)
        return (
            self._is_chained
            and not isinstance(before.worker, AskedAlone)
            and not isinstance(item.worker, AskedAlone)
            and before.stage.stop == item.stage.start
            and item.peer_id not in [other.peer_id for other in run]
            and not is_there
            and self.distrusted.isdisjoint((before.peer_id, item.peer_id))
        )

    def cut(self, before: PipelineStage, behind: PipelineStage, reason: str) -> None:
        """A link broke under a session: it is made again with the next, and taken over if it breaks again soon."""
        now = trio.current_time()
        last = self._cut_at.get((before.peer_id, behind.peer_id), -math.inf)
        self._cut_at[before.peer_id, behind.peer_id] = now
        if now - last < RELAY_FOR:
            self.relay(before, behind, reason)

    def relay(self, before: PipelineStage, behind: PipelineStage, reason: str) -> None:
        """Take over a link that two workers cannot have, and say so."""
        self._relayed[before.peer_id, behind.peer_id] = trio.current_time() + RELAY_FOR
        logger.warning(
            "%s cannot reach %s: activations between the two go through here, which is slower, for the next "
            "%g s (%s)",
            before.name,
            behind.name,
            RELAY_FOR,
            reason,
        )

    def signed_route(self, session_id: int, chain: Chain) -> bytes:
        """The route of a session through a chain; empty for one stage alone, which needs none."""
        stages = chain.stages
        if len(stages) == 1:
            return b""
        route = Route(
            session_id=session_id,
            until=int(time.time()) + ROUTE_LIFETIME,
            peers=tuple(item.peer_id for item in stages),
            bounds=(stages[0].stage.start, *(item.stage.stop for item in stages)),
            addresses=tuple(
                address
                for item in stages[1:]  # nobody dials the first
                for address in self._addresses_of(item.peer_id)[:MAX_STAGE_ADDRESSES]
                if len(address) <= MAX_ADDRESS_CHARS  # a peer may have said anything of itself
            ),
        )
        return sign_route(route, self.protocol.host.identity)

    def _addresses_of(self, peer_id: str) -> tuple[str, ...]:
        """Return the addresses that the host knows, or knew: it forgets them sooner than connections end."""
        self._addresses[peer_id] = self.protocol.host.addresses_of(peer_id) or self._addresses.get(
            peer_id, ()
        )
        return self._addresses[peer_id]
