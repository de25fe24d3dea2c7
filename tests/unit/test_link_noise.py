"""Noise transport messages without a socket: the bytes of another implementation, cuts, tampering, counters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noise.connection import NoiseConnection

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.link.ciphers import AES_GCM, CHACHA_POLY, CIPHERS, Cipher, CipherState
from neurogrid.p2p.link.noise import MAX_PLAINTEXT, MAX_SEALED, OPEN_BUFFER, Opener, Sealer
from tests.unit.vectors import in_turn

KEY = bytes(range(32))
UNHURRIED = settings(deadline=None)
each_cipher = pytest.mark.parametrize("name", CIPHERS)


def fresh(cipher: Cipher = CHACHA_POLY, counter: int = 0) -> CipherState:
    return CipherState(cipher, KEY, counter)


def seal(sealer: Sealer, *messages: bytes) -> bytes:
    sealed = b""
    for message in messages:
        sealer.seal(message)
        sealed += bytes(sealer.pending)
        sealer.sent(sealer.num_pending)
    return sealed


def feed(opener: Opener, data: bytes) -> list[bytes]:
    """Give `data` to the opener as a socket would, and open what is complete."""
    messages = []
    while data:
        space = opener.space
        piece, data = data[: len(space)], data[len(space) :]
        space[: len(piece)] = piece
        opener.received(len(piece))
        while opener.next_length() is not None:
            messages.append(opener.open())
    return messages


def handshake(name: str = "ChaChaPoly") -> tuple[NoiseConnection, NoiseConnection]:
    """Two ends of a handshake by an implementation that is not ours."""
    protocol = f"Noise_NN_25519_{name}_SHA256".encode()
    ends = tuple(NoiseConnection.from_name(protocol) for _ in range(2))
    ends[0].set_as_initiator()
    ends[1].set_as_responder()
    for end in ends:
        end.start_handshake()
    ends[1].read_message(ends[0].write_message())
    ends[0].read_message(ends[1].write_message())
    return ends[0], ends[1]


@each_cipher
def test_another_implementation_reads_what_is_sealed(name: str) -> None:
    one, other = handshake(name)
    sealer = Sealer(CipherState(CIPHERS[name], one.noise_protocol.cipher_state_encrypt.k))
    for message in (b"a", bytes(1000), bytes(MAX_PLAINTEXT)):
        sealed = seal(sealer, message)
        assert int.from_bytes(sealed[:2], "big") == len(sealed) - 2 == len(message) + 16
        assert other.decrypt(sealed[2:]) == message


@each_cipher
def test_what_another_implementation_sealed_is_read(name: str) -> None:
    one, other = handshake(name)
    opener = Opener(CipherState(CIPHERS[name], other.noise_protocol.cipher_state_decrypt.k))
    messages = [b"a", b"", bytes(range(256)) * 200]
    sealed = b"".join(len(data).to_bytes(2, "big") + data for data in map(one.encrypt, messages))
    assert feed(opener, sealed) == messages


@each_cipher
def test_a_session_may_begin_in_the_middle(name: str) -> None:
    one, other = handshake(name)
    other.decrypt(one.encrypt(b"of the handshake's making"))
    state = one.noise_protocol.cipher_state_encrypt
    sealed = seal(Sealer(CipherState(CIPHERS[name], state.k, state.n)), b"goes on")
    assert other.decrypt(sealed[2:]) == b"goes on"


def test_each_key_of_aes_seals_so_many_messages_and_no_more() -> None:
    _, other = handshake("AESGCM")
    theirs = other.noise_protocol.cipher_state_decrypt
    lasts = AES_GCM.messages_per_key
    assert lasts is not None
    first_of_a_key = (lasts, 2 * lasts)
    sealer = Sealer(CipherState(AES_GCM, theirs.k, lasts - 1))
    opener = Opener(CipherState(AES_GCM, theirs.k, lasts - 1))
    keys = set()
    for counter in (lasts - 1, lasts, lasts + 1, 2 * lasts - 1, 2 * lasts):
        sealer._state._counter = opener._state._counter = counter
        sealed = seal(sealer, b"message")
        theirs.set_nonce(counter)
        if counter in first_of_a_key:
            theirs.rekey()
        assert other.decrypt(sealed[2:]) == b"message"
        assert feed(opener, sealed) == [b"message"]
        keys.add(theirs.k)
    assert len(keys) == 3


@in_turn("noise_aesgcm")
def test_messages_are_those_of_the_vectors(name: str, case: Any) -> None:
    """Sealed by another implementation, with its own rule for a new key."""
    key, counter = bytes.fromhex(case["key"]), int(case["counter"])
    assert (
        seal(Sealer(gone_on(key, counter)), bytes.fromhex(case["plaintext"])).hex()
        == case["sealed"]
    )
    [opened] = feed(Opener(gone_on(key, counter)), bytes.fromhex(case["sealed"]))
    assert opened.hex() == case["plaintext"]


def gone_on(key: bytes, counter: int) -> CipherState:
    """The state of a direction that began with this key, before the message of this counter."""
    state = CipherState(AES_GCM, key)
    lasts = AES_GCM.messages_per_key
    assert lasts is not None
    for first_of_a_key in range(lasts, counter, lasts):
        state._counter = first_of_a_key
        state.next_nonce()
    state._counter = counter
    return state


def test_one_key_of_chacha_is_enough() -> None:
    state = fresh(counter=2**40)
    before = state.aead
    state.next_nonce()
    assert state.aead is before


@UNHURRIED
@given(
    st.sampled_from([CHACHA_POLY, AES_GCM]),
    st.lists(st.binary(min_size=1, max_size=300) | st.just(bytes(MAX_PLAINTEXT)), max_size=6),
    st.lists(st.integers(1, 70_000), max_size=30),
)
def test_cuts_make_no_difference(cipher: Cipher, messages: list[bytes], cuts: list[int]) -> None:
    sealed = seal(Sealer(fresh(cipher)), *messages)
    opener = Opener(fresh(cipher))
    opened = []
    for cut in [*cuts, len(sealed)]:
        opened += feed(opener, sealed[:cut])
        sealed = sealed[cut:]
    assert opened == messages
    assert len(opener.space) == OPEN_BUFFER  # nothing is left in it


def test_every_cut_of_a_message_waits_for_the_rest() -> None:
    sealed = seal(Sealer(fresh()), b"message")
    for cut in range(len(sealed)):
        opener = Opener(fresh())
        assert feed(opener, sealed[:cut]) == []
        assert feed(opener, sealed[cut:]) == [b"message"]


def test_opening_into_memory_of_the_caller() -> None:
    opener = Opener(fresh())
    sealed = seal(Sealer(fresh()), b"first", b"second")
    opener.space[: len(sealed)] = sealed
    opener.received(len(sealed))
    memory = bytearray(b".....-----.")
    assert opener.next_length() == 5
    opener.open_into(memoryview(memory)[:5])
    assert opener.next_length() == 6
    opener.open_into(memoryview(memory)[5:])
    assert memory == b"firstsecond"
    assert opener.next_length() is None


@pytest.mark.parametrize("position", [2, 10, -1])
def test_a_flipped_bit_is_found(position: int) -> None:
    sealed = bytearray(seal(Sealer(fresh()), b"a message that matters"))
    sealed[position] ^= 1
    with pytest.raises(RemoteProtocolError, match="authentication"):
        feed(Opener(fresh()), bytes(sealed))


def test_a_flipped_bit_is_found_in_memory_of_the_caller() -> None:
    sealed = bytearray(seal(Sealer(fresh()), b"message"))
    sealed[5] ^= 1
    opener = Opener(fresh())
    opener.space[: len(sealed)] = sealed
    opener.received(len(sealed))
    assert opener.next_length() == 7
    with pytest.raises(RemoteProtocolError, match="authentication"):
        opener.open_into(memoryview(bytearray(7)))


def test_messages_are_read_once_and_in_order() -> None:
    sealer = Sealer(fresh())
    first, second = seal(sealer, b"first"), seal(sealer, b"second")
    for sequence in ([second], [first, first], [first, second, second]):
        with pytest.raises(RemoteProtocolError):
            feed(Opener(fresh()), b"".join(sequence))


@pytest.mark.parametrize("length", [0, 15])
def test_a_message_shorter_than_its_tag_is_an_error(length: int) -> None:
    with pytest.raises(RemoteProtocolError, match="shorter"):
        feed(Opener(fresh()), length.to_bytes(2, "big") + bytes(length))


def test_a_used_up_counter_ends_the_session() -> None:
    sealer = Sealer(fresh(counter=2**64 - 2))
    sealed = seal(sealer, b"last")
    with pytest.raises(LocalProtocolError):
        sealer.seal(b"one too many")
    opener = Opener(fresh(counter=2**64 - 2))
    with pytest.raises(RemoteProtocolError, match="more messages"):
        feed(opener, sealed + sealed)


@pytest.mark.parametrize("size", [0, MAX_PLAINTEXT + 1])
def test_sizes_that_no_message_has_are_refused(size: int) -> None:
    with pytest.raises(LocalProtocolError):
        Sealer(fresh()).seal(bytes(size))


def test_what_is_free_still_fits() -> None:
    sealer = Sealer(fresh(), capacity=200_000)
    while sealer.free >= MAX_SEALED:
        sealer.seal(bytes(MAX_PLAINTEXT))
    sealer.seal(bytes(sealer.free - (MAX_SEALED - MAX_PLAINTEXT)))
    assert sealer.free == 0
    with pytest.raises(LocalProtocolError):
        sealer.seal(b"x")
    sealer.sent(sealer.num_pending)
    assert sealer.free == 200_000


def test_what_was_sent_in_part_stays() -> None:
    sealer = Sealer(fresh())
    sealer.seal(b"message")
    whole = bytes(sealer.pending)
    sealer.sent(10)
    assert bytes(sealer.pending) == whole[10:]
    sealer.sent(len(whole) - 10)
    assert sealer.num_pending == 0


def test_a_buffer_grows_between_batches_and_goes_on() -> None:
    sealer, opener = Sealer(fresh()), Opener(fresh())
    before = sealer.free
    sealer.seal(b"pending")
    sealer.grow()
    assert sealer.free < before  # what is pending stays where it is
    opened = feed(opener, bytes(sealer.pending))
    sealer.sent(sealer.num_pending)
    sealer.grow()
    assert sealer.free > 2 * before
    assert opened + feed(opener, seal(sealer, b"goes on")) == [b"pending", b"goes on"]
