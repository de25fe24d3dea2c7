"""The data of a run, where its leader has them: in a directory, behind a web server, or with data nodes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

from neurogrid.errors import ConfigurationError, NeuroGridError
from neurogrid.p2p.transfer import BlobSource, Transfers
from neurogrid.training.data.blobs import SliceCache, SliceStore
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.data.slices import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    read_manifest,
    slice_path,
)
from neurogrid.training.data.web import WebDirectory, is_web_address
from neurogrid.training.leading.model_numbers import model_numbers
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import RunFile

__all__ = ["LeaderSlices", "RunData", "check_left_over", "data_of"]

logger = logging.getLogger(__name__)

# Seconds in which a slice has to come that a member waits for, who asks others afterwards.
_RELAY_TIMEOUT: Final = 120.0
# Slices that are fetched for members at a time: each is in memory.
_MAX_FETCHES: Final = 4


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run.

    Attributes:
        path: the data directory; of data behind a web server, one with the manifest and the tokenizer alone.
        manifest: what they are.
        web: the server that has the slices; None where there is none.
    """

    path: Path
    manifest: Manifest
    web: WebDirectory | None = None


async def data_of(
    run: RunFile, directory: RunDirectory, model: Path, progress: LeaderProgress
) -> RunData:
    """The data of a run, prepared now where they are not yet.

    Args:
        model: directory or config of the model, whose tokenizer is taken where none is named.

    Raises:
        ConfigurationError: there are none, or they cannot be read.
    """
    sources, out = [run.place(each) for each in run.data.places], directory.data
    if is_web_address(run.data.path):
        web = WebDirectory(run.data.path)
        if not (out / MANIFEST_NAME).is_file():
            progress.say(f"data come from {web.url}")
            directory.write_data_asked(_asked(run, directory, model))
            await _keep_manifest(web, out)
        return RunData(out, read_manifest(out), web)
    if not run.data.mixture and (sources[0] / MANIFEST_NAME).is_file():
        return RunData(sources[0], read_manifest(sources[0]))
    if not (out / MANIFEST_NAME).is_file():
        progress.say(f"preparing {', '.join(map(str, sources))}")
        directory.write_data_asked(_asked(run, directory, model))
        await trio.to_thread.run_sync(_prepare, run, sources, out, model, progress)
    return RunData(out, read_manifest(out))


def check_left_over(run: RunFile, directory: RunDirectory, model: Path) -> None:
    """Refuse data of a run that did not begin, where this one would have others.

    Raises:
        ConfigurationError: there are such.
    """
    asked = directory.read_data_asked()
    if (
        asked
        and asked != _asked(run, directory, model)
        and (directory.data / MANIFEST_NAME).is_file()
    ):
        raise ConfigurationError(
            f"{directory.data} has data of a run that did not begin, and [data], seed or tokenizer are others now, or "
            "the file that they were prepared from: remove that directory, and they are prepared anew"
        )


