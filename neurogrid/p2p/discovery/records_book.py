"""The records of a cluster's members that are believed, and how long.

Knows no network: bytes in, a member or a refusal out. A record counts until it expires. Each of a peer must
have a larger sequence number than the one before; the largest is remembered for as long as an older record
could still be valid, so what was once said cannot be said again by somebody who kept it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from neurogrid.errors import NeuroGridError
from neurogrid.p2p.discovery.records import (
    MemberRecord,
    RecordFault,
    RecordRefusedError,
    open_record,
)
from neurogrid.p2p.wire.maps import printable_line
from neurogrid.p2p.wire.messages import Data

__all__ = ["CLOCK_SKEW", "MAX_LIFETIME", "MAX_MEMBERS", "Acceptance", "RecordBook", "Verify"]

Verify: TypeAlias = Callable[[str, str, bytes], None]
"""`verify(peer_id, role, certificate)` returns if the certificate makes the peer a member in the role that its record
names, else raises a NeuroGridError (`Admission.verify`)."""

MAX_LIFETIME: Final = 3600
"""Seconds from now that a record may be valid at most: so long at worst a dead member is listed."""

CLOCK_SKEW: Final = 60
"""Seconds that two members' clocks may be apart."""

MAX_MEMBERS: Final = 1024
"""Members of a cluster: some dozens, and room."""

# Sequence numbers remembered: of members, and of those that were.
_MAX_REMEMBERED: Final = 4 * MAX_MEMBERS


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The outcome of a record that was accepted.

    Attributes:
        record: what the member now says.
        is_new: whether the member was not known before.
        has_moved: whether it is known, and has other addresses than before.
    """

    record: MemberRecord
    is_new: bool
    has_moved: bool


class RecordBook:
    """The members of one cluster, but for ourselves.

    Args:
        cluster: its key.
        own_peer_id: ours; a record of ours is nobody else's to send.
        verify: looks at the certificate of each record; None believes every signature.
        clock_skew: seconds that a member's clock may differ from ours.
        now: Unix time in seconds.
    """

    def __init__(
        self,
        cluster: bytes,
        own_peer_id: str,
        *,
        verify: Verify | None = None,
        clock_skew: float = CLOCK_SKEW,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._own_peer_id = own_peer_id
        self._verify = verify
        self._clock_skew = clock_skew
        self._now = now
        self._members: dict[str, MemberRecord] = {}
        # By peer id: the largest sequence number, and when no older record can be valid any more. The order is
        # that of the second.
        self._sequences: dict[str, tuple[int, float]] = {}

    @property
    def members(self) -> dict[str, MemberRecord]:
        """The records that count, by peer id; a copy."""
        return dict(self._members)

    def accept(self, data: Data, *, from_peer: str) -> Acceptance:
        """Believe the record that a peer has sent of itself, or not.

        Raises:
            RecordRefusedError: says why; what was believed before stays.
        """
        record = open_record(data)
        now = self._now()
        if record.peer_id != from_peer:
            raise RecordRefusedError(
                RecordFault.FORGED, f"it is that of {record.peer_id}, and came from {from_peer}"
            )
        if record.peer_id == self._own_peer_id:
            raise RecordRefusedError(RecordFault.FORGED, "it claims to be ours")
        if record.cluster != self._cluster:
            raise RecordRefusedError(RecordFault.FOREIGN, f"its key is {record.cluster.hex()}")
        if record.expires <= now - self._clock_skew:
            raise RecordRefusedError(
                RecordFault.EXPIRED, f"it was valid until {now - record.expires:.0f} s ago"
            )
        if record.expires > now + MAX_LIFETIME + self._clock_skew:
            raise RecordRefusedError(
                RecordFault.MALFORMED, f"it is valid for longer than {MAX_LIFETIME} s"
            )
        known = self._members.get(from_peer)
        if known == record:
            return Acceptance(record, is_new=False, has_moved=False)
        largest, _ = self._sequences.get(from_peer, (0, 0.0))
        if record.sequence <= largest:
            raise RecordRefusedError(
                RecordFault.REPLAYED,
                f"its sequence number is {record.sequence}, and {largest} was seen",
            )
        self._check_certificate(record)
        if known is None and len(self._members) >= MAX_MEMBERS:
            raise RecordRefusedError(
                RecordFault.SURPLUS, f"{MAX_MEMBERS} members are known already"
            )
        self._remember_sequence(record, now)
        self._members[from_peer] = record
        return Acceptance(
            record,
            is_new=known is None,
            has_moved=known is not None and known.addresses != record.addresses,
        )

    def expire(self) -> list[MemberRecord]:
        """Take out the members whose record has expired, and return what they said last."""
        now = self._now()
        expired = [record for record in self._members.values() if self.seconds_left(record) <= 0]
        for record in expired:
            del self._members[record.peer_id]
        while self._sequences:
            peer_id = next(iter(self._sequences))
            if self._sequences[peer_id][1] > now:
                break
            del self._sequences[peer_id]
        return expired

    def seconds_left(self, record: MemberRecord) -> float:
        """Seconds for which a record still counts; not above zero when it does not."""
        return record.expires + self._clock_skew - self._now()

    def _check_certificate(self, record: MemberRecord) -> None:
        if self._verify is None:
            return
        try:
            self._verify(record.peer_id, record.role, record.certificate)
        except NeuroGridError as exc:
            raise RecordRefusedError(RecordFault.UNTRUSTED, printable_line(str(exc))[:200]) from exc

    def _remember_sequence(self, record: MemberRecord, now: float) -> None:
        self._sequences.pop(record.peer_id, None)
        if len(self._sequences) >= _MAX_REMEMBERED:
            del self._sequences[next(iter(self._sequences))]
        until = now + MAX_LIFETIME + 2 * self._clock_skew
        self._sequences[record.peer_id] = (record.sequence, until)
