"""The run file as its run keeps it: places from any folder, and runs of versions before that lack keys of today."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from neurogrid.cli.commands.training.model import place_of
from neurogrid.errors import ConfigurationError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.transfer import BlobInfo, BytesSource
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.leading.model_data import first_data
from neurogrid.training.leading.opening import begin_journal
from neurogrid.training.leading.progress import QuietProgress
from neurogrid.training.runs.entries import RunEntry
from neurogrid.training.runs.journal import Journal
from neurogrid.training.runs.kept_run import differing_keys, kept_text
from neurogrid.training.runs.run_directory import RunDirectory, read_run_file
from neurogrid.training.runs.run_file import RunFile, parse_kept_run_file, parse_run_file
from neurogrid.training.runs.run_file.presets import PRESETS

LEAST = (
    '[model]\nconfig = "model"\n[data]\npath = "data/"\ntokenizer = "model"\n[stop]\nsteps = 300\n'
)
MANIFEST = Manifest("text", (SliceInfo(bytes(32), 3, 184),), sequence_length=8, vocab_size=500)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project" / "model").mkdir(parents=True)
    (tmp_path / "project" / "run.toml").write_text(LEAST)
    return tmp_path / "project"


def begun(directory: RunDirectory, run: RunFile, manifest: Manifest) -> tuple[bytes, str]:
    directory.path.mkdir(parents=True, exist_ok=True)
    identity = Identity.load(directory.path / "identity")
    with Journal.open(directory.journal, identity) as journal:
        return begin_journal(journal, run, manifest, identity)


def begun_before(directory: RunDirectory, text: str, manifest: Manifest) -> None:
    """As a version of before has left it, with another text of the run file."""
    directory.path.mkdir(parents=True)
    directory.run_file.write_text(text)
    identity = Identity.load(directory.path / "identity")
    source = BytesSource(manifest.encode())
    with Journal.open(directory.journal, identity) as journal:
        journal.append(
            RunEntry(
                run=bytes(16),
                leader=identity.peer_id,
                run_file=hashlib.sha256(text.encode()).digest(),
                manifest=BlobInfo.of_digests(source.digests(), source.num_bytes).blob_id,
                slices=manifest.sizes,
                seed=0,
            )
        )


@pytest.mark.parametrize("where", ["project/runs/run", "elsewhere/run", "project"])
def test_places_begin_at_the_file(
    project: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.parent)
    run = read_run_file(Path("project/run.toml"))
    assert run.place(run.data.path).resolve() == project / "data"
    directory = RunDirectory(project.parent / where)
    directory.path.mkdir(parents=True, exist_ok=True)
    text = kept_text(run, directory)
    assert str(project.parent) not in text, (
        "members get it, and where it lies is not their business"
    )
    directory.write_run(text)
    monkeypatch.chdir("/")
    kept = directory.read_run()
    for place, wanted in (
        (kept.data.path, "data"),
        (kept.data.tokenizer, "model"),
        (kept.model.config, "model"),
    ):
        assert kept.place(place).resolve() == project / wanted
    assert kept_text(kept, directory) == text


def test_what_is_no_place_stays(project: Path) -> None:
    directory = RunDirectory(project / "runs" / "run")
    text = '[model]\nconfig = "{}"\n[data]\npath = "{}"\n[stop]\nsteps = 1\n[checkpoints]\ndir = "{}"\n'
    for config, path, kept_at in (
        ("embedded", "https://a.org/data", "/disk/kept"),
        ("Qwen/Qwen3-0.6B", "/data", ""),
    ):
        (project / "run.toml").write_text(text.format(config, path, kept_at))
        kept = parse_run_file(kept_text(read_run_file(project / "run.toml"), directory))
        assert (kept.model.config, kept.data.path, kept.checkpoints.dir) == (config, path, kept_at)


async def test_a_run_file_that_nobody_could_read_again_begins_no_run(project: Path) -> None:
    """Within the bounds as it is given, and beyond them with what it leaves out: members would refuse it."""
    parts = [f'{{ path = "{number:02}{"x" * 210}", weight = 1 }}' for number in range(64)]
    text = LEAST.replace('path = "data/"', f"mixture = [{', '.join(parts)}]")
    (project / "run.toml").write_text(text)
    directory = RunDirectory(project / "runs" / "run")
    run = read_run_file(project / "run.toml")
    with pytest.raises(ConfigurationError, match=r"read at most 16384\. Give shorter places"):
        await first_data(run, directory, project / "model", QuietProgress())
    assert not directory.data.exists()


def test_a_home_is_a_place(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project / "home"))
    (project / "home" / "model").mkdir(parents=True)
    text = LEAST.replace('"data/"', '"~/data"').replace('"model"', '"~/model"')
    (project / "run.toml").write_text(text)
    run = read_run_file(project / "run.toml")
    assert run.place(run.data.path) == project / "home" / "data"
    assert run.place(run.data.tokenizer) == project / "home" / "model"
    assert place_of(run.model.config, run.folder) == project / "home" / "model"
    kept = parse_run_file(kept_text(run, RunDirectory(project / "runs" / "run")))
    assert (kept.data.path, kept.model.config) == ("~/data", "~/model")
    assert list(differing_keys(kept, run)) == []


def test_a_mixture_is_kept(project: Path) -> None:
    directory = RunDirectory(project / "runs" / "run")
    mixture = 'mixture = [{ path = "a/", weight = 1 }, { path = "/b", weight = 2 }]'
    text = LEAST.replace('path = "data/"', mixture)
    (project / "run.toml").write_text(text)
    run = read_run_file(project / "run.toml")
    directory.path.mkdir(parents=True)
    directory.write_run(kept_text(run, directory))
    kept = directory.read_run()
    assert kept.data.places == ("../../a", "/b")
    assert list(differing_keys(kept, run)) == []
    (project / "run.toml").write_text(text.replace("weight = 2", "weight = 3"))
    (told,) = differing_keys(kept, read_run_file(project / "run.toml"))
    assert told.startswith("[data] mixture was [")


def test_a_run_goes_on_with_its_file_from_anywhere(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, manifest = RunDirectory(project / "runs" / "run"), MANIFEST
    run = read_run_file(project / "run.toml")
    run_id, text = begun(directory, run, manifest)
    monkeypatch.chdir("/")
    for again in (
        run,
        read_run_file(directory.run_file),
        replace(run, preset="hypha"),  # a name for values that it has
    ):
        assert begun(directory, replace(again, name="run"), manifest) == (run_id, text)
    project.rename(project.parent / "moved")
    moved = RunDirectory(project.parent / "moved" / "runs" / "run")
    assert begun(moved, read_run_file(moved.path.parents[1] / "run.toml"), manifest)[0] == run_id


def test_keys_that_differ_are_named(project: Path) -> None:
    directory, manifest = RunDirectory(project / "runs" / "run"), MANIFEST
    file = project / "run.toml"
    begun(directory, read_run_file(file), manifest)
    file.write_text(
        f"seed = 3\n{LEAST.replace('data/', 'other/')}tokens = 5\n[inner]\nlr = 0.5\n[outer]\nevery = 8\n"
    )
    with pytest.raises(ConfigurationError) as failed:
        begun(directory, read_run_file(file), manifest)
    told = str(failed.value)
    assert (
        'seed was 0 and is 3, [data] path was "../../data" and is "other/", [stop] tokens was not given and is 5, '
        "[inner] lr was 0.001 and is 0.5, and 1 more. Go on with that one"
    ) in told
    assert f'[model] config = "{directory.checkpoints}/latest"' in told


def test_a_file_that_was_altered_or_is_gone(project: Path) -> None:
    directory, manifest = RunDirectory(project / "runs" / "run"), MANIFEST
    file = project / "run.toml"
    _, text = begun(directory, read_run_file(file), manifest)
    other = replace(read_run_file(file), seed=1)
    for alter, what in (
        (lambda: directory.run_file.write_text(text + "# more\n"), "was altered since"),
        (lambda: directory.run_file.unlink(), "is not there"),
    ):
        alter()
        with pytest.raises(ConfigurationError, match=what):
            begun(directory, other, manifest)
    # The same file as then has the same text.
    assert begun(directory, read_run_file(file), manifest)[1] == text
    assert directory.run_file.read_text() == text


def without(text: str, *gone: str) -> str:
    """A run file as a version wrote it that lacked these keys, and these sections."""
    kept, section = [], ""
    for line in text.splitlines(keepends=True):
        if line.startswith("["):
            section = line.strip()
        key = f"{section} {line.partition(' = ')[0]}".strip()
        if section not in gone and key not in gone:
            kept.append(line)
    return "".join(kept)


NEWER = (
    *("[layout]", "[adapter]", "[distro]", "[epochs]", "[checks]"),
    *("[data] mixture", "[data] repeat", "[data] token_bytes", "[members] open"),
)


def test_a_run_of_before_lacks_keys(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on as it was, with the text that it began with; one of the new keys that says otherwise is named."""
    directory, manifest = RunDirectory(project / "runs" / "run"), MANIFEST
    monkeypatch.chdir(project)
    run = read_run_file(Path("run.toml"))
    text = without(run.text(), *NEWER)
    assert "[checks]" not in text
    assert "mixture" not in text
    begun_before(directory, text, manifest)
    assert begun(directory, run, manifest) == (bytes(16), text)
    assert directory.run_file.read_text() == text
    (project / "run.toml").write_text(f"{LEAST}[layout]\nstages = 2\n")
    with pytest.raises(ConfigurationError, match=r"\[layout\] stages was 1 and is 2\. Go on"):
        begun(directory, read_run_file(Path("run.toml")), manifest)


def test_places_of_before_begin_where_the_command_was_started(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the run file is adapted, and says the same as before."""
    directory, manifest = RunDirectory(project / "runs" / "run"), MANIFEST
    monkeypatch.chdir(project.parent)
    old = LEAST.replace('"data/"', '"project/data/"').replace('"model"', '"project/model"')
    begun_before(directory, parse_run_file(old).text(), manifest)
    begun(directory, read_run_file(Path("project/run.toml")), manifest)
    monkeypatch.chdir("/")
    with pytest.raises(ConfigurationError, match=r"\[model\] config was .* \[data\] path was "):
        begun(directory, read_run_file(project / "run.toml"), manifest)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_that_has_learned_more_does_not_count(preset: str) -> None:
    run = parse_run_file(f'preset = "{preset}"\n{LEAST}')
    assert parse_kept_run_file(run.text(), name="run.toml") == run
    for title, values in PRESETS[preset].items():
        for key in values:
            if key == "method" or title == "outer":
                continue
            old = parse_kept_run_file(without(run.text(), f"[{title}] {key}", "[layout]"))
            default = type(getattr(run, title)).__dataclass_fields__[key].default
            assert getattr(getattr(old, title), key) == default
