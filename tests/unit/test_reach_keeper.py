"""Connections that are kept, over a network in memory and under a clock that is wound on."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from neurogrid.errors import (
    ConfigurationError,
    LocalProtocolError,
    NeuroGridError,
    RemoteProtocolError,
    StreamBrokenError,
)
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.memory import Link, MemoryHost, MemoryNetwork, open_memory_network
from neurogrid.p2p.reach.backoff import Backoff
from neurogrid.p2p.reach.keeper import Keeper, KeeperLimits, keep_connections
from neurogrid.p2p.reach.ping import PING_PROTOCOL, ping
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.trust import Refusal, RefusedError

pytestmark = pytest.mark.usefixtures("autojump_clock")

Hosts = tuple[MemoryNetwork, MemoryHost, MemoryHost]
DOWN = Link(is_reachable=False)


@pytest.fixture
@asynccontextmanager
async def hosts() -> AsyncIterator[Hosts]:
    """Two hosts that are not connected."""
    async with (
        open_memory_network() as network,
        network.open_host() as ours,
        network.open_host() as theirs,
    ):
        yield network, ours, theirs


async def until(condition: Callable[[], object], timeout: float = 3600.0) -> float:
    """Wait until a condition holds; the seconds that it took."""
    started_at = trio.current_time()
    with trio.fail_after(timeout):
        while not condition():
            await trio.sleep(0.05)
    return trio.current_time() - started_at


def fail(network: MemoryNetwork, one: MemoryHost, other: MemoryHost) -> None:
    """A partition of which both sides learn at once."""
    network.set_link(DOWN, between=(one, other))
    network.cut(one, other)


async def test_a_wanted_peer_is_dialled_and_its_state_can_be_asked_for(hosts: Hosts) -> None:
    _, ours, theirs = hosts
    async with keep_connections(ours) as keeper:
        assert keeper.state(theirs.peer_id) is None
        assert keeper.want(theirs.peer_id, theirs.addresses)
        await until(lambda: theirs.peer_id in ours.connected_peers, 1)
        await trio.sleep(5)
        state = keeper.state(theirs.peer_id)
        assert state is not None
        assert state.connected_since is not None
        assert state.unreachable_since is None
        assert (state.num_failures, state.last_error, state.next_attempt) == (0, "", None)
        assert keeper.states() == (state,)
        assert keeper.wanted == (theirs.peer_id,)
    assert theirs.peer_id in ours.connected_peers


@pytest.mark.parametrize(
    "error",
    [
        RefusedError(Refusal.NOT_SPOKEN, "it closed the connection while it was asked"),
        StreamBrokenError("it ended while it was asked"),
        RemoteProtocolError("nonsense"),
        LocalProtocolError("it cannot be asked"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_an_attempt_fails_with_it_is_tried_again(
    hosts: Hosts, error: NeuroGridError
) -> None:
    _, ours, theirs = hosts
    errors = [error, error]

    async def connect(address: str) -> str:
        if errors:
            raise errors.pop()
        return await ours.connect(address)

    async with keep_connections(ours, connect=connect) as keeper:
        keeper.want(theirs.peer_id, theirs.addresses)
        await until(lambda: ours.connected_peers)


@pytest.mark.parametrize("seconds", [30.0, 600.0])
async def test_a_partition_that_heals_brings_the_peer_back(hosts: Hosts, seconds: float) -> None:
    network, ours, theirs = hosts
    async with keep_connections(ours) as keeper:
        keeper.want(theirs.peer_id, theirs.addresses)
        await until(lambda: ours.connected_peers)
        await trio.sleep(60)
        fail(network, ours, theirs)
        await trio.sleep(seconds)
        state = keeper.state(theirs.peer_id)
        assert state is not None
        assert state.connected_since is None
        assert state.num_failures >= 3
        assert "refused" in state.last_error
        assert state.next_attempt is not None
        assert 0 < state.next_attempt - trio.current_time() <= 30
        network.set_link(Link(), between=(ours, theirs))
        assert await until(lambda: ours.connected_peers) <= 30.1


async def test_attempts_become_rarer_and_never_stop(hosts: Hosts) -> None:
    network, ours, theirs = hosts
    attempts: list[float] = []

    async def connect(address: str) -> str:
        attempts.append(trio.current_time())
        return await ours.connect(address)

    network.set_link(DOWN)
    async with keep_connections(ours, connect=connect, draw=random.Random(1)) as keeper:
        keeper.want(theirs.peer_id, theirs.addresses)
        await trio.sleep(1000)
    pauses = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    for pause, longest in zip(pauses, [1, 2, 4, 8, 16, 30, 30, 30], strict=False):
        assert longest / 2 <= pause <= longest
    assert len(attempts) > 1000 / 30
    assert len({round(pause, 3) for pause in pauses[5:]}) > 10  # jitter


async def test_a_peer_that_accepts_and_closes_is_not_dialled_in_a_loop(hosts: Hosts) -> None:
    _, ours, theirs = hosts
    num_connections = 0

    def leave(peer_id: str) -> None:
        nonlocal num_connections
        num_connections += 1
        theirs.start_soon(theirs.disconnect, peer_id)

    theirs.on_connected(leave)
    async with keep_connections(ours) as keeper:
        keeper.want(theirs.peer_id, theirs.addresses)
        await trio.sleep(60)
        state = keeper.state(theirs.peer_id)
        assert state is not None
        assert state.num_failures == num_connections
    assert 3 <= num_connections <= 9


async def test_the_address_of_the_last_success_comes_first(hosts: Hosts) -> None:
    network, ours, theirs = hosts
    dead = [f"/memory/{900 + n}/p2p/{theirs.peer_id}" for n in range(3)]
    dialled: list[str] = []

    async def connect(address: str) -> str:
        dialled.append(address)
        return await ours.connect(address)

    async with keep_connections(ours, connect=connect) as keeper:
        keeper.want(theirs.peer_id, [*dead, *theirs.addresses])
        await until(lambda: ours.connected_peers)
        assert dialled == [*dead, *theirs.addresses]
        await trio.sleep(60)
        dialled.clear()
        network.cut(ours, theirs)
        await until(lambda: not ours.connected_peers)
        await until(lambda: ours.connected_peers)
        assert dialled == [*theirs.addresses]
        state = keeper.state(theirs.peer_id)
        assert state is not None
        assert state.addresses == (*theirs.addresses, *dead)


async def test_a_peer_that_moved_is_found_at_another_of_its_addresses() -> None:
    identity = Identity.generate()
    async with (
        open_memory_network() as network,
        network.open_host() as ours,
        keep_connections(ours) as keeper,
    ):
        async with network.open_host(identity=identity) as theirs:
            keeper.want(theirs.peer_id, theirs.addresses)
            await until(lambda: ours.connected_peers)
            await trio.sleep(60)
        await until(lambda: not ours.connected_peers)
        async with network.open_host(identity=identity) as theirs:
            state = keeper.state(theirs.peer_id)
            assert state is not None
            assert theirs.addresses != state.addresses
            await trio.sleep(300)
            assert not ours.connected_peers
            keeper.want(theirs.peer_id, theirs.addresses)
            # A new address ends the pause.
            assert await until(lambda: ours.connected_peers) < 1


async def test_a_peer_that_comes_by_itself_counts(hosts: Hosts) -> None:
    _, ours, theirs = hosts
    async with keep_connections(ours) as keeper:
        keeper.want(theirs.peer_id, [])
        await trio.sleep(200)
        state = keeper.state(theirs.peer_id)
        assert state is not None
        assert "no address" in state.last_error
        await theirs.connect(ours.addresses[0])
        await trio.sleep(0.1)
        state = keeper.state(theirs.peer_id)
        assert state is not None
        assert state.connected_since is not None
        assert state.last_error == ""


async def test_a_ghost_is_given_up_and_reported(hosts: Hosts) -> None:
    network, ours, theirs = hosts
    gone: list[tuple[str, str]] = []
    limits = KeeperLimits(gone_after=100)
    async with keep_connections(
        ours, limits=limits, on_gone=lambda *report: gone.append(report)
    ) as keeper:
        keeper.want(theirs.peer_id, theirs.addresses)
        await trio.sleep(500)
        assert not gone
        fail(network, ours, theirs)
        await trio.sleep(95)
        assert not gone
        await until(lambda: gone, 60)
        ((peer_id, reason),) = gone
        assert peer_id == theirs.peer_id
        assert "not reached for 100 s" in reason
        assert "refused" in reason
        assert keeper.state(peer_id) is None
        network.set_link(Link())
        await trio.sleep(500)
        assert not ours.connected_peers


async def test_who_is_forgotten_is_not_dialled_any_more(hosts: Hosts) -> None:
    network, ours, theirs = hosts
    async with keep_connections(ours) as keeper:
        keeper.want(theirs.peer_id, theirs.addresses)
        await until(lambda: ours.connected_peers)
        keeper.forget(theirs.peer_id)
        keeper.forget(theirs.peer_id)
        assert ours.connected_peers
        network.cut(ours, theirs)
        await trio.sleep(200)
        assert not ours.connected_peers
        assert keeper.states() == ()


async def answer_pings(stream: Stream) -> None:
    """As py-libp2p's hosts do by themselves."""
    while data := await stream.receive_some(32):
        await stream.send_all(data)


