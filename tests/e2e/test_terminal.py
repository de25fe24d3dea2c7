"""What somebody sees who has a coordinator before them: a panel, a conversation, lines that are not torn."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from neurogrid.model.embedded import embedded_model_path
from tests.e2e.preloaded import COORDINATOR, run
from tests.e2e.support import WorkerProcess
from tests.e2e.terminal import CTRL_C, CTRL_D, STYLES, on_terminal

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}\n{% else %}\n\n{% endif %}"
    "{% endfor %}"
)
HERE = ("--listen", "/ip4/127.0.0.1/tcp/0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, as one that was trained to answer would come."""
    directory = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(embedded_model_path(), directory, ignore=shutil.ignore_patterns("*.py"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def peers(workers: list[WorkerProcess]) -> list[str]:
    return [word for worker in workers for word in ("--peer", worker.address)]


def test_a_conversation_on_a_terminal(model: Path) -> None:
    args = (*HERE, "--local-workers", "2", "--model", str(model), "--max-tokens", "900")
    with on_terminal("coordinator", "--chat", *args, NO_COLOR="1") as terminal:
        terminal.wait("Ctrl-D ends")
        terminal.wait("you> ")
        terminal.type("A function definition\n")
        terminal.wait("A function definition\n")
        terminal.wait(" ")  # it writes
        terminal.type(CTRL_C)
        terminal.wait("stopped\n")
        terminal.wait("you> ")
        terminal.type(f"of no interest{CTRL_C}/stats\n")
        terminal.wait("/stats\n")
        assert re.match(
            r"1 turn, \d+ of 1024 tokens\nlast answer: \d+ tokens", terminal.wait("you> ")
        )
        # Ctrl-C ended neither the workers nor the line of thought.
        terminal.type("A class definition\n")
        terminal.wait("A class definition\n")
        terminal.wait(" ")
        terminal.type(CTRL_C)
        terminal.wait("stopped\n")
        terminal.type(CTRL_D)
        assert terminal.wait_end() == 0
        assert "lost worker" not in terminal.text
        assert "of no interest\n" not in terminal.text
        assert STYLES.findall(terminal.written) == []


def test_turns_by_a_pipe_and_logs_for_programs(workers: list[WorkerProcess], model: Path) -> None:
    chat = run(
        [
            *COORDINATOR,
            "--chat",
            "--json-logs",
            *HERE,
            *peers(workers[:1]),
            "--model",
            str(model),
            "--max-tokens",
            "8",
        ],
        input="A function definition\n\n/stats\nA class\n/quit\nnobody reads this\n",
    )
    assert chat.returncode == 0, chat.stderr
    told = [json.loads(line) for line in chat.stderr.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in told)
    by_event = {line["event"]: line for line in told if "event" in line}
    assert by_event["planned"]["num_layers"] == 8
    assert by_event["stage"]["peer_id"] == workers[0].peer_id
    messages = [line["message"] for line in told]
    assert messages.count("cut after 8 tokens (--max-tokens)") == 2
    assert any(text.startswith("1 turn, ") for text in messages)
    # What was written is the text alone.
    assert chat.stdout.endswith("\n")
    assert not any(text in chat.stdout for text in ("turn", "you>", "{", "\x1b"))


def test_a_panel_while_it_serves(tmp_path: Path) -> None:
    args = (*HERE, "--local-workers", "2", "--stages", "1", "--http-port", "0", "--no-cache")
    with on_terminal("coordinator", *args, columns=90) as terminal:
        terminal.wait("NeuroGrid · embedded, 8 layers  ready")
        terminal.wait("stands by")
        drawn = terminal.wait("╰─ http://127.0.0.1:")
        children = subprocess.run(
            ["pgrep", "-P", str(terminal.process.pid), "-f", "neurogrid.cli.commands.worker"],
            capture_output=True,
            text=True,
            check=True,
        )
        os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
        terminal.wait("lost: the stream to …")
        terminal.type(CTRL_C)
        assert terminal.wait_end() == 0
        assert "Traceback" not in terminal.text
        assert "│" in drawn


def test_a_worker_on_a_terminal_prints_its_address_and_then_a_panel() -> None:
    with on_terminal("worker", *HERE, "--no-cache") as terminal:
        terminal.wait("/ip4/127.0.0.1/tcp/")
        terminal.wait("waits for a coordinator")
        terminal.type(CTRL_C)
        assert terminal.wait_end() == 0
