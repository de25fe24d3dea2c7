"""Records that are not to be believed, shown to a real worker: refused, and named in its log."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from neurogrid.errors import NeuroGridError, StreamBrokenError
from neurogrid.p2p import Identity, open_host
from neurogrid.p2p.discovery.dht_key import cluster_key
from neurogrid.p2p.discovery.records import MemberRecord, sign_record
from neurogrid.p2p.discovery.records_exchange import RECORD_PROTOCOL, RecordMessage
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.trust import WORKER, Cluster
from neurogrid.p2p.wire import PROTOCOL_V11
from tests.e2e.members import make_member
from tests.e2e.support import DEADLINE, start_worker

LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")


async def show(host: Libp2pHost, peer_id: str, key: bytes, record: bytes) -> bytes:
    """What a member answers to this record of ours."""
    stream = await host.open_stream(peer_id, [RECORD_PROTOCOL])
    await stream.send_all(RecordMessage(key, record).encode())
    await stream.send_eof()
    answer = b""
    while some := await stream.receive_some():
        answer += some
    return answer


async def open_and_listen(host: Libp2pHost, peer_id: str, protocol_id: str) -> bytes:
    stream = await host.open_stream(peer_id, [protocol_id])
    return bytes(await stream.receive_some())


def test_a_worker_refuses_what_is_forged_expired_replayed_or_of_another_role(
    tmp_path: Path,
) -> None:
    cluster = Cluster.create(tmp_path / "cluster")
    make_member(cluster, tmp_path / "member")
    key = cluster_key(cluster.cluster_id)
    liar = Identity.generate()
    good = MemberRecord(
        cluster=key,
        peer_id=liar.peer_id,
        sequence=5,
        expires=int(time.time()) + 600,
        role=WORKER,
        addresses=(),
        certificate=cluster.issue(liar.peer_id, WORKER).data,
    )
    stranger = Cluster.create(tmp_path / "stranger").issue(liar.peer_id, WORKER).data
    bad = {
        "forged": sign_record(replace(good, sequence=9), Identity.generate()),
        "expired": sign_record(replace(good, sequence=9, expires=1), liar),
        "replayed": sign_record(replace(good, sequence=4), liar),
        "not trusted: it says that it is a coordinator, and its certificate says worker": sign_record(
            replace(good, sequence=9, role="coordinator"), liar
        ),
        "not trusted: no certificate came with it": sign_record(
            replace(good, sequence=9, certificate=b""), liar
        ),
        "not trusted: the certificate is of cluster": sign_record(
            replace(good, sequence=9, certificate=stranger), liar
        ),
    }

    async def main(address: str, peer_id: str) -> None:
        with trio.fail_after(DEADLINE):
            async with open_host(identity=liar) as host:
                # It shows nothing, so it is nobody: the DHT and the exchange of records are all that it gets.
                await host.connect(address)
                assert await show(host, peer_id, key, sign_record(good, liar))
                for record in bad.values():
                    with pytest.raises(StreamBrokenError):
                        await show(host, peer_id, key, record)
                with pytest.raises(NeuroGridError):
                    await open_and_listen(host, peer_id, PROTOCOL_V11)

    member = ("--cluster", str(tmp_path / "member"))
    with start_worker(tmp_path, *LOOPBACK, *member, "--dht") as worker:
        trio.run(main, worker.address, worker.peer_id)
        for reason in bad:
            assert f"refused the record of {liar.peer_id}: {reason}" in worker.log, worker.log