async def test_a_silent_peer_is_noticed_by_ping_and_comes_back(hosts: Hosts) -> None:
    network, ours, theirs = hosts
    theirs.set_stream_handler(PING_PROTOCOL, answer_pings)
    network.set_link(Link(delay=0.05))
    limits = KeeperLimits(ping_interval=5, ping_timeout=10)
    async with keep_connections(ours, limits=limits) as keeper:
        keeper.want(theirs.peer_id, theirs.addresses)
        await trio.sleep(30)
        state = keeper.state(theirs.peer_id)
        assert state is not None
        assert state.round_trip == pytest.approx(0.1, abs=0.01)
        network.set_link(
            Link(delay=10_000), between=(ours, theirs)
        )  # nothing arrives, nobody is told
        assert await until(lambda: not ours.connected_peers) <= 15.1
        await trio.sleep(15)
        state = keeper.state(theirs.peer_id)
        assert state is not None
        assert state.connected_since is None
        assert "no answer" in state.last_error
        network.set_link(Link(), between=(ours, theirs))
        await until(lambda: ours.connected_peers, 60)


async def test_a_peer_that_speaks_no_ping_is_left_alone(hosts: Hosts) -> None:
    _, ours, theirs = hosts
    lost: list[str] = []
    ours.on_disconnected(lost.append)
    async with keep_connections(ours, limits=KeeperLimits(ping_interval=5)) as keeper:
        keeper.want(theirs.peer_id, theirs.addresses)
        await trio.sleep(100)
    assert ours.connected_peers
    assert not lost


