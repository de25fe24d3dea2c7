"""Options of discovery, by which a command finds peers and is found, and the settings they come to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from neurogrid.cli.options.trust import Trust, is_loopback
from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.node.discovery import DhtSettings, FindingSettings

__all__ = [
    "DEFAULT_NAMESPACE",
    "add_finding_options",
    "bootstrap_address",
    "bootstrap_peers",
    "finding",
    "peer_address",
]

# Of peers that belong to no cluster: they find all others of their kind in the same DHT.
DEFAULT_NAMESPACE = "neurogrid"


def peer_address(text: str) -> str:
    """An argparse type: the full multiaddr of a peer."""
    # Here, not above: --help needs no libp2p, which takes a second.
    from neurogrid.p2p.hosts.host import parse_peer_address

    try:
        parse_peer_address(text)
    except ConfigurationError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return text


def bootstrap_address(text: str) -> str:
    """An argparse type: the full multiaddr of a peer, or a file of them."""
    return text if text.startswith("@") else peer_address(text)


def add_finding_options(group: argparse._ArgumentGroup, *, is_worker: bool) -> None:
    """The options of both commands."""
    group.add_argument(
        "--disable-mdns",
        action="store_true",
        help="neither announce this peer on the local network nor look for others there",
    )
    group.add_argument(
        "--mdns-interface",
        action="append",
        default=[],
        metavar="NAME",
        help="keep to this interface for that, by name or address; may be given again (default: all)",
    )
    group.add_argument(
        "--bootstrap",
        action="append",
        type=bootstrap_address,
        default=[],
        metavar="MULTIADDR",
        help=(
            "a coordinator to dial" if is_worker else "another peer to dial, used if it is a worker"
        )
        + "; with --dht, a peer to begin with, whoever runs it; @FILE reads some from a file; may be given "
        "again; NEUROGRID_BOOTSTRAP names more",
    )
    group.add_argument(
        "--dht",
        action="store_true",
        help="find the members of the cluster, and be found, by the Kademlia DHT that the --bootstrap peers are in",
    )
    group.add_argument(
        "--dht-namespace",
        metavar="NAME",
        help=f"what the cluster is called there (default: its id; {DEFAULT_NAMESPACE!r} without --cluster and --join)",
    )


def bootstrap_peers(options: argparse.Namespace) -> tuple[str, ...]:
    """The peers that --bootstrap, its files and the environment name, as full multiaddrs.

    Raises:
        ConfigurationError: a file cannot be read, or an address is none.
    """
    from neurogrid.p2p.discovery.dht_bootstrap import read_bootstrap

    return read_bootstrap(options.bootstrap, environment=os.environ)


def finding(
    options: argparse.Namespace,
    listen: Sequence[str],
    trust: Trust,
    bootstrap: Sequence[str],
    *,
    to_open: str,
) -> FindingSettings:
    """Return the settings of discovery that the options ask for.

    Args:
        options: of the command line.
        listen: multiaddrs that will be listened on.
        trust: which cluster.
        bootstrap: what `bootstrap_peers` gave.
        to_open: what to type so that others than this machine's are let in.

    Raises:
        ConfigurationError: contradicting options, or a namespace that is none.
    """
    from neurogrid.node.discovery import FindingSettings

    if options.mdns_interface and options.disable_mdns:
        raise ConfigurationError("give either --mdns-interface or --disable-mdns, not both")
    is_reachable = not all(map(is_loopback, listen))
    if options.mdns_interface and not is_reachable:
        raise ConfigurationError(
            "--mdns-interface has nothing to announce: this peer listens on loopback only. For others "
            f"add {to_open}"
        )
    return FindingSettings(
        mdns=is_reachable and not options.disable_mdns,
        why_no_mdns="--disable-mdns"
        if options.disable_mdns
        else "this peer listens on loopback only (--help, --insecure and --cluster)",
        mdns_interfaces=tuple(options.mdns_interface),
        dht=_dht(options, trust, bootstrap),
    )


def _dht(options: argparse.Namespace, trust: Trust, bootstrap: Sequence[str]) -> DhtSettings | None:
    from neurogrid.node.discovery import DhtSettings
    from neurogrid.p2p.discovery.dht_key import cluster_key
    from neurogrid.p2p.trust import ClusterAdmission

    if not options.dht:
        if options.dht_namespace is not None:
            raise ConfigurationError("--dht-namespace says nothing without --dht")
        return None
    namespace = DEFAULT_NAMESPACE
    if options.dht_namespace is not None:
        namespace = options.dht_namespace
    elif isinstance(trust.admission, ClusterAdmission):
        namespace = trust.admission.membership.cluster_id
    cluster_key(namespace)  # for its error
    return DhtSettings(namespace, tuple(dict.fromkeys([*bootstrap, *trust.bootstrap])))
