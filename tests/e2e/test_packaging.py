"""Wheel and source distribution: built, looked into, installed where nothing else is, and run."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

import neurogrid
from tests.e2e.declared_environment import add_extra, make_environment, metadata_of
from tests.e2e.support import DEADLINE, ENVIRONMENT

ROOT = Path(__file__).parents[2]
# What is built; a build leaves things behind, so it happens elsewhere.
SOURCES = (
    "neurogrid",
    "packaging",
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
    "setup.py",
)
NO_SOURCES = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so")
KERNELS = "neurogrid/model/kernels/kernels.so"
LEVEL = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).ng_level())"
MACHINES = {"x86_64": 62, "aarch64": 183}  # in the header of an ELF file

TWO_HOSTS = """
import trio
from neurogrid.p2p import Protocol, open_host

async def main():
    async with open_host() as server, open_host() as client:
        Protocol(server).on_activation_received(lambda message: bytes(message.data)[::-1])
        peer_id = await client.connect(server.addresses[0])
        answer = await Protocol(client).request_activation(peer_id, 0, 0, b"abc", timeout=60)
        print(bytes(answer.data).decode())

trio.run(main)
"""


class Built(NamedTuple):
    """What was built: what is published, by the machine of each wheel, and a wheel of the tree for this machine."""

    sdist: Path
    wheels: dict[str, Path]
    wheel_of_tree: Path

    @property
    def wheel(self) -> Path:
        """The published one for this machine."""
        return self.wheels[os.uname().machine]


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command, which finds no module in the tree."""
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
    environment |= variables
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=DEADLINE
    )


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Gone afterwards: an environment is tens of thousands of links."""
    with TemporaryDirectory(prefix="neurogrid-packaging-") as name:
        yield Path(name)


def build(
    tree: Path, into: Path, *which: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", into, *which, tree),
        cwd=into.parent,
        **variables,
    )


@pytest.fixture(scope="module")
def tree(directory: Path) -> Path:
    tree = directory / "tree"
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=NO_SOURCES)
        else:
            shutil.copy(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def built(directory: Path, tree: Path) -> Built:
    """Compiled once for each wheel, which takes longest: by one compiler, so that bits can be compared."""
    if missing := [name for name in MACHINES if not shutil.which(f"{name}-linux-gnu-gcc")]:
        pytest.fail(
            f"no compiler for {missing[0]}: run `.ci/setup peers`, or, on Debian: apt-get install "
            "gcc gcc-aarch64-linux-gnu"
        )
    published, again = directory / "published", directory / "again"
    variables = {"NEUROGRID_BUILD_KERNELS": "required", "CC": f"{os.uname().machine}-linux-gnu-gcc"}
    for done in (
        run(
            tree / "packaging" / "build_wheels.sh", published, cwd=directory, PYTHON=sys.executable
        ),
        build(tree, again, "--wheel", **variables),
    ):
        assert done.returncode == 0, done.stdout + done.stderr
    wheels = {path.stem.rpartition("manylinux_2_17_")[2]: path for path in published.glob("*.whl")}
    (sdist,), (wheel_of_tree,) = published.glob("*.tar.gz"), again.iterdir()
    return Built(sdist, wheels, wheel_of_tree)


def files_of(wheel: Path) -> set[str]:
    """Without the metadata, in which no tag stands but in the file WHEEL."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def tags_of(wheel: Path) -> list[str]:
    """What the wheel says that it is for, inside and by its name."""
    lines = (metadata_of(wheel).read_text("WHEEL") or "").splitlines()
    inside = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    return [*inside, wheel.stem.split("-", 2)[2]]


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Built) -> None:
    package = ROOT / "neurogrid"
    files = {
        str(file.relative_to(ROOT))
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so"
    }
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
    info = f"neurogrid-{neurogrid.__version__}.dist-info"
    assert files_of(built.wheel) == files | {KERNELS}
    assert f"{info}/licenses/LICENSE" in names
    assert {"neurogrid/py.typed", "neurogrid/model/embedded/model.safetensors"} <= names


def test_the_kernels_are_for_this_machine_and_every_python(built: Built, directory: Path) -> None:
    assert tags_of(built.wheel_of_tree) == [f"py3-none-linux_{os.uname().machine}"] * 2
    with zipfile.ZipFile(built.wheel_of_tree) as wheel:
        library = wheel.extract(KERNELS, directory / "kernels")
    level = run(sys.executable, "-I", "-c", LEVEL, library, cwd=directory)
    assert level.returncode == 0, level.stderr
    assert int(level.stdout) >= 0
    # Neither the paths to this Python nor those to the tree.
    assert os.fsencode(sys.base_prefix) not in Path(library).read_bytes()
    assert os.fsencode(directory) not in Path(library).read_bytes()


