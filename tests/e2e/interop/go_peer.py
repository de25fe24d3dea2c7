"""`p2pd`, a real go-libp2p peer.

The daemon comes in the wheel of hivemind, of which nothing is imported: it is found as a file of the installed
distribution. It knows no bootstrap peer and relays for nobody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.e2e.interop.foreign_peer import ForeignPeer, ForeignProcess, start_process
from tests.e2e.interop.go_control import GoControl

__all__ = ["run_p2pd", "start_go_peer"]


def start_go_peer(
    security: str, *, listen: str = "/ip4/127.0.0.1/tcp/0"
) -> AbstractContextManager[ForeignProcess]:
    """Run a daemon that offers one channel security, "noise" or "tls", until the block is left."""
    return start_p2pd(
        f"-noise={'true' if security == 'noise' else 'false'}",
        f"-tls={'true' if security == 'tls' else 'false'}",
        "-relay=false",
        "-relayService=false",
        listen=listen,
    )


def start_p2pd(
    *options: str, listen: str = "/ip4/127.0.0.1/tcp/0"
) -> AbstractContextManager[ForeignProcess]:
    """Run a daemon with `options` until the block is left."""
    binary = _find_p2pd()

    def command(directory: Path) -> list[str]:
        return [
            str(binary),
            f"-listen=/unix{directory}/control.sock",
            f"-hostAddrs={listen}",
            "-idleTimeout=10m",  # should this process be killed, the daemon ends too
            "-q",
            *options,
        ]

    return start_process(command, GoControl())


@asynccontextmanager
async def run_p2pd(*options: str) -> AsyncIterator[ForeignPeer]:
    """The same, and drive it."""
    with start_p2pd(*options) as process:
        async with process.use() as peer:
            yield peer


def _find_p2pd() -> Path:
    try:
        files = distribution("hivemind").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name == "p2pd" and path.is_file():
            return path
    pytest.fail(
        "The Go peer is missing: p2pd, in the wheel of hivemind. Run `.ci/setup peers`.",
        pytrace=False,
    )
