"""Commands in the documents that are marked to be run end well, as they are written there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.support import DEADLINE, ENVIRONMENT

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"^<!-- run -->\n\n((?:    .*\n)+)", re.MULTILINE)
BLOCKS = [
    pytest.param(block, id=f"{path.stem}-{number}")
    for path in sorted((ROOT / "docs").glob("*.md"))
    for number, block in enumerate(MARKED.findall(path.read_text()))
]


def test_some_are_marked() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS)
def test_it_ends_well(block: str, tmp_path: Path) -> None:
    commands = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
