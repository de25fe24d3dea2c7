"""`--diagnose`: which workers are there, and what was tried to find them."""

from __future__ import annotations

import argparse
import logging
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

from neurogrid.cli.options.common import TO_OPEN, ExitStatus, listening, warn_of_loopback
from neurogrid.cli.options.discovery import bootstrap_peers, finding
from neurogrid.cli.options.reach import explain_reach, reaching
from neurogrid.cli.options.trust import trust_of
from neurogrid.cli.signals import ending_at_once
from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.p2p import Protocol

__all__ = ["DIAGNOSE_WAIT", "diagnose"]

logger = logging.getLogger(__name__)

# Those that are there answer at once. Seconds.
DIAGNOSE_WAIT: Final = 5.0


async def diagnose(options: argparse.Namespace) -> int:
    """Print which workers are there, and what was tried to find them; a failure if there are too few."""
    with ending_at_once():
        where = listening(options, port_flag="--p2p-port")
        how_reached = reaching(options, where.addresses)
        if options.new_cluster:
            raise ConfigurationError(
                "--diagnose looks for workers, and a new cluster has no workers yet: leave --new-cluster out"
            )
        trust = trust_of(options, is_worker=False)
        warn_of_loopback(where, is_chosen=bool(options.listen))
        bootstrap = bootstrap_peers(options)
        how = finding(options, where.addresses, trust, bootstrap, to_open=TO_OPEN)

        from neurogrid.fleet.gathering import look_for_workers
        from neurogrid.fleet.remote_worker import Timeouts
        from neurogrid.inference.pipeline.remote_workers import remote_worker
        from neurogrid.node.discovery import open_discovery
        from neurogrid.node.reach_settings import open_reach
        from neurogrid.p2p import Identity, Protocol, open_host
        from neurogrid.p2p.discovery.dht import Announcement
        from neurogrid.p2p.hosts.machine import machine_name
        from neurogrid.p2p.trust import DirectoryInUseError

    async with AsyncExitStack() as stack:
        try:
            stack.enter_context(trust.held())
            identity = Identity.load(trust.identity_file) if trust.identity_file else None
            admission = trust.admission
        except DirectoryInUseError as exc:
            logger.info(
                "%s. This looks on under another peer id, and does not see who waits for that coordinator alone",
                str(exc).partition(". ")[0],
            )
            identity = Identity.generate()
            admission = trust.beside(identity.peer_id)
        host = await stack.enter_async_context(
            open_host(
                listen=where.addresses,
                listen_fallback=where.fallback,
                identity=identity,
                admission=admission,
                keep_alive=how_reached.keep_alive,
            )
        )
        protocol = Protocol(host, role="coordinator", name=machine_name(options.name))
        reach = await open_reach(host, how_reached)
        announcement = Announcement("coordinator")
        async with open_discovery(
            host, how, announcement=lambda: announcement, admission=admission, reach=reach
        ) as discovery:
            workers = await look_for_workers(
                protocol,
                discovery,
                addresses=[*options.peer, *(() if how.dht else bootstrap)],
                make_worker=partial(remote_worker, protocol, timeouts=Timeouts()),
                wait=options.wait or DIAGNOSE_WAIT,
            )
            found = [_worker(protocol, peer_id) for peer_id in workers]
            await explain_reach(reach, discovery)
            print(discovery.explain())
    print(f"\n{len(workers)} worker{'s' * (len(workers) != 1)} found", *found, sep="\n  ")
    return ExitStatus.OK if len(workers) >= (options.min_peers or 1) else ExitStatus.FAILURE


def _worker(protocol: Protocol, peer_id: str) -> str:
    """A worker in full: what it calls its machine, its peer id, the address that it has."""
    hello, address = protocol.hello_of(peer_id), protocol.host.remote_ip(peer_id)
    name = f"{hello.name} " if hello is not None and hello.name else ""
    return f"{name}{peer_id}{f' ({address})' if address else ''}"
