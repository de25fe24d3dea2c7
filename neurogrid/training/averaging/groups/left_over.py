"""The state of members that are left of a group which cannot decide any more, for a peer that was one of it.

They know it by its peer id, as no decision has left it out; its process is another, and cannot join: nobody admits it.

Source: protocol_spec/training/groups.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.training.averaging.groups.states import State, States
from neurogrid.training.averaging.reductions import Reductions
from neurogrid.training.wire import training_table

__all__ = ["fetch_state_left_over"]


async def fetch_state_left_over(
    host: Host, peer_ids: Sequence[str], sizes: Sequence[int], *, round_number: int, timeout: float
) -> State | None:
    """The state that members have after a round, from all that have the same; None where nobody gives it.

    Args:
        host: of this peer, which has no group now.
        peer_ids: members that are left, and connected.
        sizes: float32 elements of its vectors, as this program has them.
        timeout: seconds for the vectors.

    Raises:
        ConfigurationError: their state has other vectors.
    """
    exchange = Exchange(host, training_table())
    async with aclosing(exchange):
        reductions = Reductions(exchange, admit=lambda peer_id: False)
        states = States(exchange, reductions, is_of_group=lambda peer_id: False)
        state = await states.fetch(peer_ids, sizes, oldest=round_number, timeout=timeout)
    return state if state is not None and state.round == round_number else None
