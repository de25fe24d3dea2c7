"""`Discovery` on a host of the network in memory: its stream, its dials, and what it explains."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from neurogrid.errors import (
    ConfigurationError,
    LocalProtocolError,
    NeuroGridError,
    PeerUnreachableError,
)
from neurogrid.p2p.discovery import Attempt, Discovery, PeerChange, PeerFound, PeerLost, Sighting
from neurogrid.p2p.discovery.explanation import (
    MAX_ATTEMPTS_OF_SOURCE,
    Attempts,
    Explanation,
    dial_outcome,
)
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.memory import MemoryHost, MemoryNetwork, open_memory_network

Scene = Callable[[MemoryNetwork, MemoryHost, Discovery], Awaitable[None]]


def play(scene: Scene, *, jumps: bool = True) -> None:
    """Run a scene; time jumps, unless something in it waits for a thread."""

    async def main() -> None:
        async with (
            open_memory_network() as network,
            network.open_host() as host,
            Discovery(host) as discovery,
        ):
            await scene(network, host, discovery)

    trio.run(main, clock=MockClock(autojump_threshold=0) if jumps else None)


def test_every_reader_has_what_is_known_and_then_what_changes() -> None:
    async def scene(network: MemoryNetwork, host: MemoryHost, discovery: Discovery) -> None:
        discovery.report(Sighting("a", ("/1",), "ticket"))
        first, second = discovery.peers(), discovery.peers()
        expected = PeerFound("a", ("/1",), frozenset({"ticket"}))
        assert await first.__anext__() == expected
        discovery.report(Sighting("a", (), "ticket", is_lost=True))
        discovery.report(Sighting("b", ("/2",), "dht"))
        assert await first.__anext__() == PeerLost("a")
        # The second never read of it.
        assert [await reader.__anext__() for reader in (first, second)] == [
            PeerFound("b", ("/2",), frozenset({"dht"}))
        ] * 2
        assert set(discovery.known) == {"b"}

    play(scene)


async def test_a_stream_ends_with_its_discovery() -> None:
    changes: list[PeerChange] = []
    async with open_memory_network() as network, network.open_host() as host:
        async with trio.open_nursery() as nursery, Discovery(host) as discovery:

            async def read() -> None:
                async for change in discovery.peers():
                    changes.append(change)

            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            discovery.report(Sighting("a", ("/1",), "dht"))
        assert [change async for change in discovery.peers()] == changes
    assert [change.peer_id for change in changes] == ["a"]


def test_dials_are_explained() -> None:
    async def scene(network: MemoryNetwork, host: MemoryHost, discovery: Discovery) -> None:
        async with network.open_host() as other:
            assert await discovery.connect(other.addresses[0]) == other.peer_id
        place = other.addresses[0]
        with pytest.raises(PeerUnreachableError):
            await discovery.connect(f"{place.rpartition('/')[0]}/{Identity.generate().peer_id}")
        with pytest.raises(ConfigurationError):
            await discovery.connect("/ip4/10.1.0.2/p2p/x")
        outcomes = [item.outcome for item in discovery.explain().attempts if item.source == "dial"]
        assert outcomes[0] == "connected"
        assert outcomes[2].startswith("no common transport: ")

    play(scene)


def test_a_dial_that_is_given_up_is_explained() -> None:
    async def main() -> None:
        async def connect(address: str) -> str:
            await trio.sleep_forever()
            raise AssertionError

        async with (
            open_memory_network() as network,
            network.open_host() as host,
            Discovery(host, connect=connect) as discovery,
        ):
            with trio.move_on_after(1):
                await discovery.connect("/ip4/10.1.0.2/tcp/1/p2p/x")
            assert "given up" in str(discovery.explain())

    trio.run(main, clock=MockClock(autojump_threshold=0))


def unreachable(reason: str, cause: BaseException | None = None) -> PeerUnreachableError:
    try:
        raise PeerUnreachableError(f"cannot connect to /x: {reason}") from cause
    except PeerUnreachableError as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (unreachable("x", OSError(errno.ECONNREFUSED, "x")), "refused"),
        (unreachable("x", OSError(errno.EHOSTUNREACH, "x")), "no route"),
        (unreachable("x", OSError(errno.ENETUNREACH, "x")), "no route"),
        (unreachable("x", OSError(errno.ETIMEDOUT, "x")), "no answer"),
        (
            unreachable("x", ExceptionGroup("", [OSError(errno.ECONNREFUSED, "x")])),
            "refused",
        ),
        (PeerUnreachableError("no answer from /x in 10 s"), "no answer"),
        (unreachable("another peer lives there (its key is not ...)"), "wrong key"),
        (unreachable("something else"), "failed"),
        (ConfigurationError("'/x' has no TCP port"), "no common transport"),
    ],
)
def test_why_a_dial_failed_is_named(error: NeuroGridError, kind: str) -> None:
    assert dial_outcome(error) == f"{kind}: {error}"


async def test_a_source_runs_once_and_within_the_block() -> None:
    async with open_memory_network() as network, network.open_host() as host:
        discovery = Discovery(host)
        with pytest.raises(LocalProtocolError, match="async with"):
            await discovery.setup_mdns()
        async with discovery:
            # A host in memory is on no network, so nothing is sent anywhere.
            await discovery.setup_mdns()
            assert "loopback alone" in str(discovery.explain())
            with pytest.raises(LocalProtocolError, match="runs already"):
                await discovery.setup_mdns()


@pytest.mark.parametrize("options", [{"expiry": 0.1}, {"expiry": 1e9}, {"interfaces": ["eth99"]}])
def test_options_that_cannot_be_right(options: dict[str, object]) -> None:
    async def scene(network: MemoryNetwork, host: MemoryHost, discovery: Discovery) -> None:
        with pytest.raises(ConfigurationError):
            await discovery.setup_mdns(**options)  # type: ignore[arg-type]
        assert "not tried" in str(discovery.explain())
        await discovery.setup_mdns()

    play(scene, jumps=False)


def test_kademlia_needs_a_host_on_libp2p() -> None:
    async def scene(network: MemoryNetwork, host: MemoryHost, discovery: Discovery) -> None:
        with pytest.raises(LocalProtocolError, match="libp2p"):
            await discovery.setup_dht(namespace="x", record=None)
        with pytest.raises(LocalProtocolError, match="setup_dht"):
            discovery.dht()

    play(scene)


def test_what_the_block_raises_leaves_it_as_it_is() -> None:
    async def scene(network: MemoryNetwork, host: MemoryHost, discovery: Discovery) -> None:
        raise ConfigurationError("wrong")

    with pytest.raises(ConfigurationError, match="wrong"):
        play(scene)


# The table


def test_the_table_says_what_came_of_everything() -> None:
    attempts = Attempts()
    attempts.put(Attempt("mdns", "ask on eth0", "nobody there", False))
    attempts.put(Attempt("dial", "dial /ip4/1.2.3.4", "", False))
    attempts.put(Attempt("mdns", "ask on eth0", "2 peers there", True))
    attempts.put(Attempt("mdns", "packets", "ignored\none\x1b[2J", False))
    assert str(Explanation(tuple(attempts))).splitlines() == [
        "source  tried                 outcome",
        "mdns    ask on eth0        +  2 peers there",
        "mdns    packets            -  ignored?one?[2J",
        "dial    dial /ip4/1.2.3.4  -  under way",
    ]


def test_the_table_is_bounded() -> None:
    attempts = Attempts()
    for number in range(1000):
        attempts.put(Attempt("dial", f"dial {number} {'x' * 500}", "refused", False))
    assert len(list(attempts)) == MAX_ATTEMPTS_OF_SOURCE
    assert max(map(len, str(Explanation(tuple(attempts))).splitlines())) < 600
