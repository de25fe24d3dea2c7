"""The rules of a blob that arrives: each chunk once, in any order, the whole as it was announced."""

from __future__ import annotations

import mmap
from hashlib import sha256
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import RequestRefusedError
from neurogrid.inference.incoming import IncomingBlob
from neurogrid.p2p.wire import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    ErrorCode,
    WeightsChunk,
    blob_id,
    iter_weights_chunks,
    num_chunks,
)

LAYER = 5
TAIL = 1000
BLOB = Random(1).randbytes(2 * CHUNK_BYTES + TAIL)
FIRST, SECOND, THIRD = iter_weights_chunks(BLOB)


def id_of(blob: bytes) -> bytes:
    return blob_id(sha256(chunk.data).digest() for chunk in iter_weights_chunks(blob))


def offered(blob: bytes = BLOB, *, announced: bytes | None = None) -> IncomingBlob:
    """A transfer of 1.1.0: its size and content are known."""
    return IncomingBlob(
        layer_id=LAYER,
        total_chunks=num_chunks(len(blob)),
        num_bytes=len(blob),
        blob_id=announced or id_of(blob),
        request_id=9,
        now=100.0,
    )


def pushed(total_chunks: int = 3) -> IncomingBlob:
    """A transfer of 1.0.0: nothing is known but the number of chunks."""
    return IncomingBlob(
        layer_id=LAYER,
        total_chunks=total_chunks,
        num_bytes=None,
        blob_id=None,
        request_id=0,
        now=100.0,
    )


def refuse(incoming: IncomingBlob, chunk: WeightsChunk, says: str) -> None:
    before = incoming.num_received, incoming.last_progress
    with pytest.raises(RequestRefusedError, match=says) as caught:
        incoming.add(chunk, now=200.0)
    assert caught.value.code == ErrorCode.TRANSFER_INVALID
    assert f"layer {LAYER}" in str(caught.value)
    assert (incoming.num_received, incoming.last_progress) == before


@pytest.mark.parametrize("make", [offered, pushed])
@given(order=st.permutations([FIRST, SECOND, THIRD]), again=st.lists(st.integers(0, 2), max_size=4))
@settings(max_examples=20, deadline=None)
def test_chunks_in_any_order_and_some_twice_give_the_blob(
    make: object, order: list[WeightsChunk], again: list[int]
) -> None:
    incoming = make()  # type: ignore[operator]
    for number, chunk in enumerate(order):
        assert not incoming.is_complete
        incoming.add(chunk, now=100.0)
        for index in again:
            incoming.add(order[index % (number + 1)], now=100.0)
        assert incoming.num_received == number + 1
    assert incoming.is_complete
    view, content_id = incoming.verified()
    assert bytes(view) == BLOB
    assert content_id == id_of(BLOB)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
@pytest.mark.parametrize("is_offered", [True, False])
def test_a_blob_of_any_size(size: int, is_offered: bool) -> None:
    blob = bytes(size)
    incoming = offered(blob) if is_offered else pushed(num_chunks(size))
    for chunk in iter_weights_chunks(blob):
        incoming.add(chunk, now=100.0)
    assert incoming.is_complete
    view, content_id = incoming.verified()
    assert bytes(view) == blob
    assert content_id == id_of(blob)


def test_progress_is_a_chunk_that_was_not_there() -> None:
    incoming = offered()
    assert incoming.last_progress == 100.0
    incoming.add(SECOND, now=101.0)
    incoming.add(SECOND, now=102.0)
    assert incoming.last_progress == 101.0
    incoming.add(FIRST, now=103.0)
    assert incoming.last_progress == 103.0


@pytest.mark.parametrize("make", [offered, pushed])
def test_a_total_that_changes(make: object) -> None:
    incoming = make()  # type: ignore[operator]
    incoming.add(FIRST, now=100.0)
    refuse(incoming, WeightsChunk(1, 4, SECOND.data), "the total changed from 3 to 4")
    refuse(incoming, WeightsChunk(1, 2, SECOND.data), "the total changed from 3 to 2")


def test_an_index_out_of_range() -> None:
    refuse(offered(), WeightsChunk(3, 3, b""), "chunk 3 of 3 is out of range")


@pytest.mark.parametrize("make", [offered, pushed])
@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES - 1])
def test_a_chunk_before_the_last_that_is_short(make: object, length: int) -> None:
    incoming = make()  # type: ignore[operator]
    says = f"chunk 0 has {length} B instead of {CHUNK_BYTES}"
    refuse(incoming, WeightsChunk(0, 3, bytes(length)), says)


@pytest.mark.parametrize("length", [0, TAIL - 1, TAIL + 1, CHUNK_BYTES])
def test_a_last_chunk_that_is_not_as_long_as_announced(length: int) -> None:
    says = f"chunk 2 has {length} B instead of {TAIL}"
    refuse(offered(), WeightsChunk(2, 3, bytes(length)), says)


@pytest.mark.parametrize("make", [offered, pushed])
@pytest.mark.parametrize("index", [0, 2])
def test_a_chunk_twice_with_other_bytes(make: object, index: int) -> None:
    incoming = make()  # type: ignore[operator]
    chunk = (FIRST, SECOND, THIRD)[index]
    incoming.add(chunk, now=100.0)
    lie = bytearray(chunk.data)
    lie[-1] ^= 1
    says = f"chunk {index} came twice with different bytes"
    refuse(incoming, WeightsChunk(index, 3, bytes(lie)), says)


def test_a_last_chunk_twice_with_another_length() -> None:
    incoming = pushed()
    incoming.add(THIRD, now=100.0)
    refuse(incoming, WeightsChunk(2, 3, bytes(THIRD.data)[:-1]), f"{TAIL - 1} B instead of {TAIL}")


def test_another_content_than_announced() -> None:
    incoming = offered(announced=bytes(32))
    for chunk in (FIRST, SECOND, THIRD):
        incoming.add(chunk, now=100.0)
    with pytest.raises(RequestRefusedError, match="layer 5 have another hash") as caught:
        incoming.verified()
    assert caught.value.code == ErrorCode.HASH_MISMATCH


def test_what_was_announced_is_known_before_any_memory_is_taken() -> None:
    assert offered().min_bytes == len(BLOB)
    assert pushed(MAX_CHUNKS).min_bytes == (MAX_CHUNKS - 1) * CHUNK_BYTES


def test_no_memory_is_an_error_that_the_peer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("neurogrid.inference.incoming.mmap.mmap", full)
    with pytest.raises(RequestRefusedError, match="no memory for the 3 MiB of layer 5") as caught:
        offered().add(FIRST, now=100.0)
    assert caught.value.code == ErrorCode.OUT_OF_MEMORY
