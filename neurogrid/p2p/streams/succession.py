"""One stream to a peer takes the place of another: when a relayed connection has become a direct one.

Nothing is lost and nothing overtakes: each side writes to the old stream what it has begun, ends its direction of it,
and says all else on the new one; and the reader of the new one waits, behind its Hello, for the end of the old one.

Source: protocol_spec/streams.md ("From a relay to a direct connection").
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from neurogrid.errors import HeaderWriteError
from neurogrid.p2p.wire import TensorMessage

if TYPE_CHECKING:
    from neurogrid.p2p.streams.message_stream import MessageStream

__all__ = ["DRAIN_TIMEOUT", "Hold", "StreamMovedError"]

logger = logging.getLogger(__name__)

# Seconds for what is under way on the old stream to arrive: a message of the largest kind over a slow relay. A peer
# that does not know of successions never ends its direction, and is read on both streams after that.
DRAIN_TIMEOUT = 60.0


class StreamMovedError(HeaderWriteError):
    """Nothing of the message went out: the stream has a successor, which is to take it. Never leaves `Exchange`."""


class Hold:
    """Messages that came on a new stream behind its Hello, kept until nothing more comes on the old ones.

    The reader stops after the piece of data in which the Hello came, so that little is held.

    Args:
        old: the streams that the new one follows; none holds nothing.
    """

    def __init__(self, old: Sequence[MessageStream]) -> None:
        self._old = tuple(old)
        self._messages: list[TensorMessage] = []
        self.is_on = False

    def begin(self) -> None:
        """The Hello has come."""
        self.is_on = any(not stream.received_all.is_set() for stream in self._old)

    def keep(self, message: TensorMessage) -> None:
        """Keep a message for later."""
        self._messages.append(message)

    async def wait(self) -> list[TensorMessage]:
        """Wait for the end of the old streams; returns what was kept meanwhile, in the order in which it came."""
        with trio.move_on_after(DRAIN_TIMEOUT) as scope:
            for stream in self._old:
                await stream.received_all.wait()
        if scope.cancelled_caught:
            peer_id = self._old[0].peer_id
            logger.debug("%s goes on with a stream that has a successor", peer_id)
        self.is_on = False
        messages, self._messages = self._messages, []
        return messages
