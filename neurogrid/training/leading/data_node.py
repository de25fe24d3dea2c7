"""A data node: it serves the slices of a data directory to the members of a run, and tells the leader that it does."""

from __future__ import annotations

import logging
from typing import Final

import trio

from neurogrid.errors import ConfigurationError, NeuroGridError, PeerRefusedError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.node.kept_connections import keep_coordinators
from neurogrid.node.reach_settings import open_reach
from neurogrid.node.roles import Table, authorise
from neurogrid.p2p.exchange.exchange import Exchange, new_request_id
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.hosts.machine import machine_name
from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.transfer import Transfers
from neurogrid.p2p.trust import COORDINATOR, RUN_ROLES
from neurogrid.p2p.wire import ErrorCode, Hello, MessageType, TensorMessage
from neurogrid.training.data.blobs import Providers, SliceStore
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.data.slices import read_manifest
from neurogrid.training.leading.settings import DataNodeSettings, NodeProgress
from neurogrid.training.wire.runs import Held, Hold, RunMessage, run_table

__all__ = ["DATA_NODE_TAKES", "serve_data"]

logger = logging.getLogger(__name__)

DATA_NODE_TAKES: Final[Table] = {
    MessageType.TRANSFER_REQUEST: frozenset({COORDINATOR, *RUN_ROLES}),
}
"""The roles that a data node takes each message from."""

_ANSWER_TIMEOUT: Final = 10.0
_RETRY: Final = 3.0
_MAX_ADDRESSES: Final = 16


async def serve_data(settings: DataNodeSettings, progress: NodeProgress) -> None:
    """Serve slices until cancelled.

    Raises:
        ConfigurationError: the directory has no data, or others than the run; or an address or the identity is not
            usable.
        NotAdmittedError: the ticket is no good.
    """
    manifest = read_manifest(settings.directory)
    store = SliceStore(settings.directory, manifest)
    num_slices = await trio.to_thread.run_sync(_num_there, store, manifest)
    if not num_slices:
        raise ConfigurationError(
            f"{settings.directory} lacks the first of the slices that its manifest names: there is nothing to serve"
        )
    if num_slices < len(manifest.slices):
        progress.say(f"{num_slices} of {len(manifest.slices)} slices are there to be served")
    identity = Identity.load(settings.identity_file) if settings.identity_file else None
    with unwrap_errors():
        async with open_host(
            listen=settings.listen,
            listen_fallback=settings.listen_fallback,
            identity=identity,
            admission=settings.admission,
            keep_alive=settings.reach.keep_alive,
        ) as host:
            exchange = Exchange(host, run_table(), role="peer", name=machine_name(settings.name))
            authorise(exchange, DATA_NODE_TAKES)
            Transfers(exchange, Providers(store))
            await open_reach(host, settings.reach)

            def hold() -> Hold:
                addresses = host.addresses[:_MAX_ADDRESSES]
                return Hold(store.manifest_info.blob_id, num_slices, addresses)

            def opened(peer_id: str, hello: Hello) -> None:
                if hello.role == "coordinator":
                    host.start_soon(_tell, exchange, peer_id, hold(), progress)

            exchange.on_peer_opened(opened)
            progress.listening(host.peer_id, host.addresses)
            async with keep_coordinators([exchange], settings.bootstrap):
                await trio.sleep_forever()


async def _tell(exchange: Exchange, leader: str, hold: Hold, progress: NodeProgress) -> None:
    """Tell a leader what is here, until it knows."""
    while exchange.host.is_connected(leader):
        request = TensorMessage(RunMessage.HOLD, request_id=new_request_id(), data=hold.encode())
        try:
            answer = await exchange.request(
                leader, request, RunMessage.HELD, timeout=_ANSWER_TIMEOUT
            )
            held = Held.decode(answer.data)
        except PeerRefusedError as exc:
            if exc.code == ErrorCode.NOT_SUPPORTED:
                raise ConfigurationError(
                    f"the leader takes no data from here: {exc.text}. Name the directory that its run was begun with, "
                    "or take the ticket of another run"
                ) from exc
            logger.info("the leader refuses: %s", exc)
        except NeuroGridError as exc:
            logger.info("the leader is not told yet: %s", exc)
        else:
            progress.say(f"serves {hold.num_slices} slices to run {held.run.hex()[:8]}")
            return
        await trio.sleep(_RETRY)


def _num_there(store: SliceStore, manifest: Manifest) -> int:
    """Slices from the first on that are in the directory."""
    missing = {info.blob_id for info in store.missing()}
    for number, info in enumerate(manifest.slices):
        if info.blob_id in missing:
            return number
    return len(manifest.slices)
