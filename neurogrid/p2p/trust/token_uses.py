"""The certificates that join tokens gave, for those that give a limited number.

A use of a token belongs to one peer: when it shows the token again, it is given the same certificate again, and nothing
is counted. Two peers that dial each other at once exchange credentials twice, and a verdict may be lost with its
connection. So a peer is given again only what it has had, or was owed.

Only the issuer counts, in a file beside the cluster's key. A token is forgotten a month after it has expired, or
sooner if others need the room: a clock that was ahead for a while would bring its uses back otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgpack

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.trust.certificate import Certificate
from neurogrid.p2p.trust.join_token import JoinToken
from neurogrid.p2p.trust.limits import (
    CLOCK_SKEW,
    MAX_TOKENS_COUNTED,
    MAX_USES_COUNTED,
    TOKEN_MEMORY,
)
from neurogrid.p2p.trust.private_files import read_private, write_private
from neurogrid.p2p.trust.refusal import Refusal, RefusedError

__all__ = ["TokenUses"]

MAX_FILE_BYTES: Final = MAX_USES_COUNTED * 512  # a use takes about 300 B

# Of each token, by its serial: when it expires, and for each use the peer and its certificate.
_Uses = dict[int, tuple[int, list[tuple[str, bytes]]]]


class TokenUses:
    """The uses in one file. The caller holds the directory's lock.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def copy_to(self, path: Path) -> None:
        """Write what is counted so far to another file, if anything is.

        Raises:
            ConfigurationError: a file cannot be read or written.
        """
        data = read_private(self.path, MAX_FILE_BYTES)
        if data is not None:
            write_private(path, data)

    def given(self, token: JoinToken, peer_id: str) -> bytes | None:
        """The certificate that a peer was given last for a token, as it was signed; None if there is none.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        if not token.max_uses:
            return None
        _, given = self._read().get(token.serial, (0, []))
        return next((data for peer, data in reversed(given) if peer == peer_id), None)

    def spend(self, token: JoinToken, certificate: Certificate, *, now: float) -> None:
        """Count one use, for the peer of a certificate that is to be given.

        Raises:
            RefusedError: TOKEN_USED_UP.
            ConfigurationError: the file cannot be read or written.
        """
        if not token.max_uses:
            return
        uses = _after(self._read(), now - TOKEN_MEMORY)
        if _is_full(uses, token):
            uses = _after(uses, now - CLOCK_SKEW)
        _, given = uses.get(token.serial, (0, []))
        if len(given) >= token.max_uses:
            raise RefusedError(
                Refusal.TOKEN_USED_UP,
                f"the ticket was good for {token.max_uses} machines, and so many have joined",
            )
        if _is_full(uses, token):
            raise RefusedError(
                Refusal.TOKEN_USED_UP, "the issuer counts the uses of too many tickets already"
            )
        given.append((certificate.peer_id, certificate.data))
        uses[token.serial] = (token.not_after, given)
        rows = [[serial, *entry] for serial, entry in uses.items()]
        write_private(self.path, msgpack.packb(rows))

    def _read(self) -> _Uses:
        data = read_private(self.path, MAX_FILE_BYTES)
        if data is None:
            return {}
        try:
            return {
                int(serial): (int(until), [(str(peer), b"" + signed) for peer, signed in given])
                for serial, until, given in msgpack.unpackb(data)
            }
        except (ValueError, TypeError, msgpack.UnpackException) as exc:
            raise ConfigurationError(f"{self.path} does not count uses of tickets: {exc}") from exc


def _after(uses: _Uses, moment: float) -> _Uses:
    """Return the uses of tokens that expire after `moment`."""
    return {serial: entry for serial, entry in uses.items() if moment < entry[0]}


def _is_full(uses: _Uses, token: JoinToken) -> bool:
    """Whether there is no room for one more use, of this token."""
    num_counted = sum(len(certificates) for _, certificates in uses.values())
    is_new = token.serial not in uses
    return num_counted >= MAX_USES_COUNTED or (is_new and len(uses) >= MAX_TOKENS_COUNTED)
