"""A data directory on a web server: its manifest, its tokenizer, and slices, which are verified by their ids.

What a server broke off goes on where it stopped, where the server gives parts of files.
"""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2
import trio

from neurogrid.errors import (
    ConfigurationError,
    NeuroGridError,
    PeerUnreachableError,
    RemoteProtocolError,
    ResponseTimeout,
)
from neurogrid.p2p.transfer import BlobInfo, StoredBlob
from neurogrid.p2p.wire import CHUNK_BYTES, BlobHasher
from neurogrid.training.data.manifest import MAX_MANIFEST_BYTES, Manifest, SliceInfo
from neurogrid.training.data.slices import MANIFEST_NAME, TOKENIZER_NAME, slice_path

__all__ = ["WebDirectory", "is_web_address"]

# Seconds for a connection, and between two pieces of an answer.
_SILENCE: Final = 30.0
# The pace below which a server is as good as silent.
_SENT_PER_SECOND: Final = 64 * 1024
# Seconds before each request that follows one that failed.
_DELAYS: Final = (0.5, 2.0, 8.0)
# Answers that another try may mend.
_PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})
_OK: Final = 200
_PART: Final = 206
_NOT_FOUND: Final = 404
_NO_SUCH_PART: Final = 416
_MAX_REDIRECTS: Final = 5
_MAX_TOKENIZER_BYTES: Final = 64 * 1024 * 1024
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")


def is_web_address(path: str) -> bool:
    """Whether the `path` of [data] names a web server."""
    return path.startswith(("http://", "https://"))


class WebDirectory:
    """A data directory, as `neurogrid train prepare` wrote it, behind a web server.

    Args:
        url: of the directory, http or https.

    Raises:
        ConfigurationError: that is no address of a directory.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port
        except ValueError:
            is_url = False
        if not is_url or parts.query or parts.fragment:
            raise ConfigurationError(
                f'[data] path = "{url[:200]}" is no address of a directory, as https://host/data/ is'
            )
        if parts.username is not None or parts.password is not None:
            # It stands in the run file, which all members are given.
            raise ConfigurationError(
                "[data] path has a user's name or password in it, which all members would be told: serve the data "
                "without, or by a data node (neurogrid train data)"
            )
        self.url = url.rstrip("/") + "/"

    async def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            ConfigurationError: there is none, or it contradicts itself.
        """
        try:
            got = await self._get_in_time(MANIFEST_NAME, MAX_MANIFEST_BYTES)
            return await trio.to_thread.run_sync(Manifest.decode, bytes(got.data))
        except NeuroGridError as exc:
            raise ConfigurationError(
                f"{self.url} is no data directory that can be read: {exc}"
            ) from exc

    async def tokenizer(self, out: Path, name: str) -> None:
        """Put the tokenizer into `out`, if there is one.

        Args:
            out: a directory, which is made.
            name: as the manifest has it.

        Raises:
            ConfigurationError: it is another one than the manifest says, or cannot be fetched.
        """
        files: dict[str, bytes] = {}
        for file in _TOKENIZER_FILES:
            try:
                got = await self._get_in_time(f"{TOKENIZER_NAME}/{file}", _MAX_TOKENIZER_BYTES)
                files[file] = bytes(got.data)
            except _NotFoundError:
                continue
            except NeuroGridError as exc:
                raise ConfigurationError(
                    f"the tokenizer of {self.url} cannot be fetched: {exc}"
                ) from exc
        if "tokenizer.json" not in files:
            return
        found = f"sha256:{hashlib.sha256(files['tokenizer.json']).hexdigest()}"
        if name and found != name:
            raise ConfigurationError(
                f"{self.url}{TOKENIZER_NAME}/tokenizer.json is another tokenizer than the manifest says"
            )
        out.mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            partial = out / f".{file}.partial"
            partial.write_bytes(data)
            os.replace(partial, out / file)

    async def fetch(self, info: SliceInfo) -> StoredBlob:
        """A slice, verified, in memory.

        Raises:
            TransportError: the server cannot be reached, or does not give it.
            RemoteProtocolError: what came is not the slice.
        """
        name = slice_path(Path(), info).as_posix()
        got = await self._get(name, info.num_bytes, is_exact=True)
        found = await trio.to_thread.run_sync(_info_of, got.data)
        if found.blob_id != info.blob_id and got.num_parts > 1:
            # Its parts may be of two files, one in the place of the other: it is asked for anew.
            got = await self._get(name, info.num_bytes, is_exact=True)
            found = await trio.to_thread.run_sync(_info_of, got.data)
        if found.blob_id != info.blob_id:
            raise RemoteProtocolError(f"{self.url}{name} is not what its name says")
        return StoredBlob(found, memoryview(got.data))

    async def _get_in_time(self, name: str, max_bytes: int) -> _Got:
        """Get a file as `_get` does, within a time: a server may send a little again and again, without end."""
        seconds = _SILENCE + max_bytes / _SENT_PER_SECOND
        try:
            with trio.fail_after(seconds):
                return await self._get(name, max_bytes)
        except trio.TooSlowError as exc:
            raise ResponseTimeout(
                f"{self.url}{name}: the server did not give all of it within {seconds:.0f} s"
            ) from exc

    async def _get(self, name: str, max_bytes: int, *, is_exact: bool = False) -> _Got:
        """A file below the directory; asked for again where that may help, for what is missing of it.

        Args:
            is_exact: it has so many bytes: fewer are not all of it, though the server may not have said how many come.
        """
        got = _Got()
        for delay in (*_DELAYS, None):
            try:
                await self._ask(name, max_bytes, got)
                if is_exact and len(got.data) < max_bytes:
                    raise _PassingError(
                        f"{self.url}{name}: the server gave {len(got.data):,} B of {max_bytes:,}"
                    )
                return got
            except httpx2.HTTPError as exc:
                error = PeerUnreachableError(f"{self.url}{name}: {exc or type(exc).__name__}")
            except _PassingError as exc:
                error = exc
            if delay is None:
                break
            await trio.sleep(delay)
        raise error

    async def _ask(self, name: str, max_bytes: int, got: _Got) -> None:
        is_over = threading.Event()
        run_sync: Any = trio.to_thread.run_sync  # its stubs lack `abandon_on_cancel`
        try:
            await run_sync(
                _download, f"{self.url}{name}", max_bytes, got, is_over, abandon_on_cancel=True
            )
        finally:
            is_over.set()