def _asked(run: RunFile, directory: RunDirectory, model: Path) -> str:
    """A digest of all that the data of a run depend on, as far as that is known without reading them. Blocks."""
    tokenizer = _tokenizer_of(run, model)
    is_web = is_web_address(run.data.path)
    sources = [] if is_web else [run.place(each).resolve() for each in run.data.places]
    files = [(str(path), *_version_of(path)) for path in sources]
    # Without a directory the digest is what it was in older versions.
    own = directory.path.resolve()
    folders = {str(path): found for path in sources if (found := _versions_under(path, own))}
    told = {
        **({"folders": folders} if folders else {}),
        **asdict(run.data),
        "path": run.data.path if is_web else "",
        "mixture": [part.weight for part in run.data.mixture],
        "sources": files,
        "tokenizer": str(tokenizer.resolve()) if tokenizer is not None else "",
        "seed": run.seed,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _version_of(path: Path) -> tuple[int, ...]:
    """Size and modification time in ns of a file, which change with it; empty for what is no file."""
    if not path.is_file():
        return ()
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _versions_under(folder: Path, own: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files of a directory, without those of the run itself, which may lie in it."""
    found = []
    for where, names, files in os.walk(folder):
        names[:] = [n for n in names if not n.startswith(".") and Path(where, n) != own]
        for path in (Path(where, name) for name in files if not name.startswith(".")):
            # A link that leads nowhere, or a file that has gone: it is not read either.
            with suppress(OSError):
                size, changed = _version_of(path) or (0, 0)
                found.append((path.relative_to(folder).as_posix(), size, changed))
    return sorted(found)


def _tokenizer_of(run: RunFile, model: Path) -> Path | None:
    """The directory of the tokenizer that is named, or of the model's own; None where one is trained."""
    if run.data.tokenizer:
        return run.place(run.data.tokenizer)
    return model if model.is_dir() and (model / "tokenizer.json").is_file() else None


def _prepare(
    run: RunFile, sources: Sequence[Path], out: Path, model: Path, progress: LeaderProgress
) -> None:
    """Make the data directory of a run, in a thread."""
    from neurogrid.training.data.preparing import find, prepare

    told = run.data
    tokenizer = _tokenizer_of(run, model)
    vocab_size = told.vocab_size
    if tokenizer is None and all(
        find(each, has_ids=told.token_bytes > 0).has_ids for each in sources
    ):
        # Nothing is trained on them: the model's own is what they have to be below.
        vocab_size = model_numbers(model, run.model.kind).vocab_size or vocab_size
    prepare(
        sources,
        out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        sequence_length=told.sequence_length,
        slice_samples=told.slice_samples,
        held_out=told.held_out,
        seed=run.seed,
        token_bytes=told.token_bytes,
        weights=[part.weight for part in told.mixture],
        repeat=told.repeat,
        say=partial(trio.from_thread.run_sync, progress.say),
    )


async def _keep_manifest(web: WebDirectory, out: Path) -> None:
    """Keep manifest and tokenizer, so that the run goes on with the same whatever the server has by then."""
    manifest = await web.manifest()
    out.mkdir(parents=True, exist_ok=True)
    await web.tokenizer(out / TOKENIZER_NAME, manifest.tokenizer)
    partial = out / f".{MANIFEST_NAME}.partial"
    partial.write_bytes(manifest.encode())
    os.replace(partial, out / MANIFEST_NAME)


class LeaderSlices:
    """Slices for the leader itself, to evaluate with, and for members that ask it.

    What its data directory lacks comes from the web server, data nodes, or members that have it; it is kept for a
    while.

    Args:
        data: of the run.
        store: the data directory's slices.
        transfers: of the protocol of runs.
        directory: for what is fetched; made if need be.
        holders: gives the peer ids of those that may have a slice, by its id.
    """

    def __init__(
        self,
        data: RunData,
        store: SliceStore,
        transfers: Transfers,
        directory: Path,
        holders: Callable[[bytes], Sequence[str]],
    ) -> None:
        self._directory, self._store, self._holders = data.path, store, holders
        manifest = data.manifest
        self._infos = {info.blob_id: info for info in (*manifest.slices, *manifest.held_out)}
        self._held_out = frozenset(info.blob_id for info in manifest.held_out)
        self._own = self._held_out
        directory.mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(directory).free // 2
        self._cache = SliceCache(transfers, directory, room, web=data.web)
        self._limiter = trio.CapacityLimiter(_MAX_FETCHES)

    def need_only(self, infos: Iterable[SliceInfo]) -> None:
        """Keep these slices from now on, and those that are held out: others may go when the room is needed."""
        self._own = self._held_out.union(info.blob_id for info in infos)
        self._cache.need_only(self._own)

    async def fetch(self, info: SliceInfo, timeout: float) -> Path:
        """The file of a slice, verified; it stays until `need_only` does not name it any more.

        Args:
            timeout: seconds.

        Raises:
            BlobUnavailableError: nobody gave it in time.
            CapacityError: there is no room for it.
        """
        if await self._store.provide("", info.blob_id) is not None:
            return slice_path(self._directory, info)
        return await self._cache.fetch(info, self._holders(info.blob_id), timeout)

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """See `TransferPolicy.provide`. What the directory lacks is fetched first."""
        if (source := await self._store.provide(peer_id, blob_id)) is not None:
            return source
        info = self._infos.get(blob_id)
        if info is None:
            return None
        if not self._cache.holds(blob_id):
            async with self._limiter:
                try:
                    others = [each for each in self._holders(blob_id) if each != peer_id]
                    await self._cache.fetch(info, others, _RELAY_TIMEOUT)
                except NeuroGridError as exc:
                    logger.info("a slice for %s is not to be had: %s", peer_id, exc)
                    return None
                finally:
                    self._cache.need_only(self._own)
        return await self._cache.provide(peer_id, blob_id)
