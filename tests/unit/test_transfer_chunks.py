"""Blobs as numbers: lengths and digests of chunks, sets of chunks, what fits; and what can be sent."""

from __future__ import annotations

import mmap
from pathlib import Path
from random import Random

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import LocalProtocolError, RequestRefusedError
from neurogrid.p2p.transfer import BlobInfo, BlobSource, BytesSource
from neurogrid.p2p.transfer.chunks import ChunkSet, require_fit
from neurogrid.p2p.transfer.source import as_source
from neurogrid.p2p.wire import (
    CHUNK_BYTES,
    MAX_BLOB_BYTES,
    MAX_CHUNKS,
    ErrorCode,
    TransferOffer,
    WeightsChunk,
    decode_bitmap,
    num_chunks,
)

BLOB = Random(2).randbytes(2 * CHUNK_BYTES + 7)


@given(num_bytes=st.integers(0, MAX_BLOB_BYTES))
def test_the_chunks_of_a_blob_add_up(num_bytes: int) -> None:
    info = BlobInfo(bytes(32), num_bytes, b"")
    last = info.num_chunks - 1
    assert last * CHUNK_BYTES + info.chunk_bytes(last) == num_bytes
    assert info.chunk_bytes(0) == min(CHUNK_BYTES, num_bytes)
    assert 1 <= info.num_chunks <= MAX_CHUNKS


def test_a_blob_is_what_its_offer_says() -> None:
    source = BytesSource(BLOB)
    info = BlobInfo.of_digests(source.digests(), source.num_bytes)
    offer = TransferOffer.decode(
        TransferOffer(9, info.num_bytes, info.blob_id, info.digests).encode()
    )
    assert BlobInfo.of_offer(offer) == info
    for index in range(info.num_chunks):
        chunk = bytes(source.chunk(index))
        assert len(chunk) == info.chunk_bytes(index)
        assert blake3(chunk).digest() == info.chunk_digest(index)
    assert info.blob_id.hex().startswith(info.short_id)


@given(data=st.data(), total=st.integers(1, 300))
def test_a_set_of_chunks_is_a_set(data: st.DataObject, total: int) -> None:
    indices = data.draw(st.lists(st.integers(0, total - 1), max_size=2 * total))
    chunks = ChunkSet(total)
    for number, index in enumerate(indices):
        chunks.add(index)
        assert len(chunks) == len(set(indices[: number + 1]))
    assert set(chunks) == set(indices)
    assert list(chunks) == sorted(set(indices))
    assert all((index in chunks) == (index in indices) for index in range(total))
    assert chunks.is_full == (len(set(indices)) == total)
    assert decode_bitmap(chunks.bitmap(), total) == set(indices)
    assert set(ChunkSet(total, chunks)) == set(chunks)


@given(
    index=st.integers(0, 5),
    total=st.integers(1, 6),
    length=st.sampled_from([0, 1, 7, CHUNK_BYTES]),
    expected=st.sampled_from([None, 0, 1, 7, CHUNK_BYTES]),
)
def test_what_fits_and_what_does_not(
    index: int, total: int, length: int, expected: int | None
) -> None:
    fits = total == 3 and index < 3 and expected in (None, length)
    chunk = WeightsChunk(index, total, bytes(length))
    if fits:
        require_fit(chunk, layer_id=8, total_chunks=3, expected_bytes=expected)
        return
    with pytest.raises(RequestRefusedError, match="weights of layer 8: ") as caught:
        require_fit(chunk, layer_id=8, total_chunks=3, expected_bytes=expected)
    assert caught.value.code == ErrorCode.TRANSFER_INVALID


@settings(deadline=None, max_examples=20)
@given(size=st.sampled_from([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(BLOB)]))
def test_bytes_are_a_source(size: int) -> None:
    source = BytesSource(BLOB[:size])
    assert isinstance(source, BlobSource)
    assert source.num_bytes == size
    chunks = [bytes(source.chunk(index)) for index in range(num_chunks(size))]
    assert b"".join(chunks) == BLOB[:size]
    assert source.digests() == b"".join(blake3(chunk).digest() for chunk in chunks)
    assert source.digests() is source.digests()


def test_nothing_is_copied() -> None:
    data = bytearray(BLOB)
    chunk = BytesSource(data).chunk(1)
    data[CHUNK_BYTES] ^= 0xFF
    assert chunk[0] == data[CHUNK_BYTES]


def test_many_things_can_be_sent(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BLOB)
    with (tmp_path / "file").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    digests = BytesSource(BLOB).digests()
    wide = memoryview(bytearray(BLOB[:-7])).cast("Q")
    assert as_source(mapped).digests() == digests
    assert as_source(memoryview(BLOB)).digests() == digests
    assert as_source(wide).num_bytes == 2 * CHUNK_BYTES
    assert as_source(wide).digests() == BytesSource(BLOB[:-7]).digests()
    source = BytesSource(BLOB)
    assert as_source(source) is source
    with pytest.raises(LocalProtocolError):
        as_source(memoryview(BLOB)[::2])
    with pytest.raises(LocalProtocolError):
        as_source("text")
