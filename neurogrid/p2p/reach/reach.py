"""The ways of a host to be reached and to reach: relays, hole punching, port mapping, and the state of it all.

    async with open_host(listen=["/ip4/0.0.0.0/tcp/4001"]) as host:
        reach = Reach(host, ReachOptions(relays=[relay_address]))
        await host.connect(address)       # direct, or through a relay
        host.addresses                    # where others can reach us now

Everything runs in the host's own tasks and ends with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.hosts.host import ip_place, parse_peer_address
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.reach.autonat import MAX_ASKED, AutoNat, Reachability, ReachabilityState
from neurogrid.p2p.reach.circuit import circuit_address, is_relayed_address
from neurogrid.p2p.reach.hole_punching import HolePuncher, Path, PeerPath
from neurogrid.p2p.reach.port_mapping import PortMapper, PortMappingState
from neurogrid.p2p.reach.relay_client import RelayClient, RelayState
from neurogrid.p2p.reach.relay_service import (
    MayUseRelay,
    RelayLimits,
    RelayService,
    RelayServiceState,
)

__all__ = ["Reach", "ReachOptions", "ReachState"]


@dataclass(frozen=True)
class ReachOptions:
    """The ways in which a host is to be reached.

    Attributes:
        announce: multiaddrs that are known to lead here, with or without `/p2p/` and our peer id: the port that a
            router was told to forward.
        relays: full multiaddrs of relays to be reachable through; for hosts without a public address.
        relay_service: what to relay for others; None is nothing. Only of use where others can reach this host.
        may_use_relay: which peers to relay for; None is all that are admitted.
        port_mapping: whether to ask the router, by UPnP, to let peers in.
        autonat: whether to find out by asking peers if this host can be dialled, and to try that for them.
        hole_punching: whether to try for direct connections to peers that are connected through a relay.
    """

    announce: Sequence[str] = ()
    relays: Sequence[str] = ()
    relay_service: RelayLimits | None = None
    may_use_relay: MayUseRelay | None = None
    port_mapping: bool = False
    autonat: bool = True
    hole_punching: bool = True


@dataclass(frozen=True)
class ReachState:
    """Reach of a host at a moment: its addresses, and the state of each means of reaching it.

    Attributes:
        addresses: where others can dial it: those announced, those that it listens at, the router's, those through
            relays.
        observed: its own addresses as relays see them.
        reachability: whether peers got through when they were asked to try.
        port_mapping: how it stands with the router; None where it is not asked.
        relays: how it stands with each relay.
        paths: which way leads to each peer that was connected through a relay, and why.
        relay_service: what is relayed for others; None where nothing is.
    """

    addresses: tuple[str, ...]
    observed: tuple[str, ...]
    reachability: ReachabilityState | None
    port_mapping: PortMappingState | None
    relays: tuple[RelayState, ...]
    paths: tuple[PeerPath, ...]
    relay_service: RelayServiceState | None

    def rows(self) -> Iterator[tuple[str, str, str, bool]]:
        """Yield rows for people: a means of being reached, what it is for, its state, and whether that is well."""
        for relay in self.relays:
            where = f"reserved: {len(relay.addresses)} address{'es' * (len(relay.addresses) != 1)}"
            outcome = where if relay.is_reserved else f"not reserved: {relay.last_error}"
            yield "relay", f"be reached through {relay.address}", outcome, relay.is_reserved
        if self.reachability is not None:
            found = self.reachability
            at = f" at {found.address}" if found.address else ""
            outcome = f"{found.reachability.value}{at}: {found.reason}"
            is_public = found.reachability is Reachability.PUBLIC
            yield "nat", "have peers dial this host", outcome, is_public
        if self.port_mapping is not None:
            mapping = self.port_mapping
            ports = ", ".join(
                f"{mapping.external_ip}:{mapped.external_port} leads to {mapped.protocol} port {mapped.port}"
                for mapped in mapping.mappings
            )
            yield "router", "have ports mapped by UPnP", ports or mapping.reason, bool(ports)
        for path in self.paths:
            what = f"reach {path.peer_id} without a relay"
            yield "hole punch", what, f"{path.path.value}: {path.reason}", path.path is Path.DIRECT
        if self.relay_service is not None:
            given = self.relay_service
            outcome = (
                f"{len(given.reservations)} peers reserved, {len(given.circuits)} connections, "
                f"{given.relayed_bytes} B"
            )
            yield "relay service", "relay for others", outcome, True


class Reach:
    """The reachability of one host, from its making on until the host ends.

    Attributes:
        announced_addresses: full multiaddrs that are known to lead here.
        autonat: finds out whether this host can be dialled; None where it does not.

    Raises:
        ConfigurationError: an address of a relay is malformed, or is this host's own; or one that is announced is
            malformed, or another peer's.
        LocalProtocolError: the host has its reach already.
    """

    def __init__(self, host: Libp2pHost, options: ReachOptions | None = None) -> None:
        options = options or ReachOptions()
        self._host = host
        self.announced_addresses = tuple(
            own_address(address, host.peer_id) for address in options.announce
        )
        host.set_reach(self)
        self._relay_client = RelayClient(host, on_relayed=self._relayed)
        self._hole_puncher: HolePuncher | None = None
        self._relay_service: RelayService | None = None
        self._port_mapper: PortMapper | None = None
        self.autonat: AutoNat | None = None
        if options.port_mapping:
            self._port_mapper = PortMapper(host)
            host.start_soon(self._port_mapper.run)
        if options.autonat:
            self.autonat = AutoNat(host, own_addresses=self._dialled_addresses)
        if options.hole_punching:
            self._hole_puncher = HolePuncher(
                host,
                own_addresses=self._dialled_addresses,
                last_used=self._relay_client.last_used,
            )
        if options.relay_service is not None:
            self._relay_service = RelayService(
                host,
                limits=options.relay_service,
                may_use=options.may_use_relay or (lambda peer: host.role_of(peer) is not None),
            )
        for relay in options.relays:
            self.use_relay(relay)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs at which this host can be dialled now; as `Host.addresses`."""
        return self._host.addresses

    @property
    def more_addresses(self) -> tuple[str, ...]:
        """Full multiaddrs of ours at the router, and through relays."""
        mapped = self._port_mapper.addresses if self._port_mapper else ()
        return (
            *(f"{address}/p2p/{self._host.peer_id}" for address in mapped),
            *self._relay_client.addresses,
        )

    def use_relay(self, address: str) -> None:
        """Be reachable through one more relay, as soon as it lets us.

        Raises:
            ConfigurationError: `address` is malformed, or is this host's own.
        """
        self._relay_client.use(address)

    def circuits_to(self, peer_id: str) -> tuple[str, ...]:
        """Addresses through relays at which this host has reached a peer that is connected."""
        return self._relay_client.circuits_to(peer_id)

    def ways_to(self, peer_id: str) -> tuple[str, ...]:
        """Addresses of a peer through the relays at which we have a slot: it may have one there too."""
        return tuple(
            circuit_address(relay.address, peer_id)
            for relay in self._relay_client.states()
            if relay.is_reserved and parse_peer_address(relay.address)[1] != peer_id
        )

    async def wait_relays(self) -> None:
        """Wait until each relay has given a slot, or the first attempt to get one has failed."""
        while not all(state.was_asked for state in self._relay_client.states()):
            await self._relay_client.wait_changed()

    async def check_reachability(self) -> None:
        """Ask the peers that are connected now whether they can dial this host; `state` has what they say."""
        if self.autonat is not None:
            await self.autonat.check(sorted(self._host.linked_peers)[:MAX_ASKED])

    async def connect(self, address: str) -> str:
        """Dial a full multiaddr, direct or through a relay, and return the peer id. As `Host.connect`."""
        return await self._host.connect(address)

    async def connect_relayed(self, address: str) -> str:
        """Dial a peer through a relay and return its peer id; for the host."""
        return await self._relay_client.connect(address)

    def state(self) -> ReachState:
        """Return the reach of this host at this moment."""
        return ReachState(
            addresses=self.addresses,
            observed=self._relay_client.observed_addresses,
            reachability=self.autonat.state if self.autonat else None,
            port_mapping=self._port_mapper.state if self._port_mapper else None,
            relays=self._relay_client.states(),
            paths=self._hole_puncher.paths() if self._hole_puncher else (),
            relay_service=self._relay_service.state if self._relay_service else None,
        )

    def _relayed(self, peer_id: str) -> None:
        if self._hole_puncher is not None:
            self._hole_puncher.upgrade(peer_id)

    def _dialled_addresses(self) -> list[str]:
        """TCP addresses at which a peer might get through to us: those announced, the router's ports, those that relays
        see, those of our own interfaces."""
        mapped = self._port_mapper.addresses if self._port_mapper else ()
        announced, own = (
            [address.partition("/p2p/")[0] for address in addresses]
            for addresses in (self.announced_addresses, self._host.listen_addresses)
        )
        known = [*announced, *mapped]
        return [
            *filter(_is_tcp, known),
            *self._relay_client.observed_addresses,
            *filter(_is_tcp, own),
        ]


def own_address(address: str, peer_id: str) -> str:
    """A multiaddr that somebody typed as one of ours, with our peer id.

    Raises:
        ConfigurationError: malformed, another peer's, or through a relay.
    """
    full = address if "/p2p/" in address else f"{address}/p2p/{peer_id}"
    if is_relayed_address(full):
        raise ConfigurationError(
            f"{address!r} leads through a relay: name the relay instead (--relay), which gives us a slot"
        )
    if parse_peer_address(full)[1] != peer_id:
        raise ConfigurationError(f"{address!r} is the address of another peer, not of {peer_id}")
    return full


def _is_tcp(address: str) -> bool:
    place = ip_place(address)
    if place is None or place.is_quic:
        return False
    return not (place.ip.is_unspecified or place.ip.is_link_local)
