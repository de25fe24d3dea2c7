"""Transfers through the blocking face: a policy of plain functions, asked in threads."""

from __future__ import annotations

import threading

import pytest
from blake3 import blake3
from blocking_pair import DEADLINE, connected_pair

from neurogrid.errors import LocalProtocolError, PeerRefusedError, RequestRefusedError
from neurogrid.p2p.blocking import TransferPolicy, Transfers, Wanted, send_blob
from neurogrid.p2p.transfer import BytesSource, Held, MemoryStore, OfferedBlob, StoredBlob
from neurogrid.p2p.wire import CHUNK_BYTES, ErrorCode, blob_id

DATA = bytes(range(256)) * (3 * CHUNK_BYTES // 256) + b"and some"
BLOB_ID = blob_id(
    blake3(DATA[start : start + CHUNK_BYTES]).digest() for start in range(0, len(DATA), CHUNK_BYTES)
)


class Keeping(TransferPolicy):
    """Takes every blob once, and gives what it has."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, StoredBlob] = {}
        self.offers: list[OfferedBlob] = []
        self.acknowledged_at: list[bytes] = []
        self.was_acknowledged = threading.Event()
        self.threads: set[str] = set()

    def decide(self, offered: OfferedBlob) -> Held | Wanted:
        self.threads.add(threading.current_thread().name)
        self.offers.append(offered)
        return Held() if offered.info.blob_id in self.blobs else Wanted(MemoryStore(), self.use)

    def use(self, stored: StoredBlob) -> None:
        self.threads.add(threading.current_thread().name)
        self.blobs[stored.info.blob_id] = stored

    def acknowledged(self, offered: OfferedBlob) -> None:
        self.acknowledged_at.append(offered.info.blob_id)
        self.was_acknowledged.set()

    def provide(self, peer_id: str, blob_id: bytes) -> StoredBlob | None:
        self.threads.add(threading.current_thread().name)
        return self.blobs.get(blob_id)


def test_a_blob_goes_over_once() -> None:
    policy = Keeping()
    with connected_pair() as pair:
        Transfers(pair.server, policy)
        sent = send_blob(pair.client, pair.peer_id, DATA, layer_id=3)
        assert (sent.blob_id, sent.sent_bytes, sent.held_bytes) == (BLOB_ID, len(DATA), 0)
        again = send_blob(pair.client, pair.peer_id, DATA, layer_id=4)
        assert (again.sent_bytes, again.held_bytes) == (0, len(DATA))
        assert policy.was_acknowledged.wait(DEADLINE)
    assert [offer.layer_id for offer in policy.offers] == [3, 4]
    assert bytes(policy.blobs[BLOB_ID].data) == DATA
    assert all(name.startswith("neurogrid handler") for name in policy.threads)


def test_a_blob_is_fetched() -> None:
    policy = Keeping()
    with connected_pair() as pair:
        Transfers(pair.server, policy)
        client = Transfers(pair.client)
        send_blob(pair.client, pair.peer_id, BytesSource(DATA))
        fetched = client.fetch_blob(pair.peer_id, BLOB_ID)
        assert bytes(fetched.blob.data) == DATA
        assert fetched.peer_id == pair.peer_id
        with pytest.raises(PeerRefusedError) as caught:
            client.fetch_blob(pair.peer_id, bytes(32))
        assert caught.value.code == ErrorCode.BLOB_UNKNOWN
        assert (client.num_incoming, client.idle_bytes) == (0, 0)
        client.forget(pair.peer_id)


def test_what_a_policy_refuses_the_peer_gets() -> None:
    class Refusing(TransferPolicy):
        def authorize(self, peer_id: str) -> None:
            raise RequestRefusedError("not you", code=ErrorCode.BUSY)

    with connected_pair() as pair:
        Transfers(pair.server, Refusing())
        Transfers(pair.client)  # takes nothing
        with pytest.raises(PeerRefusedError, match="not you"):
            send_blob(pair.client, pair.peer_id, DATA)
        with pytest.raises(PeerRefusedError, match="not taken here"):
            send_blob(pair.server, pair.client.host.peer_id, DATA)


def test_a_use_that_refuses_is_told_to_the_sender() -> None:
    class Choosy(Keeping):
        def use(self, stored: StoredBlob) -> None:
            raise RequestRefusedError("no model fits it", code=ErrorCode.TRANSFER_INVALID)

    with connected_pair() as pair:
        Transfers(pair.server, Choosy())
        with pytest.raises(PeerRefusedError, match="no model fits it"):
            send_blob(pair.client, pair.peer_id, DATA)


def test_an_async_policy_is_refused() -> None:
    class Async(TransferPolicy):
        async def decide(self, offered: OfferedBlob) -> Held:  # type: ignore[override]
            return Held()

    with connected_pair() as pair, pytest.raises(LocalProtocolError, match="plain functions"):
        Transfers(pair.server, Async())
