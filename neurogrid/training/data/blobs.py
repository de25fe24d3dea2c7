"""Slices between peers: who has data serves them, who trains fetches what it needs, keeps it, and serves it on.

A slice is a blob, known by its content: it does not matter who sends it, and what has changed on a disk is found out
before it is used or served.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import trio

from neurogrid.errors import (
    CapacityError,
    NeuroGridError,
    PeerRefusedError,
    RemoteProtocolError,
    ResponseTimeout,
    TransportError,
)
from neurogrid.p2p.transfer import (
    BlobCache,
    BlobInfo,
    BlobSource,
    BlobUnavailableError,
    BytesSource,
    MemoryStore,
    StoredBlob,
    TransferPolicy,
    Transfers,
)
from neurogrid.p2p.transfer.passed_over import PassedOver
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.data.manifest import MAX_MANIFEST_BYTES, Manifest, SliceInfo
from neurogrid.training.data.own_slices import OwnSlices
from neurogrid.training.data.slice_file import SliceFile
from neurogrid.training.data.slices import slice_path
from neurogrid.training.data.web import WebDirectory

__all__ = ["Provider", "Providers", "SliceCache", "SliceStore", "fetch_manifest"]

logger = logging.getLogger(__name__)

_MIB: Final = 1024 * 1024
# Of those that may have a slice, and are not the last resort: seconds until one says that it has it, besides those in
# which it hashes so many bytes; and the pace below which another one is asked.
_ANSWER: Final = 10.0
_HASHED_PER_SECOND: Final = 32 * _MIB
_SENT_PER_SECOND: Final = _MIB // 16
# Seconds until those that were busy are asked again.
_BUSY_PAUSE: Final = 0.25


class Provider(Protocol):
    """Provider of some blobs, which it gives to peers."""

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """See `TransferPolicy.provide`."""


class Providers(TransferPolicy):
    """A policy that takes nothing, and gives what any of its providers has.

    Attributes:
        providers: in the order in which they are asked; more may be added at any time.
    """

    def __init__(self, *providers: Provider) -> None:
        self.providers: list[Provider] = list(providers)

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """See `TransferPolicy.provide`."""
        for provider in self.providers:
            if (source := await provider.provide(peer_id, blob_id)) is not None:
                return source
        return None


class SliceStore:
    """The slices of a data directory, and its manifest, for peers that ask.

    Attributes:
        manifest_info: the manifest as a blob.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._slices = {info.blob_id: info for info in (*manifest.slices, *manifest.held_out)}
        self._manifest = BytesSource(manifest.encode())
        self.manifest_info = BlobInfo.of_digests(self._manifest.digests(), self._manifest.num_bytes)
        self._known: dict[bytes, SliceFile] = {}

    def missing(self) -> tuple[SliceInfo, ...]:
        """Slices that are not in the directory, or have another length there."""
        return tuple(info for info in self._slices.values() if not self._is_here(info))

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """See `TransferPolicy.provide`. A file that is not what its name says is not given."""
        if blob_id == self.manifest_info.blob_id:
            return self._manifest
        info = self._slices.get(blob_id)
        if info is None:
            return None
        return await trio.to_thread.run_sync(self._open, info)

    def _is_here(self, info: SliceInfo) -> bool:
        try:
            return slice_path(self._directory, info).stat().st_size == info.num_bytes
        except OSError:
            return False

    def _open(self, info: SliceInfo) -> BlobSource | None:
        """Open a slice, in a thread; hash its file where it is not the one that was hashed before."""
        path = slice_path(self._directory, info)
        try:
            known = self._known.get(info.blob_id)
            if known is None or known.has_changed():
                known = self._known[info.blob_id] = SliceFile(path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            logger.warning("slice %s cannot be read: %s", path, exc.strerror)
            return None
        if known.info.blob_id != info.blob_id:
            logger.warning("%s is not what its name says: it is not served", path)
            return None
        return known


class SliceCache:
    """A member's slices on disk: fetched when they are needed, kept within a limit, and served to others.

    Args:
        transfers: of the host.
        directory: of its own; made if need be. What is there from an earlier time is used.
        max_bytes: what all slices in it may take. Those that are needed at one time have to fit.
        web: a server that has them, which is asked before any peer.
        own: slices that lie on this machine anyway, and are not fetched; None for none.

    Attributes:
        passed_over: peers that were asked in vain, and are asked after all others, or if they lied, not at all.

    Raises:
        ConfigurationError: the directory cannot be used.
    """

    def __init__(
        self,
        transfers: Transfers,
        directory: Path,
        max_bytes: int,
        *,
        web: WebDirectory | None = None,
        own: OwnSlices | None = None,
    ) -> None:
        self._transfers, self._web = transfers, web
        self._own = own or OwnSlices()
        self._cache = BlobCache(directory, max_bytes=max_bytes)
        self.passed_over = PassedOver()
        self._verified: dict[bytes, BlobInfo] = {}
        self._fetching: dict[bytes, tuple[trio.Lock, int]] = {}
        self._needed: frozenset[bytes] = frozenset()

    async def fetch(self, info: SliceInfo, peers: Sequence[str], timeout: float) -> Path:
        """The file of a slice, verified; it stays until `need_only` does not name it any more, or its owner removes it.

        A file that is here is read and hashed; if it is damaged, it is fetched again.

        Args:
            peers: ids of connected peers that may have it, asked one after the other, the last resort last; each has
                its share of the time, and all but the last resort no more than so many bytes take.
            timeout: seconds for all of them.

        Raises:
            BlobUnavailableError: none of them gave it in time; `failures` says why, by peer id.
            CapacityError: it does not fit beside those that are needed, or is longer than the manifest says.
        """
        with trio.CancelScope() as scope, self._alone(info.blob_id) as lock:
            scope.deadline = started = trio.current_time() + timeout
            async with lock:
                scope.deadline = float("inf")
                if (path := await self._own.find(info.blob_id)) is not None:
                    return path
                stored = await trio.to_thread.run_sync(self._load, info.blob_id)
                if stored is None:
                    blob = await self._fetch(info, peers, started)
                    await trio.to_thread.run_sync(self._store, info, blob)
                return self._pinned(info)
        raise ResponseTimeout(
            f"slice {_short(info.blob_id)} is still being fetched after {timeout:g} s"
        )

    def need_only(self, blob_ids: Collection[bytes]) -> None:
        """Keep these slices from now on: others that were fetched may go when the room is needed.

        So may others that are fetched from now on, where one of these needs their room.
        """
        self._needed = frozenset(blob_ids)
        self._release_others()

    def _release_others(self) -> bool:
        """Let go of slices that are not needed now; whether there were any."""
        others = self._cache.in_use - self._needed
        for blob_id in others:
            self._cache.release(blob_id)
        return bool(others)

    def holds(self, blob_id: bytes) -> bool:
        """Whether there is a file for a slice; what is in it, `fetch` and `provide` find out."""
        return self._own.holds(blob_id) or blob_id in self._cache

    @property
    def num_bytes(self) -> int:
        """Bytes that all slices take."""
        return self._cache.num_bytes

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """See `TransferPolicy.provide`."""
        if blob_id not in self._cache:
            return None
        known = self._verified.get(blob_id)
        if known is not None:
            return self._cache.source(known)
        return await trio.to_thread.run_sync(self._load, blob_id)

    def close(self) -> None:
        """No slice is needed any more."""
        self._cache.close()

    @contextmanager
    def _alone(self, blob_id: bytes) -> Iterator[trio.Lock]:
        """The lock of whoever fetches a slice: a second one waits, and finds it here."""
        lock, num = self._fetching.get(blob_id, (trio.Lock(), 0))
        self._fetching[blob_id] = lock, num + 1
        try:
            yield lock
        finally:
            lock, num = self._fetching.pop(blob_id)
            if num > 1:
                self._fetching[blob_id] = lock, num - 1

    async def _fetch(self, info: SliceInfo, peers: Sequence[str], deadline: float) -> StoredBlob:
        blob = await self._fetch_from_web(info, peers, deadline)
        if blob is None:
            blob = await _fetch_from_any(
                self._transfers,
                info.blob_id,
                self._in_order(peers),
                deadline,
                max_bytes=info.num_bytes,
                last_resort=peers[-1] if peers else "",
                passed_over=self.passed_over,
            )
        if blob.num_bytes != info.num_bytes:
            raise CapacityError(
                f"slice {_short(info.blob_id)} has {blob.num_bytes} B, and {info.num_bytes} in the manifest",
                needed=blob.num_bytes,
                available=info.num_bytes,
            )
        return blob

    def _in_order(self, peers: Sequence[str]) -> list[str]:
        """Order the peers to ask: others asked in vain come after the last resort; others that lied are left out."""
        *others, last = peers or ("",)
        first = [each for each in others if each not in self.passed_over]
        rest = [
            each
            for each in others
            if each in self.passed_over and not self.passed_over.has_lied(each)
        ]
        return [*first, last, *rest] if peers else []

    async def _fetch_from_web(
        self, info: SliceInfo, peers: Sequence[str], deadline: float
    ) -> StoredBlob | None:
        """A slice from the web server; None where there is none, or peers are to be asked as it does not give it."""
        if self._web is None:
            return None
        # As with peers: a server that is silent has its share of the time, and no more.
        share = max(0.0, deadline - trio.current_time()) / (1 + len(peers))
        try:
            with trio.fail_after(share):
                return await self._web.fetch(info)
        except trio.TooSlowError:
            error: NeuroGridError = ResponseTimeout(
                f"{self._web.url} did not give all of it within {share:.1f} s"
            )
        except (RemoteProtocolError, TransportError) as exc:
            error = exc
        logger.warning("no slice %s from the web server: %s", _short(info.blob_id), error)
        if peers:
            return None
        raise BlobUnavailableError(
            f"slice {_short(info.blob_id)} is not to be had: {error}",
            failures={self._web.url: error},
        )

    def _load(self, blob_id: bytes) -> StoredBlob | None:
        stored = self._cache.load(blob_id)
        if stored is None:
            self._verified.pop(blob_id, None)
        else:
            self._verified[blob_id] = stored.info
        return stored

    def _store(self, info: SliceInfo, blob: StoredBlob) -> None:
        is_kept = self._cache.store(blob)
        # What was fetched ahead, meanwhile, gives way to what is needed now.
        if not is_kept and info.blob_id in self._needed and self._release_others():
            is_kept = self._cache.store(blob)
        if not is_kept:
            raise CapacityError(
                f"slice {_short(info.blob_id)} cannot be kept in {self._cache.path}: all slices may have "
                f"{self._cache.max_bytes:,} B there, and those that are needed are not dropped",
                needed=info.num_bytes,
                available=self._cache.max_bytes,
            )
        self._verified[info.blob_id] = blob.info

    def _pinned(self, info: SliceInfo) -> Path:
        self._cache.use(info.blob_id)
        path = self._cache.file(info.blob_id)
        if path is None or info.blob_id not in self._cache.in_use:
            # Another process that shares the directory needed the room, in this very moment.
            raise CapacityError(
                f"slice {_short(info.blob_id)} went before it was used: give {self._cache.path} more room",
                needed=info.num_bytes,
                available=self._cache.max_bytes,
            )
        return path


async def fetch_manifest(
    transfers: Transfers, blob_id: bytes, peers: Sequence[str], timeout: float
) -> Manifest:
    """The manifest with this id, from the first of the peers that has it.

    Args:
        timeout: seconds for all of them.

    Raises:
        BlobUnavailableError: none of them gave it in time.
        RemoteProtocolError: it contradicts itself.
    """
    deadline = trio.current_time() + timeout
    blob = await _fetch_from_any(transfers, blob_id, peers, deadline, max_bytes=MAX_MANIFEST_BYTES)
    return await trio.to_thread.run_sync(Manifest.decode, bytes(blob.data))


def _is_busy(error: NeuroGridError) -> bool:
    return isinstance(error, PeerRefusedError) and error.code == ErrorCode.BUSY


async def _fetch_from_any(
    transfers: Transfers,
    blob_id: bytes,
    peers: Sequence[str],
    deadline: float,
    *,
    max_bytes: int,
    last_resort: str = "",
    passed_over: PassedOver | None = None,
) -> StoredBlob:
    """A blob from the first that gives all of it, and what one fails to send from the next.

    A peer that is silent has its share of the time, and no more; one that is not the last resort has to answer, and to
    send at a pace, too. Who fails in that is passed over for a while. Where nobody else gave it, those that were busy
    are asked again: others have asked them for other blobs when one was lost.
    """
    failures: dict[str, NeuroGridError] = {}
    store = MemoryStore()
    asked = peers
    while True:
        for number, peer_id in enumerate(asked):
            share = max(0.0, deadline - trio.current_time()) / (len(asked) - number)
            answer = share
            if passed_over is not None and peer_id != last_resort:
                share = min(share, _ANSWER + max_bytes / _SENT_PER_SECOND)
                answer = min(share, _ANSWER + max_bytes / _HASHED_PER_SECOND)
            try:
                with trio.fail_after(share):
                    fetched = await transfers.fetch_blob(
                        peer_id, blob_id, store=store, max_bytes=max_bytes, offer_timeout=answer
                    )
                return fetched.blob
            except trio.TooSlowError:
                failures[peer_id] = ResponseTimeout(
                    f"{peer_id} did not give all of it within {share:.1f} s"
                )
            except (PeerRefusedError, RemoteProtocolError, TransportError) as exc:
                failures[peer_id] = exc
            error = failures[peer_id]
            if passed_over is not None and peer_id != last_resort:
                passed_over.blame(peer_id, error)
            # One of several that has it no more, or one that is busy, is nothing that anybody need look into.
            is_gone = isinstance(error, PeerRefusedError) and error.code == ErrorCode.BLOB_UNKNOWN
            is_usual = _is_busy(error) or (is_gone and peer_id != last_resort)
            level = logging.INFO if is_usual else logging.WARNING
            logger.log(level, "%s gave no blob %s: %s", peer_id, _short(blob_id), error)
        asked = [peer_id for peer_id in asked if _is_busy(failures[peer_id])]
        if not asked or deadline - trio.current_time() <= _BUSY_PAUSE:
            break
        await trio.sleep(_BUSY_PAUSE)
    reasons = "; ".join(f"{peer_id}: {exc}" for peer_id, exc in failures.items())
    raise BlobUnavailableError(
        f"none of {len(peers)} peers gave blob {_short(blob_id)}: {reasons or 'nobody was named'}",
        failures=failures,
    )


def _short(blob_id: bytes) -> str:
    return blob_id.hex()[:12]