@dataclass(slots=True)
class _Got:
    """Bytes of a file that are here.

    Attributes:
        data: from its beginning on.
        num_parts: answers that it is from.
    """

    data: bytearray = field(default_factory=bytearray)
    num_parts: int = 0

    def clear(self) -> None:
        """Begin anew."""
        del self.data[:]
        self.num_parts = 0


def _download(url: str, max_bytes: int, got: _Got, is_over: threading.Event) -> None:
    """Download what is missing of a file, in a thread, until no task waits for it any more."""
    start = len(got.data)
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with (
        httpx2.Client(
            follow_redirects=True, max_redirects=_MAX_REDIRECTS, timeout=_SILENCE
        ) as client,
        client.stream("GET", url, headers=headers) as response,
    ):
        status = response.status_code
        is_rest = status == _PART and response.headers.get("Content-Range", "").startswith(
            f"bytes {start}-"
        )
        if not is_rest:
            got.clear()
        if status == _NO_SUCH_PART or (status == _PART and not is_rest):
            raise _PassingError(f"{url}: the server does not give the part that was asked for")
        if status == _NOT_FOUND:
            raise _NotFoundError(f"{url} is not there (404)")
        if status in _PASSING:
            raise _PassingError(f"{url}: the server answers with status {status}")
        if status not in (_OK, _PART):
            raise PeerUnreachableError(f"{url}: the server answers with status {status}")
        got.num_parts += 1
        for piece in response.iter_raw():
            got.data += piece
            if len(got.data) > max_bytes:
                raise RemoteProtocolError(f"{url} is longer than {max_bytes:,} B")
            if is_over.is_set():
                break


class _NotFoundError(PeerUnreachableError):
    """The server has no such file."""


class _PassingError(PeerUnreachableError):
    """The server gives nothing now."""


def _info_of(data: bytearray) -> BlobInfo:
    hasher = BlobHasher()
    view = memoryview(data)
    for start in range(0, len(data), CHUNK_BYTES):
        hasher.update(view[start : start + CHUNK_BYTES])
    return BlobInfo.of_digests(hasher.digests(), len(data))
