"""Downloads from a hub on loopback, by the process that makes them: what comes, what goes wrong, and what is kept."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from neurogrid.errors import ConfigurationError
from neurogrid.hub.download import DownloadProgress, download, is_switched_off
from neurogrid.hub.names import ModelName
from tests.hub import Fault, Hub, Repository, loopback_hub

DEADLINE = 120.0
NAME = ModelName("org/model")
MAIN = "main"
WEIGHTS = random.Random(1).randbytes(400_000)
INDEX = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
FILES = {
    "config.json": b'{"num_hidden_layers": 3}',
    "tokenizer.json": b"{}" * 1000,
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
}
OTHERS = {
    "README.md": b"x",
    "modeling.py": b"raise SystemExit",
    "pytorch_model.bin": b"x" * 1000,
    "original/consolidated.safetensors": b"x" * 1000,
    "onnx/model.onnx": b"x",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """One that has a model, for the processes that this one starts."""
    with loopback_hub() as hub:
        hub.repositories[NAME.repository] = Repository({MAIN: {**FILES, **OTHERS}})
        told = hub.environment(tmp_path / "home")
        for name in set(os.environ) - set(told) - {"HF_HUB_OFFLINE"}:
            monkeypatch.delenv(name)
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_TOKEN", "")  # so that what a test sets is undone
        monkeypatch.setattr("neurogrid.hub.download.HUB_OFFLINE_BEFORE", None)
        yield hub


@dataclass
class Told(DownloadProgress):
    """What a download told."""

    events: list[tuple[object, ...]] = field(default_factory=list)
    changed: trio.Event = field(default_factory=trio.Event)

    def waiting(self) -> None:
        self.events.append(("waiting",))
        self.changed.set()

    def found(self, total: int, there: int, num_files: int, folder: Path) -> None:
        self.events.append(("found", total, there, num_files))

    def came(self, there: int) -> None:
        self.events.append(("came", there))
        self.changed.set()


async def fetched(name: ModelName = NAME, told: Told | None = None) -> Path:
    with trio.fail_after(DEADLINE):
        return await download(name, told or Told())


async def refused(name: ModelName = NAME) -> str:
    with pytest.raises(ConfigurationError) as failed:
        await fetched(name)
    text = str(failed.value)
    assert "\n" not in text
    return text


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def partials(home: Path) -> list[Path]:
    return list(home.rglob("*.incomplete"))


async def test_what_is_needed_comes_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    told = Told()
    folder = await fetched(told=told)
    assert content(folder) == FILES
    total = sum(map(len, FILES.values()))
    assert told.events[0] == ("found", total, 0, len(FILES))
    assert folder.parent == tmp_path / "home/hub/models--org--model/snapshots"
    assert (folder.parents[1] / "refs/main").read_text() == folder.name
    assert partials(tmp_path) == []
    # Nothing that is not about these files is asked or told.
    paths = {path.removeprefix("/api/models") for _, path, _ in hub.requests}
    assert all(path.startswith("/org/model/") for path in paths), paths
    assert not [path for path in paths if path.rpartition("/")[2] in OTHERS]
    agents = {told["user-agent"] for told in hub.headers}
    assert all("torch" not in agent and "agent/" not in agent for agent in agents), agents

    # The second time there is nothing to do, and no file is asked for.
    hub.requests.clear()
    told = Told()
    assert await fetched(told=told) == folder
    assert told.events == [("found", total, total, 0)]
    assert not [path for method, path, _ in hub.requests if "/resolve/" in path]


async def test_one_of_several_models_in_gguf(hub: Hub, tmp_path: Path) -> None:
    files = {"x-Q4_0.gguf": WEIGHTS[:99], "x-Q8_0.gguf": WEIGHTS, "README.md": b"x"}
    hub.repositories["org/model"] = Repository({MAIN: files})
    text = await refused()
    assert text.startswith("org/model has 2 models in GGUF: say which"), text
    assert text.endswith("it has x-Q4_0.gguf, x-Q8_0.gguf")
    assert "x-Q4_0.gguf, x-Q8_0.gguf" in await refused(ModelName("org/model", quant="Q5_0"))
    assert not list(tmp_path.rglob("blobs/*"))
    path = await fetched(ModelName("org/model", quant="q8_0"))
    assert path.name == "x-Q8_0.gguf"
    assert content(path.parent) == {"x-Q8_0.gguf": WEIGHTS}
    # Beside it, the other one comes alone.
    hub.requests.clear()
    other = await fetched(ModelName("org/model", quant="Q4_0"))
    assert content(other.parent) == {name: files[name] for name in ("x-Q4_0.gguf", "x-Q8_0.gguf")}
    assert hub.gets("x-Q8_0.gguf") == []


def told_by(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have another process tell how a download goes."""
    program = folder / "fetching"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr("neurogrid.hub.download.ENDING_SECONDS", 0.5)