def test_without_a_compiler_the_wheel_is_for_any_machine(
    built: Built, tree: Path, directory: Path
) -> None:
    # Where something was compiled before, and would pass for what was compiled now.
    assert list(tree.glob(f"build/lib*/{KERNELS}"))
    done = build(tree, directory / "uncompiled", "--wheel", CC="false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'building extension "neurogrid.model.kernels.kernels" failed' in (
        done.stdout + done.stderr
    )
    (wheel,) = (directory / "uncompiled").iterdir()
    assert files_of(wheel) == files_of(built.wheel) - {KERNELS}
    assert tags_of(wheel) == ["py3-none-any"] * 2


def test_who_requires_the_kernels_is_told_that_there_are_none(tree: Path) -> None:
    """As make kernels does: what an older source made does not stay."""
    old = tree / KERNELS
    old.touch()
    done = run(
        *(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"),
        cwd=tree,
        CC="false",
        NEUROGRID_BUILD_KERNELS="required",
    )
    assert done.returncode != 0
    assert re.fullmatch(r"error: command '.*false' failed .*", done.stderr.splitlines()[-1])
    assert not old.exists()


def test_the_wheels_that_are_published(built: Built) -> None:
    assert set(built.wheels) == set(MACHINES)
    for machine, wheel in built.wheels.items():
        assert tags_of(wheel) == [f"py3-none-manylinux_2_17_{machine}"] * 2
        with zipfile.ZipFile(wheel) as archive:
            header = archive.read(KERNELS)[:20]
        assert int.from_bytes(header[18:], "little") == MACHINES[machine]


def test_the_source_distribution_makes_the_same_wheel(built: Built) -> None:
    """But for the tag, and the record of the file that it stands in."""

    def contents(wheel: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    published, of_tree = contents(built.wheel), contents(built.wheel_of_tree)
    info = f"neurogrid-{neurogrid.__version__}.dist-info"
    tags, tags_of_tree = (each.pop(f"{info}/WHEEL") for each in (published, of_tree))
    assert tags.replace(b"-manylinux_2_17_", b"-linux_") == tags_of_tree
    records = [each.pop(f"{info}/RECORD").splitlines() for each in (published, of_tree)]
    told, told_of_tree = (
        [line for line in lines if not line.startswith(f"{info}/WHEEL,".encode())]
        for lines in records
    )
    assert told == told_of_tree
    assert published == of_tree


def test_the_source_distribution_has_what_an_operator_wants_and_no_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "constraints.txt", "packaging/Dockerfile"} <= names
    assert {"setup.py", "neurogrid/model/kernels/kernels.c"} <= names
    assert "packaging/requirements/transport.txt" in names
    assert "packaging/systemd/neurogrid-worker.service" in names
    assert not [name for name in names if re.search(r"(^tests|__pycache__|\.pyc$|(^|/)\.)", name)]


def test_the_metadata(built: Built) -> None:
    metadata = metadata_of(built.wheel).metadata
    assert metadata["Version"] == neurogrid.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description"] == (ROOT / "README.md").read_text()
    assert set(metadata.get_all("Provides-Extra") or ()) == {
        "inference",
        "otel",
        "training",
    }
    assert f"## [{neurogrid.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_image_is_built_of_what_is_built_here() -> None:
    lines = (ROOT / "packaging" / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    names = [name for names in copied for name in names if not name.startswith(("--from", "/"))]
    assert sorted(names) == sorted(SOURCES)


def test_the_licence_is_the_standard_text() -> None:
    # As https://www.apache.org/licenses/LICENSE-2.0.txt has it.
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_without_extras_it_is_the_transport_library_and_with_one_it_does_the_main_job(
    built: Built, directory: Path
) -> None:
    commands = make_environment(directory / "environment", built.wheel)
    python = commands / "python"
    hosts = run(python, "-c", TWO_HOSTS, cwd=directory)
    assert (hosts.returncode, hosts.stdout) == (0, "cba\n"), hosts.stderr
    assert "No module named 'torch'" in run(python, "-c", "import torch", cwd=directory).stderr
    version = run(commands / "neurogrid-worker", "--version", cwd=directory)
    assert version.stdout == (
        f"neurogrid-worker {neurogrid.__version__} "
        "(httpx2 is not installed: pip install -r packaging/requirements/inference.txt (in the source))\n"
    )
    for command in ("neurogrid-worker", "neurogrid-coordinator --local-workers 1 --prompt x"):
        name, *args = command.split()
        done = run(commands / name, *args, cwd=directory)
        assert done.returncode == 2, done.stderr
        last = done.stderr.splitlines()[-1]
        assert re.fullmatch(
            rf"{name}: \w+ is not installed: pip install -r packaging/requirements/inference\.txt \(in the source\)",
            last,
        )
        assert "Traceback" not in done.stderr
    add_extra(directory / "environment", built.wheel, "inference")
    done = run(
        *(commands / "neurogrid-coordinator", "--local-workers", "1", "--no-cache"),
        *("--prompt", "A function definition", "--max-tokens", "12"),
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" is an executable statement."), done.stdout
    assert "layers 0-7" in done.stderr
    where = run(
        commands / "python", "-c", "import neurogrid; print(neurogrid.__file__)", cwd=directory
    )
    assert where.stdout.startswith(os.fspath(directory))
