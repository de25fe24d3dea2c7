"""How often each join token was used, for those that give a limited number of certificates.

Only the issuer counts, in a file beside the cluster's key; a token is forgotten when it expires.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgpack

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.trust.join_token import JoinToken
from neurogrid.p2p.trust.limits import CLOCK_SKEW, MAX_TOKENS_COUNTED
from neurogrid.p2p.trust.private_files import read_private, write_private
from neurogrid.p2p.trust.refusal import Refusal, RefusedError

__all__ = ["TokenUses"]

MAX_FILE_BYTES: Final = 64 * 1024


class TokenUses:
    """The counts in one file. The caller holds the directory's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def spend(self, token: JoinToken, *, now: float) -> None:
        """Count one use.

        Raises:
            RefusedError: TOKEN_USED_UP.
            ConfigurationError: the file cannot be read or written.
        """
        if not token.max_uses:
            return
        uses = {
            serial: (num_uses, not_after)
            for serial, (num_uses, not_after) in self._read().items()
            if now < not_after + CLOCK_SKEW
        }
        num_uses, _ = uses.get(token.serial, (0, 0))
        if num_uses >= token.max_uses:
            raise RefusedError(
                Refusal.TOKEN_USED_UP,
                f"the ticket was good for {token.max_uses} machines, and so many have joined",
            )
        if token.serial not in uses and len(uses) >= MAX_TOKENS_COUNTED:
            raise RefusedError(
                Refusal.TOKEN_USED_UP, "the issuer counts the uses of too many tickets already"
            )
        uses[token.serial] = (num_uses + 1, token.not_after)
        rows = [[serial, *entry] for serial, entry in uses.items()]
        write_private(self._path, msgpack.packb(rows))

    def _read(self) -> dict[int, tuple[int, int]]:
        data = read_private(self._path, MAX_FILE_BYTES)
        if data is None:
            return {}
        try:
            return {
                int(serial): (int(num), int(until)) for serial, num, until in msgpack.unpackb(data)
            }
        except (ValueError, TypeError, msgpack.UnpackException) as exc:
            raise ConfigurationError(f"{self._path} does not count uses of tickets: {exc}") from exc
