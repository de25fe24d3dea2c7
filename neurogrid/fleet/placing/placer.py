"""Bring layers of a model to a worker that is to hold them: config, assignment, what is missing.

A worker whose connection breaks meanwhile is connected again, and what it has by then is not sent again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import trio

from neurogrid.errors import (
    ModelError,
    NeuroGridError,
    NoRouteError,
    PeerUnreachableError,
    StreamBrokenError,
)
from neurogrid.fleet.remote_worker import Placement, RemoteWorker, TransferReports
from neurogrid.fleet.spread import Spread
from neurogrid.model.files.config import model_config_message
from neurogrid.model.files.hash_cache import HashCache
from neurogrid.model.source import ModelSource
from neurogrid.node.cache_directory import CacheSettings, open_directory
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.wire import ErrorCode
from neurogrid.planner import PlannedStage, name_range

__all__ = ["RECONNECT_TIMEOUT", "Placer", "open_placer"]

logger = logging.getLogger(__name__)

# A worker's connection may break this often while it gets its layers.
MAX_CUTS: Final = 5
# To have it again: a worker that dials the coordinator tries every 15 s at the latest. Seconds.
RECONNECT_TIMEOUT: Final = 30.0
RECONNECT_DELAY: Final = 0.5
# Layers that are made and in memory at once, on their way to however many workers: two of each of three.
MAX_MADE_LAYERS: Final = 6


class Placer:
    """Places layers of one model. Made by `open_placer`.

    Attributes:
        max_sessions: sessions open at once that a worker sets memory aside for; may be changed until layers are placed.
    """

    def __init__(
        self,
        model: ModelSource,
        host: Host,
        hashes: HashCache | None,
        *,
        max_sessions: int,
        skip_weight_transfer: bool,
    ) -> None:
        self._model = model
        self._host = host
        self._hashes = hashes
        self._spread = Spread(host.addresses_of)
        self._making = trio.CapacityLimiter(MAX_MADE_LAYERS)
        self.max_sessions = max_sessions
        self._skip_weight_transfer = skip_weight_transfer
        self._config = model_config_message(
            model.config,
            model.checkpoint.config,
            model_name=model.name,
            max_seq_len=model.max_seq_len,
            dtype=model.dtype,
            quantization=model.quantization,
        )

    def num_bytes(self, layers: range) -> int:
        """Bytes of these layers' weights as they travel."""
        return sum(self._model.layer_blob(layer).num_bytes for layer in layers)

    async def configure(self, worker: RemoteWorker) -> None:
        """Tell a worker which model it is. Sessions and assignment of before are dropped there."""
        await worker.configure(self._config)

    async def place(
        self,
        worker: RemoteWorker,
        layers: range,
        reports: TransferReports,
        *,
        is_configured: bool,
        is_back: Callable[[], None] = lambda: None,
        patience: float = RECONNECT_TIMEOUT,
    ) -> None:
        """Assign the layers to a worker and bring what it lacks; returns when all are usable.

        Args:
            is_configured: it knows the model, since its connection began.
            is_back: called when there is another connection in place of one that was lost.
            patience: seconds to wait for a connection that was lost.

        Raises:
            ModelError: a layer is missing there, and must not be sent.
            NoRouteError: the worker did not get ready; names it, and says why.
        """
        peer_id = worker.peer_id
        stage = PlannedStage(peer_id, layers.start, layers.stop, self.num_bytes(layers))
        placement = Placement(
            stage=stage,
            blobs={layer: self._model.layer_blob(layer) for layer in layers},
            max_length=self._model.max_seq_len,
            max_sessions=self.max_sessions,
            dtype=self._model.dtype,
            has_coded_caches=self._model.has_coded_caches,
            making=self._making,
            skip_weight_transfer=self._skip_weight_transfer,
            spread=self._spread,
        )
        addresses = self._host.addresses_of(peer_id)  # now: they are forgotten sooner or later
        attempts = _Attempts(reports)
        num_cuts = 0
        while True:
            self._spread.lost(peer_id)  # it may drop what is not assigned now
            try:
                if not is_configured:
                    await self.configure(worker)
                await worker.place(placement, attempts.next())
                return
            except ModelError:
                raise
            except NeuroGridError as exc:
                # Whatever it is, it is this worker's: the others go on.
                num_cuts += 1
                is_cut = isinstance(exc, StreamBrokenError | PeerUnreachableError)
                if not is_cut or num_cuts > MAX_CUTS or not patience:
                    raise self.not_ready(peer_id, layers, exc) from exc
                logger.warning(
                    "the connection to worker %s broke while it got its layers (%s): connecting again, to go on "
                    "where it stopped",
                    peer_id,
                    exc,
                )
                try:
                    await _reconnect(self._host, peer_id, addresses, patience)
                except PeerUnreachableError as unreachable:
                    raise self.not_ready(peer_id, layers, unreachable) from unreachable
                is_back()
                is_configured = False

    def not_ready(self, peer_id: str, layers: range, exc: Exception) -> NoRouteError:
        """The error that says so; hashes that the worker found wrong are not kept."""
        what = f"worker {peer_id} did not get ready for {name_range(layers)}"
        is_wrong = getattr(exc, "code", None) == ErrorCode.HASH_MISMATCH
        if is_wrong and self._hashes is not None and self._hashes.num_known:
            # A file that changed under its old time, or the machine is broken.
            self._hashes.forget()
            what += "; the kept hashes of the model's files are dropped, so that the next start hashes anew"
        return NoRouteError(f"{what}: {exc}", layers=layers, peer_id=peer_id)

    def lost(self, peer_id: str) -> None:
        """A worker is gone: nobody is sent to it for layers."""
        self._spread.lost(peer_id)

    async def save_hashes(self) -> None:
        """Keep the hashes that were made for the next start."""
        if self._hashes is not None:
            await trio.to_thread.run_sync(self._hashes.save)


