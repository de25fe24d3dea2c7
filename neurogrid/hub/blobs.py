"""One large file of a repository, fetched into the cache: from where an interrupted process left off, and checked.

huggingface_hub begins a file anew that did not come whole. Here what came stays beside the blob, under its name and
`.incomplete`, and the rest is asked for; the digest of the whole tells whether it fits together.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # as its documents have it, and its stubs not
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from neurogrid import __version__
from neurogrid.errors import ConfigurationError

__all__ = ["BlobFetch", "is_digest", "partial_of"]

# Seconds before each request that follows one without a byte: two minutes in all, as a router takes to start anew.
RETRY_DELAYS: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
CHUNK_BYTES: Final = 1024 * 1024
# Of one answer: what stands before a hub's store gives no more than 50 GB at once.
WINDOW_BYTES: Final = 32 * 1000**3
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
# Answers that another try may mend.
_PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})
_RANGE_NOT_SATISFIABLE: Final = 416


def is_digest(text: str) -> bool:
    """Whether `text` is a SHA-256 in hexadecimal, and so can be the name of a file."""
    return _DIGEST.fullmatch(text) is not None


def partial_of(blob: Path) -> Path:
    """Return the path of the part of a blob that has come, until the blob is whole."""
    return blob.with_name(f"{blob.name}.incomplete")


class BlobFetch:
    """A file on its way into the cache, in a thread that may wait.

    Args:
        what: model and file, for errors.
        size, digest: of the whole, by the hub; bytes, and SHA-256 in hexadecimal.
        folder: of the blobs.
        came: is told how many more bytes are there than a partial file had, less than none where some are dropped.
        waits: is told why nothing came, and for how many seconds it is waited until the next request.
        is_over: set when another file failed.
    """

    def __init__(
        self,
        what: str,
        url: str,
        *,
        size: int,
        digest: str,
        folder: Path,
        came: Callable[[int], None],
        waits: Callable[[str, float], None],
        is_over: threading.Event,
    ) -> None:
        self._what = what
        self._url = url
        self._size = size
        self._digest = digest
        self._blob = folder / digest
        self._partial = partial_of(self._blob)
        self._came = came
        self._waits = waits
        self._is_over = is_over
        self._hash = hashlib.sha256()
        self._there = 0

    def run(self) -> None:
        """Have the blob there, whole.

        Raises:
            ConfigurationError: other bytes came than the hub says.
            HfHubHTTPError: the hub refuses the file.
            httpx2.TransportError: nothing comes any more.
            OSError: it cannot be written.
        """
        with self._partial.open("a+b") as file:
            is_resumed = self._take_up(file)
            self._fetch(file)
            if not self._is_right() and is_resumed and not self._is_over.is_set():
                # What was there may have been of something else.
                self._drop(file)
                self._fetch(file)
            if self._is_over.is_set():
                return
            if not self._is_right():
                self._partial.unlink()
                raise ConfigurationError(
                    f"{self._what} came with other bytes than the hub says that it has (SHA-256); it was removed: "
                    "fetch it again"
                )
            file.flush()
            os.fsync(file.fileno())
        self._partial.replace(self._blob)

    def _take_up(self, file: BinaryIO) -> bool:
        """Count what is there already; returns whether there was any."""
        file.seek(0)
        while data := file.read(CHUNK_BYTES):
            self._hash.update(data)
            self._there += len(data)
        if self._there > self._size:
            self._drop(file)
        return self._there > 0

    def _drop(self, file: BinaryIO) -> None:
        file.truncate(0)
        self._came(-self._there)
        self._hash = hashlib.sha256()
        self._there = 0

    def _is_right(self) -> bool:
        return self._there == self._size and self._hash.hexdigest() == self._digest

    def _fetch(self, file: BinaryIO) -> None:
        """Ask for the rest until all is there."""
        failures = 0
        while self._there < self._size and not self._is_over.is_set():
            before = self._there
            try:
                self._ask(file)
            except httpx2.TransportError as exc:
                error: Exception = exc
            except HfHubHTTPError as exc:
                status = exc.response.status_code
                if status == _RANGE_NOT_SATISFIABLE and self._there:
                    self._drop(file)
                elif status not in _PASSING:
                    raise
                error = exc
            else:
                continue
            failures = 1 if self._there > before else failures + 1
            if failures > len(RETRY_DELAYS):
                raise error
            seconds = RETRY_DELAYS[failures - 1]
            if failures > 1:
                self._waits(str(error), seconds)
            self._is_over.wait(seconds)

    def _ask(self, file: BinaryIO) -> None:
        """One request for what is not there yet, as far as it comes."""
        headers = {
            **build_hf_headers(library_name="neurogrid", library_version=__version__),
            "Accept-Encoding": "identity",
        }
        if self._there or self._size > WINDOW_BYTES:
            last = min(self._there + WINDOW_BYTES, self._size) - 1
            headers["Range"] = f"bytes={self._there}-{last}"
        with get_session().stream(
            "GET", self._url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
        ) as response:
            hf_raise_for_status(response)
            told = response.headers.get("Content-Range", "")
            is_rest = response.status_code == 206 and told.startswith(f"bytes {self._there}-")
            if self._there and not is_rest:
                self._drop(file)
                if response.status_code != 200:
                    raise httpx2.RemoteProtocolError("another range came than was asked for")
            before = self._there
            for data in response.iter_raw():  # as it comes: what waits for more would be lost
                if self._is_over.is_set():
                    return
                if self._there + len(data) > self._size:
                    self._drop(file)
                    raise httpx2.RemoteProtocolError("more bytes came than the hub says")
                file.write(data)
                self._hash.update(data)
                self._there += len(data)
                self._came(len(data))
            if self._there == before:
                raise httpx2.RemoteProtocolError("an answer came without a byte")
