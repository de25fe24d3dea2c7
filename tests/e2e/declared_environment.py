"""A virtual environment that holds what a distribution declares to need, and nothing else, or with an extra.

What is installed where the tests run is linked into it, distribution by distribution, from the requirements in the
wheel downwards. So an import that nobody declared fails there as it would at a user's, and nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["add_extra", "make_environment", "metadata_of"]

# The one thing in which what is installed is not what is declared: docs/installing.md.
KNOWN = "libp2p 0.8.1 has requirement fastecdsa==2.3.2"


def metadata_of(wheel: Path) -> Distribution:
    """What a wheel says of itself."""
    name, version = wheel.name.split("-")[:2]
    return PathDistribution(zipfile.Path(wheel, f"{name}-{version}.dist-info/"))


def make_environment(directory: Path, wheel: Path) -> Path:
    """Make it in `directory`, and install the wheel; returns its folder of commands."""
    venv.create(directory, with_pip=False)
    add_extra(directory, wheel, "")
    install = _pip(directory, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    assert install.returncode == 0, install.stdout + install.stderr
    _check(directory)
    return directory / "bin"


def add_extra(directory: Path, wheel: Path, extra: str) -> None:
    """Add to the environment in `directory` what an extra of the wheel needs."""
    (packages,) = directory.glob("lib/python*/site-packages")
    for needed in _needed(metadata_of(wheel), {extra}):
        _link(needed, packages)
    if extra:
        _check(directory)


def _check(directory: Path) -> None:
    check = _pip(directory, "check")
    complaints = [line for line in check.stdout.splitlines() if not line.startswith(KNOWN)]
    assert complaints in ([], ["No broken requirements found."]), check.stdout + check.stderr


def _pip(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python")]
    return subprocess.run(
        [*pip, "--disable-pip-version-check", *words], capture_output=True, text=True
    )


def _needed(root: Distribution, extras: set[str]) -> Iterator[Distribution]:
    """Whatever `root` with its extras requires, and so on, each once."""
    seen: dict[str, set[str]] = {}
    found: dict[str, Distribution] = {}
    waiting = [(root, extras)]
    while waiting:
        parent, active = waiting.pop()
        for line in parent.requires or ():
            wanted = Requirement(line)
            marker = wanted.marker
            if marker and not any(marker.evaluate({"extra": name}) for name in active | {""}):
                continue
            added = {"", *wanted.extras} - seen.get(wanted.name, set())
            if added:
                seen.setdefault(wanted.name, set()).update(added)
                found[wanted.name] = distribution(wanted.name)
                waiting.append((found[wanted.name], added))
    yield from found.values()


def _link(needed: Distribution, packages: Path) -> None:
    """File by file: several distributions may share a folder, and not all of them are needed."""
    assert needed.files is not None, needed.name
    for file in needed.files:
        if file.parts[0] != "..":
            link = packages / file
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(Path(str(needed.locate_file(file))))
