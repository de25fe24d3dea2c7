"""The state of one peer at a gate, from its first connection or stream to its last."""

from __future__ import annotations

import trio

from neurogrid.errors import NeuroGridError
from neurogrid.p2p.trust.admission import Admitted

__all__ = ["GatedPeer"]


class GatedPeer:
    """The state of one peer while there is a connection to it.

    Attributes:
        is_connected: whether the host has said so; a stream may come a moment before.
        is_inbound: whether it was the peer that dialled.
        is_news: whether a connection is there that nobody above was told of; `was_announced` whether they were
            told of any.
        admitted: as what it was judged; it counts once `settled` is set.
        settled: both sides have made up their mind.
        error: why not, if it is not admitted.
        shown: the edition of our credentials that it has seen.
        num_exchanges: exchanges under way, whichever side began them; `num_served` by the peer.
        is_waiting: whether another exchange is to follow the one that is under way.
        num_held: streams that wait for them.
        num_users: tasks that hold this object.
    """

    def __init__(self) -> None:
        self.is_connected = False
        self.is_inbound = False
        self.is_news = False
        self.was_announced = False
        self.admitted: Admitted | None = None
        self.settled = trio.Event()
        self.error: NeuroGridError | None = None
        self.shown: object = None
        self.num_exchanges = 0
        self.num_served = 0
        self.is_waiting = False
        self.num_held = 0
        self.num_users = 0

    @property
    def is_admitted(self) -> bool:
        """Whether both sides have made up their mind, and it is admitted."""
        return self.admitted is not None and self.settled.is_set()

    def take(self, admitted: Admitted) -> None:
        """The outcome of an exchange; of two that crossed, the certificate that is valid longer counts."""
        old = self.admitted
        is_older = (
            old is not None
            and old.role == admitted.role
            and (old.not_after or 0) > (admitted.not_after or 0)
        )
        if not is_older:
            self.admitted = admitted