async def open_placer(
    model: ModelSource,
    host: Host,
    *,
    max_sessions: int,
    skip_weight_transfer: bool,
    cache: CacheSettings | None,
) -> Placer:
    """A placer that knows the hashes of an earlier start.

    Args:
        host: has the connections to the workers.
        max_sessions: sessions open at once that a worker sets memory aside for.
        skip_weight_transfer: the workers must hold their layers already.
        cache: where the hashes of the model's files are kept; None for nowhere.
    """
    hashes = None
    directory = open_directory(cache, "hashes") if cache is not None else None
    if directory is not None:
        hashes = await trio.to_thread.run_sync(
            HashCache.open, directory, model.checkpoint, model.quantization
        )
        if hashes.num_known:
            logger.debug("the hashes of %d layers are known", hashes.num_known)
    return Placer(
        model,
        host,
        hashes,
        max_sessions=max_sessions,
        skip_weight_transfer=skip_weight_transfer,
    )


async def _reconnect(host: Host, peer_id: str, addresses: Sequence[str], patience: float) -> None:
    """Connect to a worker again, or wait until it has.

    A worker that is about to end refuses, or closes the connection while it is asked who it is; one that has just
    started may not know us yet. So a refusal is a reason to try again, as silence is.

    Raises:
        PeerUnreachableError: neither came about in time; says what the last attempt came to.
    """
    reason = "it did not come back, and no address of it is known"
    with trio.move_on_after(patience):
        while not host.is_connected(peer_id):
            if addresses:
                try:
                    await host.connect_any(addresses)
                    continue
                except NeuroGridError as exc:
                    reason = str(exc)
            await trio.sleep(RECONNECT_DELAY)
    if not host.is_connected(peer_id):
        raise PeerUnreachableError(
            f"the connection broke, and there was none again within {patience:g} s: {reason}"
        )


class _Attempts:
    """Reports of a worker's bytes, each byte told once, however often the transfer began anew."""

    def __init__(self, reports: TransferReports) -> None:
        self._reports = reports
        self._told = 0
        self._known = 0

    def next(self) -> TransferReports:
        """Return reports for the next attempt, in which what has been told by now is reported as held."""
        self._known = self._told
        return TransferReports(
            begun=self._reports.begun, sent=self._sent, held=self._held, passed_on=self._passed_on
        )

    def _sent(self, num_bytes: int) -> None:
        self._told += num_bytes
        self._reports.sent(num_bytes)

    def _passed_on(self, num_bytes: int) -> None:
        self._told += num_bytes
        self._reports.passed_on(num_bytes)

    def _held(self, num_bytes: int) -> None:
        again = min(num_bytes, self._known)
        self._known -= again
        if num_bytes > again:
            self._told += num_bytes - again
            self._reports.held(num_bytes - again)
