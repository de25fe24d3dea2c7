"""Noise transport messages, sans I/O: plaintext in, framed ciphertext out, and back.

What begins after a Noise handshake: each direction has a key and a counter (`ciphers`), and its messages stand on the
wire as a length of two bytes (big-endian) and at most 65,535 bytes of ciphertext, of which the last 16 are the tag. The
bytes are those of every libp2p implementation. Nothing here knows what the plaintext is, nor where bytes come from.

Strategy: both directions work in one reused buffer each. `Sealer` encrypts straight from the caller's memory into
its buffer, many messages for one write to the socket. `Opener` lends the free part of its buffer to `recv_into`
and then opens every complete message in it, into memory of the caller's choice or into a bytes object.

Source: the Noise Protocol Framework, revision 34, section 5.1;
https://github.com/libp2p/specs/blob/master/noise/README.md ("Wire format").
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from cryptography.exceptions import InvalidTag

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.link.ciphers import CipherState

__all__ = ["MAX_PLAINTEXT", "MAX_SEALED", "TAG_BYTES", "Opener", "Sealer"]

TAG_BYTES: Final = 16
LENGTH_BYTES: Final = 2
MAX_CIPHERTEXT: Final = 65_535  # what the length can say
MAX_PLAINTEXT: Final = MAX_CIPHERTEXT - TAG_BYTES
_OVERHEAD: Final = LENGTH_BYTES + TAG_BYTES
MAX_SEALED: Final = LENGTH_BYTES + MAX_CIPHERTEXT  # with its length

# Measured on loopback: a larger buffer to seal into saves turns of the event loop, and delays what comes after it,
# so half a MiB. A larger one to receive into saves nothing, and leaves the processor's second cache.
# A connection begins with a third of it, and most never need more.
FIRST_SEAL_BUFFER: Final = 3 * MAX_SEALED
SEAL_BUFFER: Final = 9 * MAX_SEALED
OPEN_BUFFER: Final = 4 * MAX_SEALED

_pack_length_into = Struct(">H").pack_into
_unpack_length_from = Struct(">H").unpack_from


class Sealer:
    """Encrypts one direction into a buffer that is sent and used again.

    Args:
        state: this direction's key and counter.
        capacity: bytes of the buffer; at least one message of the largest size.
    """

    def __init__(self, state: CipherState, *, capacity: int = FIRST_SEAL_BUFFER) -> None:
        if capacity < MAX_SEALED:
            raise LocalProtocolError(f"{capacity} B hold no Noise message of {MAX_SEALED} B")
        self._state = state
        self._buffer = memoryview(bytearray(capacity))
        self._start = 0
        self._end = 0

    @property
    def pending(self) -> memoryview:
        """Sealed bytes that were not sent yet, to be told to `sent`."""
        return self._buffer[self._start : self._end]

    @property
    def num_pending(self) -> int:
        """The length of `pending`."""
        return self._end - self._start

    @property
    def free(self) -> int:
        """The bytes that further messages may have, sealed: the largest has `MAX_SEALED`."""
        return len(self._buffer) - self._end

    def seal(self, data: bytes | bytearray | memoryview) -> None:
        """Append one message. `data` is bytes, not empty, at most `MAX_PLAINTEXT`; it is read once and not kept.

        Raises:
            LocalProtocolError: no room, an empty or too large message, or the counter is used up.
        """
        at, num_bytes = self._end, len(data)
        end = at + num_bytes + _OVERHEAD
        if not 0 < num_bytes <= MAX_PLAINTEXT or end > len(self._buffer):
            raise LocalProtocolError(f"no room to seal {num_bytes} B")
        if self._state.is_used_up:
            raise LocalProtocolError("this key has sealed as many messages as it may")
        _pack_length_into(self._buffer, at, num_bytes + TAG_BYTES)
        nonce = self._state.next_nonce()
        self._state.aead.encrypt_into(nonce, data, None, self._buffer[at + LENGTH_BYTES : end])
        self._end = end

    def grow(self) -> None:
        """Make the buffer as large as is useful; only while nothing is pending."""
        if not self.num_pending and len(self._buffer) < SEAL_BUFFER:
            self._buffer = memoryview(bytearray(SEAL_BUFFER))

    def sent(self, num_bytes: int) -> None:
        """Forget the first bytes of `pending`: the socket has taken them."""
        self._start += num_bytes
        if self._start >= self._end:
            self._start = self._end = 0


class Opener:
    """Decrypts one direction out of a buffer that is received into and used again.

    The cycle: `recv_into(opener.space)`, `received(n)`, then `next_length` and `open` or `open_into` until
    `next_length` says None. A message counts as taken when it was opened.

    Args:
        state: this direction's key and counter.
        capacity: bytes of the buffer; at least two messages of the largest size.
    """

    def __init__(self, state: CipherState, *, capacity: int = OPEN_BUFFER) -> None:
        if capacity < 2 * MAX_SEALED:
            raise LocalProtocolError(f"{capacity} B hold no two messages of {MAX_SEALED} B")
        self._state = state
        self._buffer = memoryview(bytearray(capacity))
        self._start = 0
        self._end = 0
        self._length = 0  # of the ciphertext at _start, once `next_length` has seen it whole

    @property
    def space(self) -> memoryview:
        """Memory to receive into next: at least one whole message's worth, and mostly far more."""
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._buffer) - self._end < MAX_SEALED:
            # What is left of a message moves to the front: rarely, since the buffer holds many.
            left = self._end - self._start
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left
        return self._buffer[self._end :]

    def received(self, num_bytes: int) -> None:
        """Say how many bytes were written to `space`."""
        self._end += num_bytes

    def next_length(self) -> int | None:
        """The plaintext length of the next complete message, or None while there is none.

        Raises:
            RemoteProtocolError: a message shorter than its tag.
        """
        available = self._end - self._start - LENGTH_BYTES
        if available < 0:
            return None
        (length,) = _unpack_length_from(self._buffer, self._start)
        if length < TAG_BYTES:
            raise RemoteProtocolError(f"a Noise message of {length} B is shorter than its tag")
        if available < length:
            return None
        self._length = length
        return int(length) - TAG_BYTES

    def open(self) -> bytes:
        """Decrypt the message that `next_length` has announced.

        Raises:
            RemoteProtocolError: it was not sealed by the peer, or not in this order. The connection is lost.
        """
        ciphertext = self._ciphertext()
        nonce = self._state.next_nonce()
        try:
            data = self._state.aead.decrypt(nonce, ciphertext, None)
        except InvalidTag as exc:
            raise RemoteProtocolError("a Noise message failed authentication") from exc
        self._advance()
        return data

    def open_into(self, destination: memoryview) -> None:
        """As `open`, into memory of exactly the announced length. On an error its content is undefined."""
        ciphertext = self._ciphertext()
        nonce = self._state.next_nonce()
        try:
            self._state.aead.decrypt_into(nonce, ciphertext, None, destination)
        except InvalidTag as exc:
            raise RemoteProtocolError("a Noise message failed authentication") from exc
        self._advance()

    def _ciphertext(self) -> memoryview:
        if not self._length:
            raise LocalProtocolError("no complete message was announced")
        if self._state.is_used_up:
            raise RemoteProtocolError("the peer sealed more messages than its key may")
        at = self._start + LENGTH_BYTES
        return self._buffer[at : at + self._length]

    def _advance(self) -> None:
        self._start += LENGTH_BYTES + self._length
        self._length = 0
