"""js-libp2p under Node.js: `js/peer.js`, with the packages of `js/package-lock.json`."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.e2e.interop.foreign_peer import ForeignProcess, start_process
from tests.e2e.interop.js_control import JsControl

__all__ = ["start_js_peer"]

DIRECTORY = Path(__file__).parent / "js"


def start_js_peer(security: str) -> AbstractContextManager[ForeignProcess]:
    """Run a peer that offers one channel security, "noise" or "tls", until the block is left."""
    node = shutil.which("node")
    if node is None:
        pytest.fail(
            "The JavaScript peer is missing: there is no node. Install Node.js 20 or later and run"
            " `.ci/setup peers`.",
            pytrace=False,
        )
    if not (DIRECTORY / "node_modules" / "libp2p").is_dir():
        pytest.fail(
            f"The JavaScript peer is missing: no js-libp2p in {DIRECTORY / 'node_modules'}. Run"
            " `.ci/setup peers`.",
            pytrace=False,
        )

    def command(directory: Path) -> list[str]:
        return [node, str(DIRECTORY / "peer.js"), str(directory), security]

    return start_process(command, JsControl())
