"""Addresses at which an issuer was last reached: a file beside the cluster's key, so that tickets can be made while it
runs; and one beside a worker's membership, so that it finds its coordinator again without a ticket.

DIR/whereabouts      a msgpack map, 0600
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from neurogrid.errors import ConfigurationError, RemoteProtocolError
from neurogrid.p2p.trust.limits import MAX_ADDRESSES, MAX_PEER_ID_CHARS, MAX_RELAYS, MAX_TIME
from neurogrid.p2p.trust.private_files import (
    make_private_directory,
    read_private,
    write_private,
)
from neurogrid.p2p.wire.forms import Map, array, text, uint

__all__ = ["Whereabouts", "sort_addresses"]

FILE: Final = "whereabouts"
CIRCUIT: Final = "/p2p-circuit/"
# Characters. A ticket's 255 bytes are fewer than that as text.
MAX_ADDRESS_CHARS: Final = 1024
MAX_FILE_BYTES: Final = (MAX_ADDRESSES + MAX_RELAYS) * (MAX_ADDRESS_CHARS + 8) + 256
_MAP = Map(
    FILE,
    {
        "peer": text(MAX_PEER_ID_CHARS),
        "addrs": array(text(MAX_ADDRESS_CHARS), MAX_ADDRESSES),
        "relays": array(text(MAX_ADDRESS_CHARS), MAX_RELAYS),
        "at": uint(MAX_TIME),
    },
    max_bytes=MAX_FILE_BYTES,
)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Addresses of one host at a moment.

    Attributes:
        peer_id: which (base58).
        addresses: full multiaddrs at which it was dialled directly, at most 8.
        relays: full multiaddrs of relays through which it can be reached, at most 4.
        at: when that was so, seconds of the Unix epoch.
    """

    peer_id: str
    addresses: tuple[str, ...]
    relays: tuple[str, ...]
    at: int

    @classmethod
    def of(cls, peer_id: str, addresses: Iterable[str], *, now: float | None = None) -> Whereabouts:
        """Return the whereabouts of a host that can be dialled at `addresses`, direct and through relays; the first
        of these if there are more than a ticket holds."""
        direct, relays = sort_addresses(addresses)
        moment = int(time.time() if now is None else now)
        return cls(peer_id, direct[:MAX_ADDRESSES], relays[:MAX_RELAYS], moment)

    @property
    def dial_addresses(self) -> tuple[str, ...]:
        """Addresses at which to dial the host: directly, and then through each relay."""
        relayed = (f"{relay}{CIRCUIT}p2p/{self.peer_id}" for relay in self.relays)
        return (*self.addresses, *relayed)

    @classmethod
    def read(cls, directory: Path) -> Whereabouts | None:
        """Read what `write` left in a directory; None if nobody wrote there.

        Raises:
            ConfigurationError: it cannot be read, or is not what was written.
        """
        path = directory / FILE
        data = read_private(path, MAX_FILE_BYTES)
        if data is None:
            return None
        try:
            return cls(*_MAP.decode(data))
        except RemoteProtocolError as exc:
            raise ConfigurationError(f"{path} is damaged: {exc}; delete it") from exc

    def write(self, directory: Path) -> None:
        """Keep it in a directory (0700), in place of what is there.

        Raises:
            ConfigurationError: it cannot be written.
        """
        make_private_directory(directory)
        entries = self.peer_id, self.addresses, self.relays, self.at
        write_private(directory / FILE, _MAP.encode(entries))


def sort_addresses(addresses: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The direct ones of a peer's addresses, and the relays of the others; each once, in their order."""
    direct: dict[str, None] = {}
    relays: dict[str, None] = {}
    for address in addresses:
        relay, is_relayed, _ = address.partition(CIRCUIT)
        (relays if is_relayed else direct).setdefault(relay)
    return tuple(direct), tuple(relays)
