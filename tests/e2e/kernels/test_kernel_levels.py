"""The kernels of neurogrid/model/kernels are right, and have the same bits on every level and processor.

`check.c` compares products with sums of doubles, and by `check_layer.c` the tokens of a layer with what they are alone;
it prints a hash for each case. What has been compiled for aarch64 runs under qemu, which rounds as that processor does.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "neurogrid" / "model" / "kernels"
PRODUCT_FLAGS = ("-std=gnu11", "-O3", "-fopenmp")
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi", "-Werror")
# As little as compiles fast and fuses multiplications with additions where -O3 does.
SANITIZING_FLAGS = (
    "-std=gnu11",
    "-O1",
    "-fexpensive-optimizations",
    "-funswitch-loops",
    "-fopenmp",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
NOT_ON_THIS_PROCESSOR = 77
DEADLINE = 300

PACKAGES = {
    "gcc": "gcc libc6-dev",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "qemu-aarch64": "qemu-user",
}


def find(tool: str) -> str:
    """Where it is. These tests are not skipped: nobody would notice that other processors get other bits."""
    path = shutil.which(tool)
    if path is None:
        pytest.fail(
            f"{tool} is missing. Run `.ci/setup peers`, or, on Debian: "
            f"sudo apt-get install {PACKAGES[tool]}",
            pytrace=False,
        )
    return path


def build(compiler: str, program: Path, *flags: str) -> Path:
    """Compile the check."""
    source = Path(__file__).with_name("check.c")
    command = [find(compiler), *flags, "-I", str(KERNELS), str(source), "-o", str(program), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return program


def hashes(*command: str | Path) -> dict[str, str]:
    """Hashes by the names of their cases; skips where this processor lacks the level."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode == NOT_ON_THIS_PROCESSOR:
        # No level can be tried on a processor that lacks its instructions; those that it has are.
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    lines = [line.split(": ") for line in done.stdout.splitlines()]
    found = dict(lines)
    assert len(found) == len(lines) >= 147
    return found


def without_dot(found: dict[str, str]) -> dict[str, str]:
    """What every level has to make alike. The instruction of bf16-dot rounds as it likes, and one level has it."""
    return {case: value for case, value in found.items() if not case.startswith("bf16-dot ")}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program for this processor, with the flags that the library is compiled with."""
    return build("gcc", tmp_path_factory.mktemp("native") / "check", *PRODUCT_FLAGS, *WARNINGS)


@pytest.fixture(scope="module")
def level_1(native: Path) -> dict[str, str]:
    """Hashes of the lowest level."""
    return hashes(native, "1")


def test_avx512_makes_the_bits_of_avx2(native: Path, level_1: dict[str, str]) -> None:
    level_2 = hashes(native, "2")
    assert without_dot(level_2) == level_1
    assert len(level_2) > len(level_1)


def test_neon_makes_the_bits_of_this_processor(
    native: Path, level_1: dict[str, str], tmp_path: Path
) -> None:
    qemu = find("qemu-aarch64")
    # Static: qemu finds no libraries of the other processor here.
    flags = (*PRODUCT_FLAGS, *WARNINGS, "-static")
    program = build("aarch64-linux-gnu-gcc", tmp_path / "check", *flags)
    assert hashes(qemu, program, "1") == level_1


def test_kernels_stay_within_their_buffers(
    native: Path, level_1: dict[str, str], tmp_path: Path
) -> None:
    program = build("gcc", tmp_path / "check", *SANITIZING_FLAGS)
    assert hashes(program, "1") == level_1
    assert without_dot(hashes(program, "2")) == level_1


def test_a_level_that_no_processor_has_is_refused(native: Path) -> None:
    done = subprocess.run([native, "3"], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout) == (NOT_ON_THIS_PROCESSOR, "")
