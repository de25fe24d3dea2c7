"""Ciphers of the Noise framework, and the state that one direction of a session has of its own: a key and a counter.

libp2p's handshake knows ChaCha20-Poly1305 alone. Two peers whose processors have instructions for AES seal with AES-GCM
in less than half of the time, which is most of what a byte costs on its way; so they may agree on that
(`security_options`).

Source: the Noise Protocol Framework, revision 34, sections 4.2, 5.1, 11.3 and 12; protocol_spec/security.md, "AES-GCM".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

__all__ = ["AES_GCM", "CHACHA_POLY", "CIPHERS", "Cipher", "CipherState", "is_aes_quicker"]

KEY_BYTES: Final = 32
# The last counter is reserved for a new key (section 5.1). At 64 KiB a message nobody ever gets there; checked, because
# a nonce used twice gives the plaintext away.
MAX_COUNTER: Final = 2**64 - 2
_REKEYING: Final = 2**64 - 1
# What is measured once for a process, and how often: the least is what the processor takes.
_PROBE_BYTES: Final = 65_519
_PROBES: Final = 12


@dataclass(frozen=True)
class Cipher:
    """A cipher as the Noise framework uses it.

    Attributes:
        aead: makes the cipher of a key of 32 bytes.
        pack_nonce: the nonce of a counter, 12 bytes.
        messages_per_key: how many a key seals before the next one takes its place; None for all of a session.
    """

    aead: type[AESGCM] | type[ChaCha20Poly1305]
    pack_nonce: Callable[[int], bytes]
    messages_per_key: int | None = None


# Four zero bytes, then the counter: in little-endian here, in big-endian there (section 12).
CHACHA_POLY: Final = Cipher(ChaCha20Poly1305, Struct("<4xQ").pack)
# 64 GiB of the largest messages, 2^32 blocks: with so many, what is sealed is told from chance with 2^-65.
AES_GCM: Final = Cipher(AESGCM, Struct(">4xQ").pack, messages_per_key=2**20)

CIPHERS: Final = {"ChaChaPoly": CHACHA_POLY, "AESGCM": AES_GCM}
"""Ciphers by the name that they have in that of a Noise protocol."""


class CipherState:
    """The key and the counter of one direction.

    Args:
        cipher: that of the handshake.
        key: 32 bytes: the one for messages from `counter` on.
        counter: the number of messages that went before.

    Attributes:
        aead: the cipher with the key for the message whose nonce was asked for last.
    """

    def __init__(self, cipher: Cipher, key: bytes, counter: int = 0) -> None:
        self.aead = cipher.aead(key)
        self._cipher = cipher
        self._counter = counter

    @property
    def is_used_up(self) -> bool:
        """Whether the key has been used for as many messages as it may."""
        return self._counter > MAX_COUNTER

    def next_nonce(self) -> bytes:
        """Return the next message's nonce, which is given once, and have `aead` be what seals that message."""
        counter, messages_per_key = self._counter, self._cipher.messages_per_key
        if messages_per_key and counter and not counter % messages_per_key:
            nonce = self._cipher.pack_nonce(_REKEYING)
            key = self.aead.encrypt(nonce, bytes(KEY_BYTES), None)[:KEY_BYTES]
            self.aead = self._cipher.aead(key)
        self._counter = counter + 1
        return self._cipher.pack_nonce(counter)


@cache
def is_aes_quicker() -> bool:
    """Whether AES-GCM takes this processor less time than ChaCha20-Poly1305: where it has instructions for it."""
    return _seconds(AES_GCM) < _seconds(CHACHA_POLY)


def _seconds(cipher: Cipher) -> float:
    """The least time that one large message was sealed in."""
    state, data = CipherState(cipher, bytes(KEY_BYTES)), bytes(_PROBE_BYTES)
    taken = []
    for _ in range(_PROBES):
        nonce, start = state.next_nonce(), time.perf_counter()
        state.aead.encrypt(nonce, data, None)
        taken.append(time.perf_counter() - start)
    return min(taken)
