"""A run's newest checkpoint is served, by the workers that trained it."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.e2e.preloaded import DEADLINE
from tests.e2e.training.data_processes import (
    CONFIG,
    LOOPBACK,
    RunProcess,
    prepared_text,
    start,
    start_leader,
    start_run_worker,
    write_run_file,
)

NEUROGRID = (sys.executable, "-m", "neurogrid.cli.commands.main")
PROMPT = "one ring to"


def free_address() -> str:
    """A multiaddr that leader and server listen at, one after the other."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"


def expected_text(checkpoint: Path, num_tokens: int) -> str:
    """What transformers writes with it, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(made[0, ids.shape[1] :])


def url_of(server: RunProcess) -> str:
    assert server.process.stdout is not None
    url = server.process.stdout.readline().strip()
    assert url, server.log
    return url


def complete(url: str, num_tokens: int) -> httpx.Response:
    question = {
        "model": "run",
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
    }
    return httpx.post(f"{url}/v1/completions", json=question, timeout=DEADLINE)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_text(tmp_path_factory.mktemp("prepared") / "data")


def test_workers_that_have_trained_serve(prepared: Path, tmp_path: Path) -> None:
    """The same processes: neither the leader's end nor the run that they were in keeps them from it. They have the
    layers that they have trained, and no byte of those is sent."""
    write_run_file(tmp_path, str(prepared), rounds=2)
    where = ("--listen", free_address())
    with (
        start_leader(tmp_path, *where) as leader,
        start_run_worker(tmp_path, "worker-1") as first,
        start_run_worker(tmp_path, "worker-2") as second,
    ):
        checkpoint = tmp_path / leader.finish()
        serving = ("serve", "run", "--cluster", "run/cluster", "--min-peers", "2", "--stages", "2")
        options = ("--local-layers", "none", "--http-port", "0", "--max-seq-len", "128")
        with start(tmp_path, "server", *NEUROGRID, *serving, *options, *where) as server:
            answer = complete(url_of(server), 8)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected_text(checkpoint, 8)
            assert "sent" not in server.log
        for worker in (first, second):
            assert worker.process.poll() is None
            assert "takes part in run" in worker.log
            assert (
                "layers 0 to 0 are ready" in worker.log or "layers 1 to 1 are ready" in worker.log
            )


def write_checkpoint(run: Path, step: int, prepared: Path) -> Path:
    """A checkpoint as a leader leaves it, by chance; `latest` names it."""
    torch.manual_seed(step)
    checkpoint = run / "checkpoints" / f"step-{step}"
    # With tied ones, what stands in a text is what comes next, whatever the rest of the weights.
    config = AutoConfig.for_model(**{**CONFIG, "tie_word_embeddings": False})
    AutoModelForCausalLM.from_config(config).save_pretrained(checkpoint)
    for path in (prepared / "tokenizer").iterdir():
        shutil.copy(path, checkpoint)
    link = run / "checkpoints" / "new"
    link.symlink_to(checkpoint.name)
    link.replace(run / "checkpoints" / "latest")
    return checkpoint


def test_a_server_follows_a_run(prepared: Path, tmp_path: Path) -> None:
    """It begins before there is a checkpoint, and goes on when the one that it serves has been removed."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "journal").touch()
    serving = ("serve", "run", "--follow", "--local-workers", "1", "--http-port", "0")
    options = ("--max-seq-len", "128", *LOOPBACK)
    with start(tmp_path, "server", *NEUROGRID, *serving, *options) as server:
        server.wait_line("waiting for the first checkpoint")
        checkpoint = write_checkpoint(run, 8, prepared)
        expected = expected_text(checkpoint, 8)
        url = url_of(server)
        shutil.rmtree(checkpoint)
        assert complete(url, 8).json()["choices"][0]["text"] == expected
        newer = expected_text(write_checkpoint(run, 16, prepared), 8)
        assert newer != expected
        deadline = time.monotonic() + DEADLINE
        while (answer := complete(url, 8)).status_code != 200 or answer.json()["choices"][0][
            "text"
        ] == expected:
            assert answer.status_code in (200, 503), answer.text
            assert time.monotonic() < deadline, server.log
            time.sleep(0.2)
        assert answer.json()["choices"][0]["text"] == newer
        assert answer.json()["model"] == "run"
        (served,) = run.glob("checkpoints/.served-*/*")
        assert served.name == "step-16"
    assert not list(run.glob("checkpoints/.served-*"))


def test_what_is_no_run_is_not_followed(tmp_path: Path) -> None:
    with start(tmp_path, "server", *NEUROGRID, "serve", "--follow", "--http-port", "0") as server:
        assert server.process.wait(DEADLINE) == 2
    assert "--follow is for the directory of a training run" in server.log


def test_a_run_without_a_checkpoint_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal").touch()
    with start(tmp_path, "server", *NEUROGRID, "serve", "run", "--http-port", "0") as server:
        assert server.process.wait(DEADLINE) == 2
    assert "the training run in run has written no checkpoint yet" in server.log
