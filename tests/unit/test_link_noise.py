"""Noise transport messages without a socket: the bytes of another implementation, cuts, tampering, counters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noise.connection import NoiseConnection

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.link.noise import MAX_PLAINTEXT, MAX_SEALED, OPEN_BUFFER, Opener, Sealer

KEY = bytes(range(32))
UNHURRIED = settings(deadline=None)


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


def handshake() -> tuple[NoiseConnection, NoiseConnection]:
    """Two ends of a handshake by an implementation that is not ours."""
    ends = tuple(NoiseConnection.from_name(b"Noise_NN_25519_ChaChaPoly_SHA256") for _ in range(2))
    ends[0].set_as_initiator()
    ends[1].set_as_responder()
    for end in ends:
        end.start_handshake()
    ends[1].read_message(ends[0].write_message())
    ends[0].read_message(ends[1].write_message())
    return ends[0], ends[1]


def test_another_implementation_reads_what_is_sealed() -> None:
    one, other = handshake()
    state = one.noise_protocol.cipher_state_encrypt
    sealer = Sealer(state.k)
    for message in (b"a", bytes(1000), bytes(MAX_PLAINTEXT)):
        sealed = seal(sealer, message)
        assert int.from_bytes(sealed[:2], "big") == len(sealed) - 2 == len(message) + 16
        assert other.decrypt(sealed[2:]) == message


def test_what_another_implementation_sealed_is_read() -> None:
    one, other = handshake()
    opener = Opener(other.noise_protocol.cipher_state_decrypt.k)
    messages = [b"a", b"", bytes(range(256)) * 200]
    sealed = b"".join(len(data).to_bytes(2, "big") + data for data in map(one.encrypt, messages))
    assert feed(opener, sealed) == messages


def test_a_session_may_begin_in_the_middle() -> None:
    one, other = handshake()
    other.decrypt(one.encrypt(b"of the handshake's making"))
    state = one.noise_protocol.cipher_state_encrypt
    sealed = seal(Sealer(state.k, counter=state.n), b"goes on")
    assert other.decrypt(sealed[2:]) == b"goes on"


@UNHURRIED
@given(
    st.lists(st.binary(min_size=1, max_size=300) | st.just(bytes(MAX_PLAINTEXT)), max_size=6),
    st.lists(st.integers(1, 70_000), max_size=30),
)
def test_cuts_make_no_difference(messages: list[bytes], cuts: list[int]) -> None:
    sealed = seal(Sealer(KEY), *messages)
    opener = Opener(KEY)
    opened = []
    for cut in [*cuts, len(sealed)]:
        opened += feed(opener, sealed[:cut])
        sealed = sealed[cut:]
    assert opened == messages
    assert len(opener.space) == OPEN_BUFFER  # nothing is left in it


def test_every_cut_of_a_message_waits_for_the_rest() -> None:
    sealed = seal(Sealer(KEY), b"message")
    for cut in range(len(sealed)):
        opener = Opener(KEY)
        assert feed(opener, sealed[:cut]) == []
        assert feed(opener, sealed[cut:]) == [b"message"]


def test_opening_into_memory_of_the_caller() -> None:
    opener = Opener(KEY)
    sealed = seal(Sealer(KEY), b"first", b"second")
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
    sealed = bytearray(seal(Sealer(KEY), b"a message that matters"))
    sealed[position] ^= 1
    with pytest.raises(RemoteProtocolError, match="authentication"):
        feed(Opener(KEY), bytes(sealed))


def test_a_flipped_bit_is_found_in_memory_of_the_caller() -> None:
    sealed = bytearray(seal(Sealer(KEY), b"message"))
    sealed[5] ^= 1
    opener = Opener(KEY)
    opener.space[: len(sealed)] = sealed
    opener.received(len(sealed))
    assert opener.next_length() == 7
    with pytest.raises(RemoteProtocolError, match="authentication"):
        opener.open_into(memoryview(bytearray(7)))


def test_messages_are_read_once_and_in_order() -> None:
    sealer = Sealer(KEY)
    first, second = seal(sealer, b"first"), seal(sealer, b"second")
    for sequence in ([second], [first, first], [first, second, second]):
        with pytest.raises(RemoteProtocolError):
            feed(Opener(KEY), b"".join(sequence))


@pytest.mark.parametrize("length", [0, 15])
def test_a_message_shorter_than_its_tag_is_an_error(length: int) -> None:
    with pytest.raises(RemoteProtocolError, match="shorter"):
        feed(Opener(KEY), length.to_bytes(2, "big") + bytes(length))


def test_a_used_up_counter_ends_the_session() -> None:
    sealer = Sealer(KEY, counter=2**64 - 2)
    sealed = seal(sealer, b"last")
    with pytest.raises(LocalProtocolError):
        sealer.seal(b"one too many")
    opener = Opener(KEY, counter=2**64 - 2)
    with pytest.raises(RemoteProtocolError, match="more messages"):
        feed(opener, sealed + sealed)


@pytest.mark.parametrize("size", [0, MAX_PLAINTEXT + 1])
def test_sizes_that_no_message_has_are_refused(size: int) -> None:
    with pytest.raises(LocalProtocolError):
        Sealer(KEY).seal(bytes(size))


def test_what_is_free_still_fits() -> None:
    sealer = Sealer(KEY, capacity=200_000)
    while sealer.free >= MAX_SEALED:
        sealer.seal(bytes(MAX_PLAINTEXT))
    sealer.seal(bytes(sealer.free - (MAX_SEALED - MAX_PLAINTEXT)))
    assert sealer.free == 0
    with pytest.raises(LocalProtocolError):
        sealer.seal(b"x")
    sealer.sent(sealer.num_pending)
    assert sealer.free == 200_000


def test_what_was_sent_in_part_stays() -> None:
    sealer = Sealer(KEY)
    sealer.seal(b"message")
    whole = bytes(sealer.pending)
    sealer.sent(10)
    assert bytes(sealer.pending) == whole[10:]
    sealer.sent(len(whole) - 10)
    assert sealer.num_pending == 0


def test_a_buffer_grows_between_batches_and_goes_on() -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    before = sealer.free
    sealer.seal(b"pending")
    sealer.grow()
    assert sealer.free < before  # what is pending stays where it is
    opened = feed(opener, bytes(sealer.pending))
    sealer.sent(sealer.num_pending)
    sealer.grow()
    assert sealer.free > 2 * before
    assert opened + feed(opener, seal(sealer, b"goes on")) == [b"pending", b"goes on"]
