"""Bring a model's layers to the workers that are to hold them: config, assignment, what is missing, all at once."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio

from neurogrid.errors import (
    NoRouteError,
    PeerRefusedError,
    PeerUnreachableError,
    RemoteProtocolError,
    StreamBrokenError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.inference.caching import CacheSettings, open_directory
from neurogrid.inference.loaded_model import LoadedModel
from neurogrid.inference.pipeline import PipelineStage
from neurogrid.inference.progress import Progress
from neurogrid.inference.remote_worker import Placement, TransferReports
from neurogrid.inference.spreading import Spread
from neurogrid.model.config import model_config_message
from neurogrid.model.hash_cache import HashCache
from neurogrid.p2p.host import Host
from neurogrid.p2p.wire import ErrorCode, ModelConfig

__all__ = ["place_stages"]

logger = logging.getLogger(__name__)

# A worker's connection may break this often while it gets its layers.
MAX_CUTS: Final = 5
# To have it again: a worker that dials the coordinator tries every 15 s at the latest. Seconds.
RECONNECT_TIMEOUT: Final = 30.0
RECONNECT_DELAY: Final = 0.5


async def place_stages(
    model: LoadedModel,
    stages: Sequence[PipelineStage],
    host: Host,
    *,
    max_sessions: int,
    skip_weight_transfer: bool,
    cache: CacheSettings | None,
    progress: Progress,
) -> None:
    """Send config and missing layers to all workers at once; returns when all are ready.

    A worker whose connection breaks meanwhile is connected again, and what it has by then is not sent again.

    Args:
        host: whose connections to the workers these are.
        max_sessions: sessions open at once.
        skip_weight_transfer: the workers must hold their layers already.
        cache: where the hashes of the model's files are kept; None for nowhere.

    Raises:
        NoRouteError: a worker did not get ready.
        ModelError: a layer is missing at a worker, and may not be sent.
    """
    config = model_config_message(
        model.config,
        model.checkpoint.config,
        model_name=model.name,
        max_seq_len=model.max_seq_len,
        dtype=model.dtype,
    )
    spread = Spread(host.addresses_of)

    async def place(item: PipelineStage, hashes: HashCache | None) -> None:
        peer_id, stage = item.worker.peer_id, item.stage
        blobs = {i: model.checkpoint.layer_blob(i) for i in range(stage.start, stage.stop)}
        placement = Placement(
            stage=stage,
            blobs=blobs,
            max_length=model.max_seq_len,
            max_sessions=max_sessions,
            dtype=model.dtype,
            skip_weight_transfer=skip_weight_transfer,
            spread=spread,
        )
        try:
            await _place_one(item, config, placement, host, progress)
        except (TransportError, PeerRefusedError, RemoteProtocolError) as exc:
            what = (
                f"worker {peer_id} did not get ready for layers {stage.start} to {stage.stop - 1}"
            )
            is_wrong = getattr(exc, "code", None) == ErrorCode.HASH_MISMATCH
            if is_wrong and hashes is not None and hashes.num_known:
                # A file that changed under its old time, or the machine is broken.
                hashes.forget()
                what += "; the kept hashes of the model's files are dropped, so that the next start hashes anew"
            raise NoRouteError(f"{what}: {exc}", layers=range(stage.start, stage.stop)) from exc

    async with _hashes_of(model, cache) as hashes:
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                for item in stages:
                    layers = range(item.stage.start, item.stage.stop)
                    num_bytes = sum(model.checkpoint.layer_blob(i).num_bytes for i in layers)
                    progress.transfer_planned(item.worker.peer_id, num_bytes)
                    nursery.start_soon(place, item, hashes)


async def _place_one(
    item: PipelineStage,
    config: ModelConfig,
    placement: Placement,
    host: Host,
    progress: Progress,
) -> None:
    """Bring one stage to one worker, over as many connections as it takes."""
    worker, peer_id = item.worker, item.worker.peer_id
    addresses = host.addresses_of(peer_id)  # now: they are forgotten sooner or later
    reports = _Reports(progress, peer_id)
    for num_left in reversed(range(MAX_CUTS + 1)):
        try:
            await worker.configure(config)
            await worker.place(placement, reports.of_attempt())
        except (StreamBrokenError, PeerUnreachableError) as exc:
            if not num_left:
                raise
            logger.warning(
                "the connection to worker %s broke while it got its layers (%s): connecting again, to go on where it "
                "stopped",
                peer_id,
                exc,
            )
            await _reconnect(host, peer_id, addresses)
        else:
            return


async def _reconnect(host: Host, peer_id: str, addresses: Sequence[str]) -> None:
    """Connect to a worker again, or wait until it has.

    Raises:
        PeerUnreachableError: neither came about in time.
    """
    reason = "it did not come back, and no address of it is known"
    with trio.move_on_after(RECONNECT_TIMEOUT):
        while peer_id not in host.connected_peers:
            if addresses:
                try:
                    await host.connect_any(addresses)
                    continue
                except PeerUnreachableError as exc:
                    reason = str(exc)
            await trio.sleep(RECONNECT_DELAY)
    if peer_id not in host.connected_peers:
        raise PeerUnreachableError(
            f"the connection broke, and there was none again within {RECONNECT_TIMEOUT:g} s: {reason}"
        )


class _Reports:
    """What became of a worker's bytes, each byte told once, however often the transfer began anew."""

    def __init__(self, progress: Progress, peer_id: str) -> None:
        self._progress = progress
        self._peer_id = peer_id
        self._told = 0
        self._known = 0

    def of_attempt(self) -> TransferReports:
        """For the next attempt: what has been told by now will be reported as held."""
        self._known = self._told
        return TransferReports(
            sent=partial(self._tell, self._progress.transferred),
            held=self._held,
            passed_on=partial(self._tell, self._progress.passed_on),
        )

    def _held(self, num_bytes: int) -> None:
        again = min(num_bytes, self._known)
        self._known -= again
        if num_bytes > again:
            self._tell(self._progress.already_held, num_bytes - again)

    def _tell(self, tell: Callable[[str, int], None], num_bytes: int) -> None:
        self._told += num_bytes
        tell(self._peer_id, num_bytes)


@asynccontextmanager
async def _hashes_of(
    model: LoadedModel, cache: CacheSettings | None
) -> AsyncIterator[HashCache | None]:
    """The model with the hashes of an earlier start; those that were made in the block are kept for the next."""
    directory = open_directory(cache, "hashes") if cache is not None else None
    if directory is None:
        yield None
        return
    hashes = await trio.to_thread.run_sync(HashCache.open, directory, model.checkpoint)
    if hashes.num_known:
        logger.debug("the hashes of %d layers are known", hashes.num_known)
    yield hashes
    await trio.to_thread.run_sync(hashes.save)
