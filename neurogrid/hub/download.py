"""A download as whoever waits for it sees it: begun, told of, and ended by being cancelled."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any, Final

import trio

from neurogrid.errors import ConfigurationError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.hub.names import ModelName
from neurogrid.model import HUB_OFFLINE_BEFORE

__all__ = ["DownloadProgress", "download", "is_switched_off"]

logger = logging.getLogger(__name__)

MAX_LINE_BYTES: Final = 64 * 1024
# That the process has to end, once it has told how, or closed its output.
ENDING_SECONDS: Final = 10.0
_TRUE: Final = ("1", "ON", "YES", "TRUE")


class DownloadProgress:
    """Told how a download goes; here, nothing is made of it."""

    def waiting(self) -> None:
        """Another process fetches the same model, and is waited for."""

    def found(self, total: int, there: int, num_files: int, folder: Path) -> None:
        """Learn how much is to come.

        Args:
            total: bytes of all files that are needed.
            there: of these, bytes that are in the cache.
            num_files: that are not, or not whole.
            folder: of the cache.
        """

    def came(self, there: int) -> None:
        """So many bytes are there now."""

    def silent(self, reason: str, seconds: float) -> None:
        """Nothing comes, and the hub is asked again in so many seconds."""


def is_switched_off() -> bool:
    """Whether whoever started this process has switched the hub off, by the variables of its library."""
    told = HUB_OFFLINE_BEFORE or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return told.upper() in _TRUE


async def download(name: ModelName, progress: DownloadProgress) -> Path:
    """Have a model in the cache, whole; returns its directory, or its file in GGUF.

    What the hub has of its revision today is fetched, as far as it is not there. Cancelled, it leaves what has come,
    from where the next one goes on.

    Raises:
        ConfigurationError: it cannot be had: the sentence says why.
    """
    process = await trio.lowlevel.open_process(
        [
            sys.executable,
            "-m",
            "neurogrid.hub.fetching",
            name.repository,
            name.revision,
            name.quant,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C is for us, who end it.
        start_new_session=True,
        env=_environment(),
    )
    words: deque[str] = deque(maxlen=1)
    try:
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_log_words, process, words)
                folder = await _follow(process, progress)
                # All is told, and what is left is its end: also where it does not come, or somebody has its pipes.
                nursery.cancel_scope.deadline = trio.current_time() + ENDING_SECONDS
        if folder is None:
            process.kill()
            status = await process.wait()
            raise ConfigurationError(
                f"the process that fetches models ended with status {status}: {' '.join(words)[:300]}"
            )
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
                await stream.aclose()
    return folder


def _environment() -> dict[str, str]:
    """Environment of the process that goes to the network: as ours was, but with no telemetry about the user."""
    environment = {
        **os.environ,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    del environment["HF_HUB_OFFLINE"]
    if HUB_OFFLINE_BEFORE is not None:
        environment["HF_HUB_OFFLINE"] = HUB_OFFLINE_BEFORE
    return environment


async def _follow(process: trio.Process, progress: DownloadProgress) -> Path | None:
    """Hand on what the process tells, until it has told how it ended; None where it ended without.

    Raises:
        ConfigurationError: it told why it failed, or tells no end of a line.
    """
    assert process.stdout is not None
    buffer = b""
    while data := await process.stdout.receive_some(MAX_LINE_BYTES):
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            if not line.startswith(b'{"event"'):
                logger.debug("hub: %s", line.decode(errors="replace")[:1000])  # the library's own
                continue
            event: dict[str, Any] = json.loads(line)
            match event.pop("event"):
                case "found":
                    progress.found(**{**event, "folder": Path(event["folder"])})
                case "came":
                    progress.came(**event)
                case "silent":
                    progress.silent(**event)
                case "waiting":
                    progress.waiting()
                case "failed":
                    raise ConfigurationError(event["text"])
                case "ready":
                    return Path(event["path"])
        if len(buffer) > MAX_LINE_BYTES:
            raise ConfigurationError(
                f"the process that fetches models wrote a line of more than {MAX_LINE_BYTES:,} bytes, and was ended"
            )
    return None


async def _log_words(process: trio.Process, last: deque[str]) -> None:
    """Log what the library says, which we say in words of our own; the last line is for where it ends without any."""
    assert process.stderr is not None
    buffer = b""
    while data := await process.stderr.receive_some(4096):
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            last.append(line.decode(errors="replace")[:1000])
            logger.debug("hub: %s", last[-1])
        buffer = buffer[-4096:]
