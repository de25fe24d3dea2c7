"""A model by its name: fetched from a hub on loopback, served on workers, and served again without the hub."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from neurogrid.model.embedded import embedded_model_path
from tests.e2e import preloaded
from tests.e2e.preloaded import DEADLINE, WORKER
from tests.gguf_models import make_gguf
from tests.hub import Fault, Hub, Repository, loopback_hub

NAME = "org/small"
PROMPT = "A function definition"
NEUROGRID = (sys.executable, "-m", "neurogrid.cli.commands.main")
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub() -> Iterator[Hub]:
    """One that has the model that comes along, and a pickle beside it."""
    with loopback_hub() as hub:
        files = {
            path.name: path.read_bytes()
            for path in embedded_model_path().iterdir()
            if path.suffix in (".json", ".jinja", ".safetensors")
        }
        hub.repositories[NAME] = Repository({"main": {**files, "pytorch_model.bin": b"no"}})
        yield hub


def run(hub: Hub, home: Path, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = hub.environment(home, **more)
    return preloaded.run([*NEUROGRID, *args], env=environment, stdin=subprocess.DEVNULL)


@contextmanager
def serving(hub: Hub, home: Path, *args: str) -> Iterator[str]:
    """`neurogrid serve` on two workers of this machine, at this URL."""
    options = ["--http-port", "0", "--listen", "/ip4/127.0.0.1/tcp/0", "--local-workers", "2"]
    with preloaded.Popen(
        [*NEUROGRID, "serve", *args, *options],
        env=hub.environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url
            yield url
            process.terminate()
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()


def written(url: str) -> str:
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=DEADLINE)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == NAME
    assert httpx.get(f"{url}/v1/models/{NAME}", timeout=DEADLINE).status_code == 200
    return str(answer.json()["choices"][0]["text"])


def test_fetched_served_and_served_again_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    directory = str(embedded_model_path())
    from_directory = preloaded.run([*NEUROGRID, "run", directory, PROMPT, "--max-tokens", "16"])
    assert from_directory.returncode == 0, from_directory.stderr
    hub.faults.append(Fault(WEIGHTS, times=1, cut_at=3_000_000))
    with serving(hub, tmp_path, NAME) as url:
        text = written(url)
        assert text == from_directory.stdout.removesuffix("\n")
        assert hub.gets(WEIGHTS) == [0, 3_000_000]
        assert hub.gets("pytorch_model.bin") == []
        # Whatever reads the model has it from the cache: nobody asks again.
        num_requests = len(hub.requests)
        assert written(url) == text
    assert len(hub.requests) == num_requests
    hub.repositories.clear()
    hub.requests.clear()
    words = ["run", "--model", NAME, PROMPT, "--max-tokens", "16"]
    done = run(hub, tmp_path, *words, "--offline")
    assert (done.returncode, done.stdout) == (0, from_directory.stdout), done.stderr
    # Nor without the flag: what is whole in the cache is taken as it is.
    done = run(hub, tmp_path, "plan", NAME, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert hub.requests == []


def test_a_model_in_gguf_by_name_and_quantisation(hub: Hub, tmp_path: Path) -> None:
    name = "org/small-GGUF"
    _, file = make_gguf("llama", ("Q4_K", "Q6_K"), ends="Q6_K")
    path = file.save(tmp_path / "small-Q4_K_M.gguf")
    data = path.read_bytes()
    files = {"small-Q4_K_M.gguf": data, "small-Q2_K.gguf": b"GGUF"}
    hub.repositories[name] = Repository({"main": files})
    here = preloaded.run([*NEUROGRID, "run", str(path), "the cat", "--max-tokens", "8"])
    home = tmp_path / "home"
    words = ["run", f"{name}:Q4_K_M", "the cat", "--max-tokens", "8"]
    done = run(hub, home, *words)
    assert (done.returncode, done.stdout) == (0, here.stdout), done.stderr
    assert hub.gets("small-Q2_K.gguf") == []
    done = run(hub, home, *words, "--offline")
    assert (done.returncode, done.stdout) == (0, here.stdout), done.stderr
    done = run(hub, home, "run", name, "the cat")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "org/small-GGUF has 2 models in GGUF: say which" in line


@pytest.mark.parametrize(
    ("args", "variables", "says"),
    [
        (
            ["serve", "org/none", "--http-port", "0"],
            {},
            "serve: there is no directory org/none here, and no model org/none at http://127.0.0.1:",
        ),
        (["plan", f"{NAME}@v9"], {}, "plan: org/small has no revision v9 at http://127.0.0.1:"),
        (
            ["chat", "--model", NAME, "--offline"],
            {},
            "hub, and --offline forbids to ask a hub for it",
        ),
        (
            ["download", NAME],
            {"HF_HUB_OFFLINE": "1"},
            "hub, and HF_HUB_OFFLINE forbids to ask a hub for it",
        ),
        (["download", "small"], {}, "download: 'small' is no name of a model at a hub"),
        (["run", f"./{NAME}", "text"], {}, "the model directory org/small does not exist"),
        # What is wrong besides is known before anything is fetched.
        (["serve", NAME, "--cluster", "/nowhere"], {}, "/nowhere"),
        (["serve", NAME, "--http-host", "192.0.2.1"], {}, "is not loopback"),
    ],
)
def test_what_cannot_be_served(
    args: list[str], variables: dict[str, str], says: str, hub: Hub, tmp_path: Path
) -> None:
    done = run(hub, tmp_path, *args, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert says in line
    assert not list(tmp_path.rglob("blobs/*"))


def test_a_worker_of_its_own_model_takes_a_name(hub: Hub, tmp_path: Path) -> None:
    with preloaded.Popen(
        [*WORKER, "--model", NAME, "--listen", "/ip4/127.0.0.1/tcp/0", "--disable-mdns"],
        env=hub.environment(tmp_path),
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("/ip4/127.0.0.1/tcp/")
        finally:
            process.terminate()
            process.wait(DEADLINE)


def test_ctrl_c_in_a_terminal_and_on_from_there(hub: Hub, tmp_path: Path) -> None:
    hub.faults.append(Fault(WEIGHTS, times=1, stall_at=2_000_000))
    master, slave = pty.openpty()
    try:
        # Which imports by itself what reads the environment then.
        with subprocess.Popen(
            [*NEUROGRID, "serve", NAME, "--http-port", "0"],
            # What stalls is not given up before the key is pressed.
            env=hub.environment(tmp_path, TERM="xterm", HF_HUB_DOWNLOAD_TIMEOUT="600"),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        ) as process:
            try:
                os.set_blocking(master, False)
                seen = _until(master, b"2.0/")
                process.send_signal(signal.SIGINT)
                seen += _until(master, b"from there")
                assert process.wait(DEADLINE) == 130
            finally:
                process.kill()
    finally:
        os.close(master)
        os.close(slave)
    assert f"fetching {NAME}: ".encode() in seen
    assert b"stopped with 2." in seen
    assert b"Traceback" not in seen
    (partial,) = tmp_path.rglob("*.incomplete")
    kept = partial.stat().st_size
    done = run(hub, tmp_path, "download", NAME)
    assert done.returncode == 0, done.stderr
    assert hub.gets(WEIGHTS) == [0, kept]
    assert Path(done.stdout.strip(), WEIGHTS).read_bytes() == (
        (embedded_model_path() / WEIGHTS).read_bytes()
    )


def _until(master: int, part: bytes) -> bytes:
    """What a terminal gets until this comes."""
    seen, deadline = b"", time.monotonic() + DEADLINE
    while part not in seen:
        assert time.monotonic() < deadline, seen
        try:
            seen += os.read(master, 65536)
        except BlockingIOError:
            time.sleep(0.01)
    return seen
