"""A child process that says what its owner does not expect."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from neurogrid.training.trainer import child as child_module
from neurogrid.training.trainer.child import Child, ChildEnded
from neurogrid.training.trainer.errors import TrainerError

PROGRAM = """
import sys
print({said!r}, flush=True)  # as some libraries do when they are imported
sys.stdin.buffer.read()
"""


@pytest.mark.parametrize("said", ["Welcome to a library of ours", "\0\0\0\5no map"])
async def test_what_is_no_answer_ends_the_process_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    (tmp_path / "noisy_program.py").write_text(PROGRAM.format(said=said))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(child_module, "running_fork_server", lambda: None)
    async with trio.open_nursery() as nursery:
        child = Child("trainer", "noisy_program", (), nursery)
        await child.start(threads=1)
        with pytest.raises(ChildEnded, match="to its standard output"):
            await child.exchange({"order": "begin"}, lambda _: None)
        assert child.pid is None


async def test_who_waits_for_a_process_that_another_task_ends_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that does not come to its beginning."""
    (tmp_path / "deaf_program.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(child_module, "running_fork_server", lambda: None)
    monkeypatch.setattr(child_module, "STOP_TIMEOUT", 0.2)
    async with trio.open_nursery() as nursery:
        child = Child("stage", "deaf_program", (), nursery)
        await child.start(threads=1)

        async def ask(size: int) -> None:
            with pytest.raises(ChildEnded, match="the stage's process"):
                await child.exchange({"order": bytes(size)}, lambda _: None)

        nursery.start_soon(ask, 8 * 1024**2)  # more than a pipe has room for
        await trio.sleep(0.2)
        await child.end()


FULL = """
from neurogrid.training.trainer import orders

pack = orders.pack

def pack_little(told):
    if "data" in told:
        raise MemoryError("no room for a frame")
    return pack(told)

orders.pack = pack_little

class Program:
    def __init__(self, order, answers):
        pass

    def opened(self):
        return {}

    def carry_out(self, order):
        return {"data": b"0"} if order["order"] == "forward" else {"done": True}

orders.serve_orders(Program)
"""


async def test_an_answer_that_there_is_no_memory_for_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the largest piece of a pass: a leader that hears of memory asks for smaller ones, and a process is left."""
    (tmp_path / "full_program.py").write_text(FULL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(child_module, "running_fork_server", lambda: None)
    async with trio.open_nursery() as nursery:
        child = Child("stage", "full_program", (), nursery)
        await child.start(threads=1)
        await child.exchange({"order": "begin"}, lambda _: None)
        with pytest.raises(TrainerError, match="there is no memory left to forward"):
            await child.exchange({"order": "forward"}, lambda _: None)
        assert await child.exchange({"order": "forget"}, lambda _: None) == {"done": True}
        await child.end()


ECHO = """
import time

from neurogrid.training.trainer import orders

class Program:
    def __init__(self, order, answers):
        self._answers = answers

    def opened(self):
        return {}

    def carry_out(self, order):
        if order["order"] == "end":  # in the midst of an answer
            first, second = orders.pack({"data": bytes(5000)})
            self._answers.write(first + second[:100])
            self._answers.close()
            time.sleep(0.3)  # as what has much to tidy up
            raise SystemExit(3)
        return {"tensor": {"data": order["data"], "size": len(order["data"])}}

orders.serve_orders(Program)
"""


async def test_what_is_long_goes_there_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo_program.py").write_text(ECHO)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(child_module, "running_fork_server", lambda: None)
    async with trio.open_nursery() as nursery:
        child = Child("stage", "echo_program", (), nursery)
        await child.start(threads=1)
        await child.exchange({"order": "begin"}, lambda _: None)
        for size in (0, 4095, 4096, 70_000, 3 * 1024**2):
            data = random.Random(size).randbytes(size)
            told = await child.exchange({"order": "echo", "data": data}, lambda _: None)
            assert told == {"tensor": {"data": data, "size": size}}
        with pytest.raises(ChildEnded, match="ended with status 3"):
            await child.exchange({"order": "end"}, lambda _: None)