@pytest.mark.parametrize("way", ["exec sleep 20", "sleep 20 & exit", "yes"])
async def test_a_process_that_does_not_end_behind_its_last_word_is_ended(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where another has its pipes, or it writes what nobody reads."""
    told_by(f"""echo '{{"event": "ready", "path": "/there"}}'; {way}""", tmp_path, monkeypatch)
    assert await fetched() == Path("/there")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("yes | tr -d '\\n'", "wrote a line of more than 65,536 bytes, and was ended"),
        ("echo why >&2; exec >&-; exec sleep 20", "ended with status -9: why"),
        ("echo why >&2; exit 3", "ended with status 3: why"),
        ("echo why >&2; kill -9 $$", "ended with status -9: why"),
        ("yes | head -c 300000; yes | head -c 300000 >&2; echo why >&2; exit 3", "status 3: why"),
    ],
)
async def test_a_process_that_does_not_tell_how_it_ended(
    script: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_by(script, tmp_path, monkeypatch)
    assert says in await refused()


async def test_weights_in_shards_under_a_revision(hub: Hub) -> None:
    shards = {"model-1.safetensors": WEIGHTS[:99], "model-2.safetensors": WEIGHTS[99:]}
    files = {**FILES, **shards, "model.safetensors.index.json": INDEX}
    del files["model.safetensors"]
    revisions = hub.repositories[NAME.repository].revisions
    revisions["refs/pr/4"] = {**files, "model.fp16-1.safetensors": b"x"}
    folder = await fetched(ModelName("org/model", "refs/pr/4"))
    assert content(folder) == files
    assert (folder.parents[1] / "refs/refs/pr/4").read_text() == folder.name
    assert await fetched(ModelName("org/model", folder.name)) == folder


async def test_a_connection_that_is_cut_goes_on_from_there(hub: Hub) -> None:
    hub.faults += [
        Fault("model.safetensors", times=1, cut_at=100_000),
        Fault("model.safetensors", times=1, status=503),
        Fault("model.safetensors", times=1, cut_at=50_000),
    ]
    assert content(await fetched()) == FILES
    assert hub.gets("model.safetensors") == [*(0, 100_000, 100_000, 150_000)]


@pytest.mark.parametrize("kind", ["goes on", "without ranges", "of something else", "too long"])
async def test_one_that_was_cancelled_goes_on_the_next_time(
    kind: str, hub: Hub, tmp_path: Path
) -> None:
    hub.faults.append(Fault("model.safetensors", times=1, stall_at=100_000))
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            told = Told()
            nursery.start_soon(download, NAME, told)
            await told.changed.wait()
            while not partials(tmp_path) or not partials(tmp_path)[0].stat().st_size:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    (partial,) = partials(tmp_path)
    kept = partial.stat().st_size
    assert 0 < kept < len(WEIGHTS)
    assert partial.read_bytes() == WEIGHTS[:kept]
    assert not list(tmp_path.rglob("refs/*"))
    hub.requests.clear()
    if kind == "of something else":
        partial.write_bytes(bytes(kept))
    elif kind == "too long":
        partial.write_bytes(bytes(len(WEIGHTS) + 1))
    elif kind == "without ranges":
        hub.faults.append(Fault("model.safetensors", without_ranges=True))
    assert content(await fetched()) == FILES
    wanted = {"of something else": [kept, 0], "too long": [0]}
    assert hub.gets("model.safetensors") == wanted.get(kind, [kept])


async def test_other_bytes_than_the_hub_says_are_not_kept(hub: Hub, tmp_path: Path) -> None:
    hub.faults += [
        Fault("model.safetensors", times=1, wrong_at=250_000),
        Fault("tokenizer.json", times=1, wrong_at=7),
    ]
    for file in ("tokenizer.json", "model.safetensors"):
        assert f"org/model: {file} came with other bytes than the hub says" in await refused()
        assert not list(tmp_path.rglob(f"snapshots/*/{file}"))
    assert partials(tmp_path) == []
    assert content(await fetched()) == FILES


async def test_what_is_damaged_in_the_cache_is_fetched_anew(hub: Hub) -> None:
    folder = await fetched()
    for file in ("model.safetensors", "config.json"):
        (folder / file).resolve().write_bytes(b"short")
    assert await fetched() == folder
    assert content(folder) == FILES


async def test_what_somebody_linked_into_the_cache_is_left_alone(hub: Hub, tmp_path: Path) -> None:
    folder = await fetched()
    own = tmp_path / "mine.safetensors"
    own.write_bytes(b"mine")
    for file in ("model.safetensors", "config.json"):
        (folder / file).unlink()
        (folder / file).symlink_to(own)
    assert content(await fetched()) == FILES
    assert own.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda hub: hub.repositories.clear(),
            "there is no directory org/model here, and no model org/model at http://127",
        ),
        (lambda hub: hub.repositories[NAME.repository].revisions.clear(), "has no revision main"),
        (lambda hub: gate(hub), "is given to those only who were let in: ask at http://127"),
        (
            lambda hub: gate(hub, with_token=True),
            "the token that is set (HF_TOKEN, or hf auth login) is not let in",
        ),
        (
            lambda hub: hub.faults.append(Fault("/revision/main", status=403)),
            "does not give org/model to the token that is set",
        ),
        (
            lambda hub: hub.faults.append(Fault("/revision/main", status=404)),
            "does not answer as a hub of models does (status 404): is HF_ENDPOINT right?",
        ),
        (
            lambda hub: hub.faults.append(Fault("/revision/main", body=b"<html>hello</html>")),
            "does not answer as a hub of models does: is HF_ENDPOINT right?",
        ),
        (
            lambda hub: hub.faults.append(Fault("/revision/main", body=b'[{"x": 1}]')),
            "does not answer as a hub of models does: is HF_ENDPOINT right?",
        ),
        (
            lambda hub: hub.faults.append(
                Fault("/revision/main", body=b'{"id": "x", "sha": "../x"}')
            ),
            "does not answer as a hub of models does: is HF_ENDPOINT right?",
        ),
        (
            lambda hub: hub.repositories[NAME.repository].revisions[MAIN].pop("model.safetensors"),
            "org/model has no safetensors, but pickles (pytorch_model.bin)",
        ),
        (
            lambda hub: hub.faults.append(
                Fault("/config.json", method="HEAD", status=401, error_code="GatedRepo")
            ),
            "is given to those only who were let in",
        ),
        (lambda hub: index_only(hub), "names 'model-1.safetensors', which is not there"),
        (
            lambda hub: os.environ.update(HF_ENDPOINT="hub.example"),
            "HF_ENDPOINT is 'hub.example', which is no address",
        ),
        (
            lambda hub: os.environ.update(HF_ENDPOINT="http://127.0.0.1:9"),
            "http://127.0.0.1:9 cannot be reached (",
        ),
        (
            lambda hub: os.environ.update(HF_ENDPOINT="http://hub.invalid"),
            "http://hub.invalid cannot be reached (",
        ),
        (lambda hub: os.environ.update(HF_HOME="/proc/x"), "org/model cannot be fetched: /proc/x"),
    ],
)
async def test_what_cannot_be_had(
    change: Callable[[Hub], object], says: str, hub: Hub, tmp_path: Path
) -> None:
    change(hub)
    assert says in await refused()
    assert hub.gets(".safetensors") == hub.gets(".bin") == []
    assert not list(tmp_path.rglob("refs/*"))


def gate(hub: Hub, *, with_token: bool = False) -> None:
    hub.repositories[NAME.repository].token = "hf_right"
    hub.repositories[NAME.repository].is_gated = True
    if with_token:
        os.environ["HF_TOKEN"] = "hf_wrong"


def index_only(hub: Hub) -> None:
    files = hub.repositories[NAME.repository].revisions[MAIN]
    del files["model.safetensors"]
    files["model.safetensors.index.json"] = INDEX


async def test_with_the_token_it_comes(hub: Hub) -> None:
    gate(hub, with_token=True)
    os.environ["HF_TOKEN"] = "hf_right"
    assert content(await fetched()) == FILES


def fetched_hastily(more: str = "") -> dict[str, object]:
    """The last event of the process, when it waits for nothing, and after some more Python."""
    program = (
        "import sys; from neurogrid.hub import blobs, fetching\n"
        f"blobs.RETRY_DELAYS = fetching.ASK_DELAYS = (0.01, 0.01, 0.01)\n{more}\n"
        "raise SystemExit(fetching.main(['org/model', 'main']))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        events = [json.loads(line) for line in process.stdout]
    assert any(event["event"] == "silent" for event in events) is (process.returncode == 1)
    return dict(events[-1])


def test_a_hub_that_is_out_of_order(hub: Hub, tmp_path: Path) -> None:
    """For a moment it is waited for; for longer, a sentence tells, and what came is kept."""
    hub.faults += [
        Fault("/revision/main", times=2, status=500),
        Fault("model.safetensors", times=1, cut_at=100_000),
        Fault("model.safetensors", status=500),
    ]
    assert fetched_hastily() == {
        "event": "failed",
        "text": f"{hub.url} did not give org/model: status 500; try again, which goes on from here",
    }
    assert partials(tmp_path)[0].stat().st_size == 100_000
    hub.faults.clear()
    assert content(Path(str(fetched_hastily()["path"]))) == FILES


def test_no_answer_is_longer_than_a_hub_gives(hub: Hub) -> None:
    folder = fetched_hastily("blobs.WINDOW_BYTES = 150_000")["path"]
    assert content(Path(str(folder))) == FILES
    assert hub.gets("model.safetensors") == [0, 150_000, 300_000]


def test_a_hub_that_sends_nothing_is_given_up(hub: Hub) -> None:
    hub.faults.append(Fault("model.safetensors", body=b""))
    text = str(fetched_hastily()["text"])
    assert f"{hub.url} cannot be reached (an answer came without a byte), and org/model" in text


async def test_another_process_fetches_the_same(hub: Hub) -> None:
    hub.faults.append(Fault("model.safetensors", times=1, seconds_a_piece=0.1))
    folders: list[Path] = []

    async def fetch(told: Told) -> None:
        folders.append(await fetched(told=told))

    first, second = Told(), Told()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetch, first)
        await first.changed.wait()
        nursery.start_soon(fetch, second)
    assert ("waiting",) in second.events
    assert second.events[-1][2:] == (sum(map(len, FILES.values())), 0)  # all is there
    assert folders[0] == folders[1]
    assert hub.gets("model.safetensors") == [0]


@contextmanager
def fetching_to(home: Path, size: str) -> Iterator[subprocess.Popen[str]]:
    """The process, with a cache on a disk of this size that it alone sees."""
    mount = f"mount -t tmpfs -o size={size} none '{home}'"
    if os.geteuid() or subprocess.run(["unshare", "-m", "sh", "-c", mount]).returncode:
        # Only root mounts, and not in every container; where it can, the disk is really full.
        pytest.skip("nothing can be mounted here")
    fetch = f"exec '{sys.executable}' -m neurogrid.hub.fetching org/model main"
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"{mount} && {fetch}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"},
    ) as process:
        yield process


def failure(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    (*_, last) = process.stdout
    assert json.loads(last)["event"] == "failed"
    return str(json.loads(last)["text"])


def test_no_room_is_known_before_anything_comes(hub: Hub, tmp_path: Path) -> None:
    with fetching_to(tmp_path, "16M") as process:
        says = failure(process)
    assert says.startswith(
        f"org/model needs 402.0 kB more in {tmp_path}/hub, where 16.8 MB are free"
    )
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]


def test_a_disk_that_somebody_fills_meanwhile(hub: Hub, tmp_path: Path) -> None:
    hub.faults.append(Fault("model.safetensors", seconds_a_piece=0.3))
    with fetching_to(tmp_path, "20M") as process:
        assert process.stdout is not None
        while json.loads(process.stdout.readline())["event"] != "came":
            pass
        with suppress(OSError), Path(f"/proc/{process.pid}/root{tmp_path}/x").open("wb") as other:
            other.write(bytes(20 * 1024 * 1024))
        says = failure(process)
    assert f"the disk of {tmp_path}/hub is full (No space left on device) before org/model" in says


def test_a_quota_that_is_reached(hub: Hub, tmp_path: Path) -> None:
    """What came is kept, and goes on when there is room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        says = trio.run(refused)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "is full (File too large) before org/model was whole: make room, or set HF_HOME" in says
    assert partials(tmp_path)[0].stat().st_size == 100_000
    assert content(trio.run(fetched)) == FILES
    assert hub.gets("model.safetensors") == [0, 100_000]


async def test_a_process_that_ends_without_a_word(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "soon")  # which the library does not survive
    says = await refused()
    assert says.startswith("the process that fetches models ended with status 1: ValueError: ")


def test_it_ends_with_whoever_started_it(hub: Hub, tmp_path: Path) -> None:
    hub.faults.append(Fault("model.safetensors", stall_at=100_000))
    program = (
        "import trio; from neurogrid.hub.download import *; from neurogrid.hub.names import *\n"
        "class P(DownloadProgress):\n    def came(self, there): print('x', flush=True)\n"
        "trio.run(download, ModelName('org/model'), P())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"x\n"
        threads = Path(f"/proc/{process.pid}/task").glob("*/children")
        (child,) = (int(pid) for file in threads for pid in file.read_text().split())
        # A child of ours, once its parent is gone, so that its end can be waited for.
        watch = os.pidfd_open(child)
        process.send_signal(signal.SIGKILL)
    try:
        poll = select.poll()
        poll.register(watch)
        assert poll.poll(DEADLINE * 1000)
    finally:
        os.close(watch)


@pytest.mark.parametrize(
    ("before", "is_off"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)]
)
def test_the_variables_of_the_library_switch_it_off(
    before: str | None, is_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setattr("neurogrid.hub.download.HUB_OFFLINE_BEFORE", before)
    assert is_switched_off() is is_off
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert is_switched_off() is (is_off or not before)
