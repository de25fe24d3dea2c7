"""Two clusters in one DHT over real sockets: who finds whom, what is refused, what is lost, what comes back."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import trio

from neurogrid.errors import (
    ConfigurationError,
    LocalProtocolError,
    NeuroGridError,
    PeerUnreachableError,
    StreamBrokenError,
)
from neurogrid.p2p import Identity, open_host
from neurogrid.p2p.discovery import Discovery, PeerFound
from neurogrid.p2p.discovery.dht import Announcement, Dht, DhtTiming, open_dht
from neurogrid.p2p.discovery.dht_key import cluster_key
from neurogrid.p2p.discovery.records import MemberRecord, sign_record
from neurogrid.p2p.discovery.records_exchange import RECORD_PROTOCOL, RecordMessage
from neurogrid.p2p.discovery.sighting import Attempt, Sighting
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from tests.ports import free_port

DEADLINE = 120.0
SOON = DhtTiming(first_look=0.2, first_redial=0.1, first_announce=1.0)


@dataclass
class Seat:
    """A host with its discovery, and all that it reported."""

    host: Libp2pHost
    dht: Dht
    sightings: list[Sighting] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def members(self) -> set[str]:
        return set(self.dht.members)


@asynccontextmanager
async def seat(
    namespace: str | None = "one",
    *bootstrap: str,
    identity: Identity | None = None,
    announcement: Announcement | None = Announcement("worker"),  # noqa: B008 (frozen)
    mode: str = "auto",
    timing: DhtTiming = SOON,
    **options: object,
) -> AsyncIterator[Seat]:
    sightings: list[Sighting] = []
    attempts: list[Attempt] = []
    is_member = namespace is not None and announcement is not None
    async with (
        open_host(identity=identity) as host,
        open_dht(
            host,
            namespace=namespace,
            record=(lambda: announcement) if is_member else None,  # type: ignore[arg-type,return-value]
            mode=mode,  # type: ignore[arg-type]
            bootstrap=bootstrap,
            on_sighting=sightings.append,
            on_attempt=attempts.append,
            timing=timing,
            **options,  # type: ignore[arg-type]
        ) as dht,
    ):
        yield Seat(host, dht, sightings, attempts)


async def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.02)


def test_twenty_hosts_find_all_of_their_cluster_and_none_of_the_other() -> None:
    async def hold(
        namespace: str,
        address: str,
        *,
        task_status: Any = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async with seat(namespace, address, timing=DhtTiming()) as one:
            task_status.started(one)
            await trio.sleep_forever()

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            # In tasks of their own, so that they close side by side.
            async with seat(None, mode="server") as bootstrap, trio.open_nursery() as nursery:
                address = bootstrap.host.addresses[0]
                seats = [
                    await nursery.start(hold, f"cluster {number % 2}", address)
                    for number in range(20)
                ]
                for cluster in (seats[0::2], seats[1::2]):
                    everybody = {one.host.peer_id for one in cluster}
                    for one in cluster:
                        await wait_for(lambda one=one: len(one.dht.members) >= 9)  # type: ignore[misc]
                        assert one.members == everybody - {one.host.peer_id}
                for one in seats:
                    assert {sighting.peer_id for sighting in one.sightings} == one.members
                    assert all(sighting.source == "dht" for sighting in one.sightings)
                    assert any(a.is_good and a.source == "bootstrap" for a in one.attempts)
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_record_says_what_the_member_is() -> None:
    async def main() -> None:
        announcement = Announcement(
            "coordinator", model="tiny", free_memory=2**40, layers=((0, 4), (6, 7))
        )
        with trio.fail_after(DEADLINE):
            async with (
                seat(None, mode="server") as bootstrap,
                seat("one", bootstrap.host.addresses[0], announcement=announcement) as said,
                seat("one", bootstrap.host.addresses[0]) as heard,
            ):
                await wait_for(lambda: said.host.peer_id in heard.members)
                record = heard.dht.members[said.host.peer_id]
                assert record.role == "coordinator"
                assert record.model == "tiny"
                assert record.free_memory == 2**40
                assert record.layers == ((0, 4), (6, 7))
                assert heard.sightings[0].addresses == said.host.addresses

    trio.run(main)


def test_a_client_finds_and_is_found_and_serves_nobody() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with (
                seat(None, mode="server") as bootstrap,
                seat("one", bootstrap.host.addresses[0], mode="client") as client,
                seat("one", bootstrap.host.addresses[0], mode="client") as other,
            ):
                await wait_for(lambda: other.host.peer_id in client.members)
                await wait_for(lambda: client.host.peer_id in other.members)
                assert (bootstrap.dht.num_servers, bootstrap.dht.mode) == (0, "server")
                assert (client.dht.num_servers, client.dht.mode) == (1, "client")

    trio.run(main)


def test_who_only_looks_finds_and_is_no_member() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with (
                seat(None, mode="server") as bootstrap,
                seat("one", bootstrap.host.addresses[0]) as member,
                seat("one", bootstrap.host.addresses[0], announcement=None) as looker,
            ):
                await wait_for(lambda: member.host.peer_id in looker.members)
                assert not member.members

    trio.run(main)


def a_record(identity: Identity, **changes: object) -> MemberRecord:
    record = MemberRecord(
        cluster=cluster_key("one"),
        peer_id=identity.peer_id,
        sequence=5,
        expires=int(time.time()) + 600,
        role="worker",
        addresses=(),
    )
    return replace(record, **changes)  # type: ignore[arg-type]


async def show(host: Libp2pHost, peer_id: str, record: bytes) -> bytes:
    """What a member answers to this record of ours."""
    stream = await host.open_stream(peer_id, [RECORD_PROTOCOL])
    await stream.send_all(RecordMessage(cluster_key("one"), record).encode())
    await stream.send_eof()
    answer = b""
    while some := await stream.receive_some():
        answer += some
    return answer


@pytest.mark.parametrize("fault", ["forged", "expired", "replayed"])
def test_a_record_that_is_not_to_be_believed_is_refused_and_named(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with seat("one") as member, open_host() as liar:
                await liar.connect(member.host.addresses[0])
                good = sign_record(a_record(liar.identity), liar.identity)
                bad = {
                    "forged": sign_record(a_record(liar.identity, sequence=9), Identity.generate()),
                    "expired": sign_record(
                        a_record(liar.identity, sequence=9, expires=1), liar.identity
                    ),
                    "replayed": sign_record(a_record(liar.identity, sequence=4), liar.identity),
                }[fault]
                assert await show(liar, member.host.peer_id, good)
                believed = member.dht.members[liar.peer_id]
                with pytest.raises(StreamBrokenError):
                    await show(liar, member.host.peer_id, bad)
                assert member.dht.members[liar.peer_id] == believed
                assert f"refused the record of {liar.peer_id}: {fault}: " in caplog.text

    with caplog.at_level(logging.WARNING, "neurogrid"):
        trio.run(main)


def test_a_record_whose_certificate_is_refused_makes_no_member(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def verify(peer_id: str, role: str, certificate: bytes) -> None:
        if certificate != peer_id.encode():
            raise NeuroGridError("no certificate of this cluster")

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            good, bad = Identity.generate(), Identity.generate()
            certified = Announcement("worker", certificate=good.peer_id.encode())
            async with (
                seat(None, mode="server") as bootstrap,
                seat(
                    "one",
                    bootstrap.host.addresses[0],
                    identity=good,
                    announcement=certified,
                    verify=verify,
                ) as member,
                seat("one", bootstrap.host.addresses[0], identity=bad),
            ):
                await wait_for(
                    lambda: (
                        f"refused the record of {bad.peer_id}: not trusted: no certificate"
                        in caplog.text
                    )
                )
                assert not member.members

    with caplog.at_level(logging.WARNING, "neurogrid"):
        trio.run(main)


def test_a_member_that_is_gone_is_lost_when_its_record_expires() -> None:
    short = replace(SOON, record_lifetime=2.0, clock_skew=0.0)

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with (
                seat(None, mode="server") as bootstrap,
                seat("one", bootstrap.host.addresses[0], timing=short) as stays,
            ):
                address = bootstrap.host.addresses[0]
                async with seat("one", address, timing=short) as leaves:
                    gone = leaves.host.peer_id
                    await wait_for(lambda: gone in stays.members)
                    first = stays.dht.members[gone].sequence
                    # As long as it is there, its record is renewed.
                    await wait_for(
                        lambda: gone in stays.members and stays.dht.members[gone].sequence > first
                    )
                await wait_for(lambda: gone not in stays.members)
                assert stays.sightings[-1] == Sighting(gone, (), "dht", is_lost=True)
                assert any("expired" in attempt.outcome for attempt in stays.attempts)

    trio.run(main)


def test_a_bootstrap_peer_that_comes_late_is_found_without_a_restart() -> None:
    async def main() -> None:
        identity = Identity.generate()
        with trio.fail_after(DEADLINE):
            place = f"/ip4/127.0.0.1/tcp/{free_port()}"
            address = f"{place}/p2p/{identity.peer_id}"
            async with seat("one", address) as early, seat("one", address) as other:
                await wait_for(
                    lambda: any("refused" in attempt.outcome for attempt in early.attempts)
                )
                async with (
                    open_host(listen=[place], identity=identity) as late,
                    open_dht(
                        late,
                        namespace=None,
                        record=None,
                        mode="server",
                        on_sighting=lambda sighting: None,
                        on_attempt=lambda attempt: None,
                    ),
                ):
                    await wait_for(lambda: early.members == {other.host.peer_id})
                    await wait_for(lambda: other.members == {early.host.peer_id})

    trio.run(main)


def test_a_dht_of_another_prefix_is_another_dht() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with (
                seat(None, mode="server", protocol_prefix="/lab") as bootstrap,
                seat("one", bootstrap.host.addresses[0], protocol_prefix="/lab") as one,
                seat("one", bootstrap.host.addresses[0], protocol_prefix="/lab") as two,
                seat("one", bootstrap.host.addresses[0]) as other,
            ):
                await wait_for(lambda: one.members == {two.host.peer_id})
                await wait_for(
                    lambda: any(
                        "/ipfs/kad/1.0.0" in attempt.outcome and not attempt.is_good
                        for attempt in other.attempts
                    )
                )
                assert not other.members

    trio.run(main)


def test_a_discovery_can_be_opened_again_on_the_same_host() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with (
                seat(None, mode="server") as bootstrap,
                seat("one", bootstrap.host.addresses[0]) as other,
                open_host() as host,
            ):
                for _ in range(2):
                    async with Discovery(host) as discovery:
                        dht = await discovery.setup_dht(
                            namespace="one",
                            record=lambda: Announcement("worker"),
                            mode="server",
                            bootstrap=bootstrap.host.addresses[:1],
                            timing=SOON,
                        )
                        with pytest.raises(LocalProtocolError, match="dht runs already"):
                            await discovery.setup_dht(namespace="one", record=None)
                        await wait_for(lambda dht=dht: other.host.peer_id in dht.members)  # type: ignore[misc]
                        assert isinstance(await anext(discovery.peers()), PeerFound)
                    # It serves nothing of it in between.
                    with pytest.raises(PeerUnreachableError):
                        await other.host.open_stream(host.peer_id, [RECORD_PROTOCOL])

    trio.run(main)


def test_what_cannot_be_right_is_the_callers_mistake() -> None:
    async def main() -> None:
        with pytest.raises(ConfigurationError, match="no peer id"):
            async with seat("one", "/ip4/127.0.0.1/tcp/1"):
                raise AssertionError("not reached")
        with pytest.raises(LocalProtocolError, match="role"):
            async with seat("one", announcement=Announcement("king")):
                raise AssertionError("not reached")

    trio.run(main)
