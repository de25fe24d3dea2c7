"""Credit on one direction of one 1.1.0 stream, sans-I/O: how many bytes of bulk may wait for handlers.

Both ends count Data bytes of credited messages from the start of the stream. A message may be begun while
the sum before it is below what was granted, so the last one may overdraw and no message is too large.

Source: protocol_spec/streams.md.
"""

from __future__ import annotations

from neurogrid.errors import LocalProtocolError
from neurogrid.p2p.wire import Credit
from neurogrid.p2p.wire.faults import over_limit, violation

__all__ = ["GrantedCredit", "ReceivedCredit"]

MAX_U64 = 2**64 - 1


class GrantedCredit:
    """The credit that we granted to the peer. `arrived` when a credited message came, `served` when it is done with."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._granted = window
        self._arrived = 0
        self._served = 0

    @property
    def outstanding_bytes(self) -> int:
        """Data bytes that arrived and are not served yet."""
        return self._arrived - self._served

    def arrived(self, num_bytes: int) -> Credit | None:
        """Count a credited message; returns what to tell the peer, if anything: see `served`.

        Raises:
            RemoteProtocolError: it was begun without credit (LIMIT_EXCEEDED).
        """
        if self._arrived >= self._granted:
            raise over_limit(
                f"{self._arrived} B of bulk have come, and no more than {self._granted} B were granted"
            )
        self._arrived += num_bytes
        return self._grant()

    def served(self, num_bytes: int) -> Credit | None:
        """A message is done with; returns what to tell the peer, if anything.

        That is when half a window is to be had, or less for a peer that has none left: the handlers of the
        rest may be waiting for what it would send.
        """
        self._served += num_bytes
        return self._grant()

    def _grant(self) -> Credit | None:
        gain = self._served + self._window - self._granted
        is_stalled = self._arrived >= self._granted
        if gain < 1 or (gain < self._window // 2 and not is_stalled):
            return None
        self._granted = self._served + self._window
        return Credit(max_total=self._granted)


class ReceivedCredit:
    """The credit that the peer granted to us."""

    def __init__(self) -> None:
        self._granted = 0
        self._begun = 0

    @property
    def is_available(self) -> bool:
        """Whether a credited message may be begun."""
        return self._begun < self._granted

    def begin(self, num_bytes: int) -> None:
        """Count a credited message of ours."""
        if not self.is_available:
            raise LocalProtocolError("a credited message was begun without credit")
        self._begun += num_bytes

    def take_back(self, num_bytes: int) -> None:
        """A message that was counted is not sent after all."""
        self._begun -= num_bytes

    def grant(self, max_total: int) -> None:
        """Take what a Hello or a Credit says.

        Raises:
            RemoteProtocolError: it is less than before (PROTOCOL_VIOLATION).
        """
        if max_total < self._granted:
            raise violation(f"credit shrank from {self._granted} B to {max_total} B")
        self._granted = min(max_total, MAX_U64)
