"""Files of any kind as blobs between peers: what a member has saved, and its leader fetches."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import trio

from neurogrid.errors import (
    CheckpointError,
    ConfigurationError,
    LocalProtocolError,
    NeuroGridError,
    PeerRefusedError,
    RemoteProtocolError,
    ResponseTimeout,
    TransportError,
)
from neurogrid.p2p.transfer import (
    BlobInfo,
    BlobSource,
    BytesSource,
    DirectoryStore,
    TransferLimits,
    Transfers,
)
from neurogrid.p2p.transfer.passed_over import PassedOver

__all__ = ["PIECE_LIMITS", "OfferedFiles", "fetch_file", "fetch_file_patiently"]

logger = logging.getLogger(__name__)

_GIB: Final = 1024**3
# Seconds until those that did not give a blob are asked again.
_PAUSE: Final = 0.3
# Of the time that there is for a file, the part that one of several peers has, and the seconds that are the least.
_SHARES: Final = 8
_LEAST_SHARE: Final = 5.0

PIECE_LIMITS: Final = TransferLimits(max_bytes_per_peer=64 * _GIB, max_bytes=256 * _GIB)
"""Limits of files that go to disk: weights of a layer with their optimiser's state, and embeddings of a large
vocabulary in float32, are many times what serving sends at once."""


class OfferedFiles:
    """Files that peers may fetch, by what is in them, until they are withdrawn."""

    def __init__(self) -> None:
        self._sources: dict[bytes, BytesSource] = {}
        self._ids: dict[Path, bytes] = {}
        # When each was asked for last, in the order of all.
        self._asked: dict[bytes, int] = {}
        self._num_asked = 0

    async def offer(self, path: Path) -> bytes:
        """Give a file from now on, which must not change meanwhile; its blob id."""
        source, blob_id = await trio.to_thread.run_sync(_read, path)
        self._sources[blob_id] = source
        self._ids[path] = blob_id
        return blob_id

    async def offer_written(
        self, directory: Path, write: Callable[[], dict[str, Path]]
    ) -> tuple[dict[str, Path], tuple[bytes, ...]]:
        """Have files written to a directory of their own, and give all of them, or none.

        Args:
            write: writes them, in a thread; gives the file of each name, in order.

        Returns:
            What `write` gave, and the blob of each.

        Raises:
            CheckpointError: they cannot be written.
        """
        files: dict[str, Path] = {}
        try:
            files = await trio.to_thread.run_sync(write)
            return files, tuple([await self.offer(path) for path in files.values()])
        except BaseException as exc:  # also where nobody waits any more
            for path in files.values():
                self.withdraw(path)
            shutil.rmtree(directory, ignore_errors=True)
            if not isinstance(exc, OSError):
                raise
            raise CheckpointError(
                f"{directory}: files for others cannot be written: {exc.strerror or exc}; make room there"
            ) from exc

    def withdraw(self, path: Path) -> None:
        """Give a file no more; it may be removed."""
        blob_id = self._ids.pop(path, None)
        if blob_id is not None and blob_id not in self._ids.values():
            del self._sources[blob_id]
            self._asked.pop(blob_id, None)

    def withdraw_all(self) -> None:
        """Give none of the files any more. What is given keeps its room on the disk, also where it was removed."""
        for path in list(self._ids):
            self.withdraw(path)

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """See `TransferPolicy.provide`."""
        source = self._sources.get(blob_id)
        if source is not None:
            self._num_asked += 1
            self._asked[blob_id] = self._num_asked
        return source

    def asked(self, blob_ids: Iterable[bytes]) -> int:
        """Place, in the order of all askings, of the last one for any of these; 0 for never."""
        return max((self._asked.get(each, 0) for each in blob_ids), default=0)


def _read(path: Path) -> tuple[BytesSource, bytes]:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    source = BytesSource(data)
    return source, BlobInfo.of_digests(source.digests(), source.num_bytes).blob_id


async def fetch_file(
    transfers: Transfers, blob_id: bytes, peers: Sequence[str], path: Path, *, timeout: float
) -> str:
    """Get a blob from the first of these peers that has it, as a file; who sent the last of it.

    Raises:
        TransportError: it was not here in time, or is not to be had.
        ConfigurationError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        store = DirectoryStore(path.parent)
        with trio.fail_after(timeout):
            fetched = await transfers.fetch_blob(list(peers), blob_id, store=store)
        blob = fetched.blob
        if blob.path is None:
            await trio.to_thread.run_sync(path.write_bytes, blob.data)
        else:
            os.replace(blob.path, path)
    except trio.TooSlowError as exc:
        raise ResponseTimeout(f"{path.name} was not here within {timeout:g} s") from exc
    except OSError as exc:
        raise ConfigurationError(
            f"{path}: cannot be written: {exc.strerror or exc}; make room there"
        ) from exc
    return fetched.peer_id


async def fetch_file_patiently(
    transfers: Transfers,
    blob_id: bytes,
    peers: Sequence[str],
    path: Path,
    *,
    timeout: float,
    passed_over: PassedOver | None = None,
) -> str:
    """Get a blob as `fetch_file` does, and again while its peers are busy or were lost on the way, for so many seconds.

    Of several peers each has a share of the time, and the next one goes on with what came. So none that is silent, or
    sends too slowly, takes the time of all.

    Args:
        passed_over: peers that had a share in vain, of this file or others: they are asked after all others. Whoever
            has one now is noted.

    Raises:
        TransportError, PeerRefusedError: nobody gave it in time; the last that went wrong.
        ConfigurationError: the file cannot be written.
        RemoteProtocolError: a peer gave something else, and no other did better.
    """
    passed_over = passed_over or PassedOver()
    until = trio.current_time() + timeout
    share = max(timeout / _SHARES, _LEAST_SHARE) if len(peers) > 1 else timeout
    while True:
        error: NeuroGridError | None = None
        for peer in sorted(peers, key=lambda each: each in passed_over):
            left = until - trio.current_time()
            if error is not None and left <= _PAUSE:
                break
            try:
                return await fetch_file(
                    transfers, blob_id, [peer], path, timeout=max(min(left, share), 1.0)
                )
            except (TransportError, PeerRefusedError, RemoteProtocolError) as exc:
                if len(peers) == 1 and isinstance(exc, RemoteProtocolError):
                    raise
                error = exc
                if not isinstance(exc, PeerRefusedError):  # which takes no time
                    passed_over.blame(peer, exc, pause=timeout)
                logger.debug("%s is asked for again: %s", path.name, exc)
        if error is None:
            raise LocalProtocolError("a file is fetched from at least one peer")
        if until - trio.current_time() <= _PAUSE:
            raise error
        await trio.sleep(_PAUSE)
