"""Tokens of a Retry: a client that shows one receives at the address that it claims.

A token says for whom, between which connection ids and when it was made, under a key that lives as long as the
listener. So nothing is kept for a client before it has shown one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Any, Final

__all__ = ["RetryTokens"]

_MAC_BYTES: Final = 32
_MAX_CID: Final = 20


class RetryTokens:
    """Makes tokens and takes them back.

    Args:
        lifetime: seconds that a token is good for.
    """

    def __init__(self, lifetime: float) -> None:
        self._lifetime = lifetime
        self._key = secrets.token_bytes(32)

    def make(
        self, address: tuple[Any, ...], original_cid: bytes, retry_cid: bytes, now: float
    ) -> bytes:
        """A token for a client at `address`.

        Args:
            original_cid: where it sent its first datagram.
            retry_cid: where it is told to send the next.
            now: seconds, of any clock that goes on.
        """
        content = struct.pack(">dB", now, len(original_cid)) + original_cid + retry_cid
        return content + self._mac(content, address)

    def take(
        self, token: bytes, address: tuple[Any, ...], now: float
    ) -> tuple[bytes, bytes] | None:
        """The original and the retry's connection id; None if the token is not for `address`, not ours, or old."""
        content, mac = token[:-_MAC_BYTES], token[-_MAC_BYTES:]
        if len(content) < 9 or not hmac.compare_digest(mac, self._mac(content, address)):
            return None
        made_at, length = struct.unpack(">dB", content[:9])
        original_cid, retry_cid = content[9 : 9 + length], content[9 + length :]
        if not 0 <= now - made_at <= self._lifetime or length > _MAX_CID:
            return None
        return original_cid, retry_cid

    def _mac(self, content: bytes, address: tuple[Any, ...]) -> bytes:
        return hmac.digest(self._key, repr(address[:2]).encode() + b"|" + content, hashlib.sha256)