async def test_ping_measures_the_round_trip(hosts: Hosts) -> None:
    network, ours, theirs = hosts
    theirs.set_stream_handler(PING_PROTOCOL, answer_pings)
    network.set_link(Link(delay=0.2))
    await ours.connect(theirs.addresses[0])
    assert await ping(ours, theirs.peer_id) == pytest.approx(0.4, abs=0.01)


async def test_what_cannot_be_wanted_is_said(hosts: Hosts) -> None:
    _, ours, theirs = hosts
    async with keep_connections(ours) as keeper:
        with pytest.raises(ConfigurationError, match="this host"):
            keeper.want(ours.peer_id, ours.addresses)
        with pytest.raises(ConfigurationError, match="no address of"):
            keeper.want(theirs.peer_id, ours.addresses)
        with pytest.raises(ConfigurationError, match="multiaddr"):
            keeper.want(theirs.peer_id, ["nonsense"])
        assert keeper.wanted == ()


async def test_all_is_bounded(hosts: Hosts) -> None:
    """Peers, addresses of each, dials under way."""
    _, ours, theirs = hosts
    num_dials = most_dials = 0

    async def connect(address: str) -> str:
        nonlocal num_dials, most_dials
        num_dials += 1
        most_dials = max(most_dials, num_dials)
        try:
            await trio.sleep(1)
            return await ours.connect(address)
        finally:
            num_dials -= 1

    gone: list[str] = []
    limits = KeeperLimits(max_peers=6, max_addresses=3, max_dials=2)
    strangers = [Identity.generate().peer_id for _ in range(8)]
    async with keep_connections(
        ours, limits=limits, connect=connect, on_gone=lambda peer_id, _: gone.append(peer_id)
    ) as keeper:
        assert keeper.want(theirs.peer_id, theirs.addresses)
        for peer_id in strangers[:5]:
            assert keeper.want(peer_id, [f"/memory/99/p2p/{peer_id}"])
        # Nobody has failed yet, so nobody makes room.
        assert not keeper.want(strangers[5], [])
        await trio.sleep(100)
        assert most_dials == 2
        assert keeper.want(strangers[5], [])
        assert gone == strangers[:1]
        assert len(keeper.wanted) == 6
        for number in range(10):
            keeper.want(theirs.peer_id, [f"/memory/{500 + number}/p2p/{theirs.peer_id}"])
        state = keeper.state(theirs.peer_id)
        assert state is not None
        assert len(state.addresses) == 3
        assert state.addresses[0] == theirs.addresses[0]  # the one that is known to work stays


def test_the_pauses_double_up_to_the_bound() -> None:
    backoff = Backoff(first=1, largest=30)

    class Highest(random.Random):
        def random(self) -> float:
            return 1.0

    assert [backoff.delay(n, Highest()) for n in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert backoff.delay(10**9, Highest()) == 30


async def test_the_end_of_the_block_ends_every_task(hosts: Hosts) -> None:
    network, ours, theirs = hosts
    network.set_link(DOWN)
    keeper: Keeper
    async with keep_connections(ours) as keeper:
        keeper.want(theirs.peer_id, theirs.addresses)
        await trio.sleep(5)
    network.set_link(Link())
    await trio.sleep(100)
    assert not ours.connected_peers
