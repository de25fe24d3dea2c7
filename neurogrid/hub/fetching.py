"""The process that fetches a model into the cache: `python -m neurogrid.hub.fetching REPOSITORY REVISION [QUANT]`.

It writes one JSON object a line to stdout, each with its `event` (`Event`), and ends when its standard input does: also
when whoever started it was killed. What has come until then stays.

Everything that can be known before the first byte of a weight is looked at first: access, files, room on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Final, TypeVar

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile

from neurogrid import __version__
from neurogrid.errors import ConfigurationError
from neurogrid.hub.blobs import BlobFetch, is_digest, partial_of
from neurogrid.hub.cache import cache_directory, read_index
from neurogrid.hub.failures import telling_errors
from neurogrid.hub.names import ModelName
from neurogrid.hub.needed import INDEX_FILE, MAX_INDEX_BYTES, model_path, needed_files, shards
from neurogrid.planner import format_bytes

__all__ = ["Event", "main"]

# Files at a time: a hub gives each connection a part of what a line takes.
NUM_CONNECTIONS: Final = 4
# Between two words of how much has come. Seconds.
TELL_INTERVAL: Final = 0.2
SILENT_INTERVAL: Final = 1.0
# Seconds that a hub has to answer a question, and until it is asked again.
ANSWER_TIMEOUT: Final = 30.0
ASK_DELAYS: Final = (0.5, 1.0, 2.0)
# A repository of more is no model's.
MAX_FILES: Final = 20_000
# Beside what comes: names, listing, and what others write meanwhile.
SPARE_BYTES: Final = 16 * 1024 * 1024
# A name in git.
_GIT_NAME: Final = re.compile(r"[0-9a-f]{40}")
T = TypeVar("T")


class Event:
    """Values of the field `event` of what is told on stdout.

    `found` has `total` and `there` (bytes), `num_files` and `folder`; `came` has `there`; `silent` has
    `reason` and `seconds`, until the hub is asked again; `waiting` has nothing;
    `ready` has `path`; `failed` has `text`, a sentence for whoever typed the name. After one of the last two it ends.
    """

    FOUND: Final = "found"
    CAME: Final = "came"
    SILENT: Final = "silent"
    WAITING: Final = "waiting"
    READY: Final = "ready"
    FAILED: Final = "failed"


def main(argv: list[str]) -> int:
    """Fetch the model; returns the exit status."""
    # Ctrl-C is for whoever started this, and ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    name = ModelName(*argv)
    try:
        with telling_errors(name):
            folder = _Fetch(name).run()
    except ConfigurationError as exc:
        _tell(Event.FAILED, text=" ".join(str(exc).split()))
        return 1
    _tell(Event.READY, path=str(folder))
    return 0


def _end_with_stdin() -> None:
    while os.read(0, 4096):  # not by sys.stdin, which would be locked when this process ends
        pass
    os._exit(1)


_telling = threading.Lock()


def _tell(event: str, **fields: object) -> None:
    with _telling:
        print(json.dumps({"event": event, **fields}), flush=True)


class _Fetch:
    """One model on its way into the cache."""

    def __init__(self, name: ModelName) -> None:
        self._name = name
        self._api = HfApi(library_name="neurogrid", library_version=__version__)
        self._folder = cache_directory() / f"models--{name.repository.replace('/', '--')}"
        self._lock = threading.Lock()
        self._there = 0
        self._silent_at = 0.0
        self._is_over = threading.Event()

    def run(self) -> Path:
        """Have all of it there; returns the directory, or the file in GGUF.

        Raises:
            ConfigurationError: it cannot be had, or not whole.
        """
        commit, listing = self._ask()
        found = {file.path: file for file in listing}
        paths = set(found)
        # All that needs no byte of theirs to be known is known now.
        needed = set(needed_files(self._name, paths))
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if INDEX_FILE in needed:
                needed |= set(self._shards(commit, found))
            snapshot = self._folder / "snapshots" / commit
            files = [found[path] for path in sorted(needed)]
            missing = [file for file in files if not _is_there(snapshot / file.path, file.size)]
            for path in (snapshot / file.path for file in missing):
                self._remove(path)  # of another size than it should be
            left = {file.path: self._num_left(file) for file in missing}
            self._refuse_without_room(sum(left.values()))
            self._tell_found(sum(file.size for file in files), left)
            large = [file for file in missing if self._is_fetched_here(file)]
            # The small ones first: they tell whether anything is given to this machine.
            small = [file for file in files if file not in large]
            self._complete(commit, small)
            self._check(snapshot, small)
            self._fetch_large(commit, large)
            self._complete(commit, large)
            self._check(snapshot, large)
            self._note_revision(commit)
        return model_path(snapshot, needed)

    def _ask(self) -> tuple[str, list[RepoFile]]:
        """The commit that the revision is, and the files that it has."""
        if not constants.ENDPOINT.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"HF_ENDPOINT is {constants.ENDPOINT!r}, which is no address: it begins with https://"
            )
        repository, revision = self._name.repository, self._name.revision

        def ask() -> tuple[str, list[RepoFile]]:
            info = self._api.model_info(repository, revision=revision, timeout=ANSWER_TIMEOUT)
            commit = str(info.sha)
            if not _GIT_NAME.fullmatch(commit):
                raise ValueError("no commit")
            listing = []
            for entry in self._api.list_repo_tree(repository, recursive=True, revision=commit):
                if isinstance(entry, RepoFile):
                    if type(entry.size) is not int or entry.size < 0:
                        raise ValueError("a file without a size")
                    listing.append(entry)
                if len(listing) > MAX_FILES:
                    raise ConfigurationError(
                        f"{repository} has more than {MAX_FILES:,} files: it is no model that can be served"
                    )
            return commit, listing

        try:
            return _patiently(ask)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            if isinstance(exc, HfHubHTTPError):
                raise
            raise ConfigurationError(
                f"{constants.ENDPOINT} does not answer as a hub of models does: is HF_ENDPOINT right?"
            ) from exc

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a lock within the block, so that no other process of ours fetches the same model."""
        file = cache_directory() / ".locks" / self._folder.name / "neurogrid.lock"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as stream:
            try:
                flock(stream, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                _tell(Event.WAITING)
                flock(stream, LOCK_EX)
            yield

    def _shards(self, commit: str, found: dict[str, RepoFile]) -> list[str]:
        """The files that the index of the weights names; fetches the index."""
        if found[INDEX_FILE].size > MAX_INDEX_BYTES:
            raise ConfigurationError(
                f"{self._name}: its {INDEX_FILE} is longer than {MAX_INDEX_BYTES} bytes"
            )
        file = self._api.hf_hub_download(self._name.repository, INDEX_FILE, revision=commit)
        return shards(str(self._name), read_index(str(self._name), Path(file)), found)

    def _num_left(self, file: RepoFile) -> int:
        """Bytes of a file that are neither in the cache, under whatever name, nor kept of another time."""
        if not self._is_fetched_here(file):
            return file.size
        blob = self._blobs / _digest(file)
        if _is_there(blob, file.size):
            return 0
        partial = partial_of(blob)
        return file.size - (partial.stat().st_size if partial.exists() else 0)

    def _refuse_without_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if num_bytes and num_bytes + SPARE_BYTES > free:
            raise ConfigurationError(
                f"{self._name} needs {format_bytes(num_bytes)} more in {cache_directory()}, where {format_bytes(free)} "
                "are free: make room, or set HF_HOME to a directory on another disk"
            )

    def _tell_found(self, total: int, left: dict[str, int]) -> None:
        self._there = total - sum(left.values())
        folder = str(cache_directory())
        _tell(Event.FOUND, total=total, there=self._there, num_files=len(left), folder=folder)

    def _is_fetched_here(self, file: RepoFile) -> bool:
        """Whether it is one that can be resumed and checked as it comes; the library fetches others."""
        return file.lfs is not None and is_digest(file.lfs.sha256)

    def _complete(self, commit: str, files: list[RepoFile]) -> None:
        """Have these files in the snapshot: what is among the blobs is linked, the library fetches others."""
        if not files:
            return
        snapshot_download(
            self._name.repository,
            revision=commit,
            allow_patterns=[file.path for file in files],
            max_workers=NUM_CONNECTIONS,
            library_name="neurogrid",
            library_version=__version__,
        )

    @property
    def _blobs(self) -> Path:
        return self._folder / "blobs"

    def _fetch_large(self, commit: str, files: list[RepoFile]) -> None:
        self._blobs.mkdir(parents=True, exist_ok=True)
        fetches = [
            BlobFetch(
                f"{self._name}: {file.path}",
                hf_hub_url(self._name.repository, file.path, revision=commit),
                size=file.size,
                digest=digest,
                folder=self._blobs,
                came=self._came,
                waits=self._waits,
                is_over=self._is_over,
            )
            # One blob may have several names.
            for digest, file in {_digest(file): file for file in files}.items()
            if not _is_there(self._blobs / digest, file.size)
        ]
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            running = [pool.submit(fetch.run) for fetch in fetches]
            told = self._there
            while not _are_over(running):
                wait(running, TELL_INTERVAL, FIRST_EXCEPTION)
                if (there := self._there) != told:
                    _tell(Event.CAME, there=there)
                    told = there
            self._is_over.set()
        for future in running:
            future.result()

    def _came(self, num_bytes: int) -> None:
        with self._lock:
            self._there += num_bytes

    def _waits(self, reason: str, seconds: float) -> None:
        with self._lock:
            now = time.monotonic()
            is_due = now >= self._silent_at + SILENT_INTERVAL  # the others may have nothing, too
            if is_due:
                self._silent_at = now
        if is_due:
            _tell(Event.SILENT, reason=" ".join(reason.split())[:200], seconds=seconds)

    def _check(self, snapshot: Path, files: list[RepoFile]) -> None:
        """Refuse what is not as the hub says: by its size, and what is in git by its name there, which is a digest."""
        for file in files:
            path = snapshot / file.path
            is_right = _is_there(path, file.size)
            if is_right and file.lfs is None and _GIT_NAME.fullmatch(file.blob_id):
                data = path.read_bytes()
                name = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
                is_right = name.hexdigest() == file.blob_id
            if not is_right:
                self._remove(path)
                raise ConfigurationError(
                    f"{self._name}: {file.path} came with other bytes than the hub says that it has; it was removed: "
                    "fetch it again"
                )

    def _remove(self, path: Path) -> None:
        """Remove a file of a snapshot, and the blob that it leads to; nothing elsewhere that somebody linked there."""
        blob = path.resolve()
        if blob.parent == self._blobs.resolve():
            blob.unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def _note_revision(self, commit: str) -> None:
        """Say in the cache which commit the revision is, now that all of it is there."""
        if self._name.revision == commit:
            return
        file = self._folder / "refs" / self._name.revision
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.new")
        new.write_text(commit)
        new.replace(file)


def _digest(file: RepoFile) -> str:
    assert file.lfs is not None
    return file.lfs.sha256


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _are_over(running: list[Future[None]]) -> bool:
    """Whether nothing is left to wait for: all are done, or one has failed."""
    done = [future for future in running if future.done()]
    return len(done) == len(running) or any(future.exception() for future in done)


def _patiently(ask: Callable[[], T]) -> T:
    """Return what `ask` does; call it again while the hub is out of order for a moment."""
    for delay in ASK_DELAYS:
        try:
            return ask()
        except HfHubHTTPError as exc:
            if exc.response.status_code != 429 and exc.response.status_code < 500:
                raise
        except httpx2.ConnectError:
            raise  # there is no network, or no such hub
        except httpx2.TransportError:
            pass
        time.sleep(delay)
    return ask()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
