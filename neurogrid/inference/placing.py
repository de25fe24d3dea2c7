"""Bring a model's layers to the workers that are to hold them: config, assignment, what is missing, all at once."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

from neurogrid.errors import (
    NoRouteError,
    PeerRefusedError,
    RemoteProtocolError,
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
from neurogrid.p2p.wire import ErrorCode

__all__ = ["place_stages"]

logger = logging.getLogger(__name__)


async def place_stages(
    model: LoadedModel,
    stages: Sequence[PipelineStage],
    *,
    max_sessions: int,
    skip_weight_transfer: bool,
    cache: CacheSettings | None,
    addresses_of: Callable[[str], Sequence[str]],
    progress: Progress,
) -> None:
    """Send config and missing layers to all workers at once; returns when all are ready.

    Args:
        max_sessions: sessions open at once.
        skip_weight_transfer: the workers must hold their layers already.
        addresses_of: full multiaddrs at which a worker can be dialled by another.
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

    spread = Spread(addresses_of)

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
            await item.worker.configure(config)
            await item.worker.place(
                placement,
                TransferReports(
                    sent=partial(progress.transferred, peer_id),
                    held=partial(progress.already_held, peer_id),
                    passed_on=partial(progress.passed_on, peer_id),
                ),
            )
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
