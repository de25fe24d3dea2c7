"""Names of machines: the one that this machine tells its peers, and a peer as people are shown it.

A name is what its peer says, so it stands beside the peer id and never in its place: nothing is decided by it, and
two peers may have the same.

Source: protocol_spec/messages.md, Hello.
"""

from __future__ import annotations

import re
import socket
from collections import OrderedDict
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.hosts.identity import short_peer_id
from neurogrid.p2p.wire.limits import MAX_MACHINE_CHARS
from neurogrid.p2p.wire.maps import printable_line

__all__ = ["PeerNames", "machine_name", "named_peer"]

# Of Ed25519 keys, in base 58; behind a slash it is a part of an address, which somebody may copy.
_PEER_ID: Final = re.compile(r"(?<![/=\w])12D3KooW[1-9A-HJ-NP-Za-km-z]{44}(?![/=\w])")

# Peers whose names are remembered: more than are connected, since some are shown when they have gone.
MAX_NAMES: Final = 1024


def machine_name(chosen: str | None = None) -> str:
    """Return the name that peers are told of this machine; empty for none.

    Args:
        chosen: a name, empty to tell none; None for the host's name up to its first dot.

    Raises:
        ConfigurationError: the chosen name is too long, or not one line of printable characters.
    """
    if chosen is None:
        host = printable_line(socket.gethostname().split(".")[0])
        return host[:MAX_MACHINE_CHARS].strip()
    if len(chosen) > MAX_MACHINE_CHARS or chosen != printable_line(chosen).strip():
        raise ConfigurationError(
            f"{chosen!r} cannot be the name of a machine: at most {MAX_MACHINE_CHARS} printable characters, "
            "no space at either end"
        )
    return chosen


def named_peer(peer_id: str, name: str = "", address: str = "") -> str:
    """A peer, for people: `gpu-box …CByAwxBW (192.168.1.7)`, without what is not known."""
    shown = f"{name} {short_peer_id(peer_id)}" if name else short_peer_id(peer_id)
    return f"{shown} ({address})" if address else shown


class PeerNames:
    """The names of peers and the addresses of their machines, as far as they were told; the last `MAX_NAMES`."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def note(self, peer_id: str, name: str, address: str) -> None:
        """Remember what a peer calls its machine, and the IP address that it has; either may be empty."""
        self._known[peer_id] = (name, address)
        self._known.move_to_end(peer_id)
        if len(self._known) > MAX_NAMES:
            self._known.popitem(last=False)

    def name_of(self, peer_id: str) -> str:
        """Its name; empty where none was told."""
        return self._known.get(peer_id, ("", ""))[0]

    def address_of(self, peer_id: str) -> str:
        """The IP address of its machine; empty where that is not known."""
        return self._known.get(peer_id, ("", ""))[1]

    def of(self, peer_id: str) -> str:
        """The peer, for people, by its name and the end of its peer id."""
        return named_peer(peer_id, self.name_of(peer_id))

    def in_full(self, peer_id: str) -> str:
        """The same with the address."""
        return named_peer(peer_id, *self._known.get(peer_id, ("", "")))

    def beside_ids(self, text: str) -> str:
        """A text for people with the names beside the whole peer ids that stand alone in it, not in an address."""
        return _PEER_ID.sub(lambda found: f"{found[0]}{self._in_brackets(found[0])}", text)

    def _in_brackets(self, peer_id: str) -> str:
        name = self.name_of(peer_id)
        return f" ({name})" if name else ""
