"""Programs in processes that the fork server makes: pipes, ends, and what is said of them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch  # noqa: F401 - with it here, the fork server is a fork, and there at once
import trio

from neurogrid.fork_server import forget_fork_server, fork_server
from neurogrid.training.trainer.child import Child, ChildEnded
from neurogrid.training.trainer.forked import ForkedProcess, start_forked

ECHO = "forked_echo"
SECONDS = 60.0


@pytest.fixture(autouse=True)
def _with_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server knows the programs of this folder."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    forget_fork_server()


@asynccontextmanager
async def echo() -> AsyncIterator[ForkedProcess]:
    process = await start_forked(fork_server(in_any_thread=True), ECHO, threads=1)
    try:
        with trio.fail_after(SECONDS):
            yield process
    finally:
        process.kill()
        await process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            await pipe.aclose()


async def ask(process: ForkedProcess, word: str) -> str:
    await process.stdin.send_all(f"{word}\n".encode())
    return (await process.stdout.receive_some(4096)).decode().strip()


async def test_it_reads_and_writes_by_its_pipes_alone() -> None:
    async with echo() as process:
        assert await ask(process, "hello") == "hello"
        assert await ask(process, "number") == str(process.pid) != str(os.getpid())
        assert await ask(process, "signals") == "[True, True]"
        assert await ask(process, "files") == "[0, 1, 2]"
        assert ECHO in Path(f"/proc/{process.pid}/cmdline").read_text()


async def test_its_end_is_told_as_that_of_any_process() -> None:
    async with echo() as process:
        await process.stdin.aclose()
        assert await process.wait() == process.returncode == 3
    async with echo() as process:
        os.kill(process.pid, signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL
    async with echo() as process:
        process.kill()
        assert await process.wait() == await process.wait() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


async def test_what_goes_wrong_in_it_is_told_on_its_standard_error() -> None:
    async with echo() as process:
        await process.stdin.send_all(b"fail\n")
        assert await process.wait() == 1
        assert b"ValueError: as it was told" in await process.stderr.receive_some(65536)


async def test_a_program_that_cannot_be_imported_says_why_and_others_go_on() -> None:
    async with echo() as other, trio.open_nursery() as nursery:
        child = Child("trainer", "neurogrid.there_is_none", (), nursery)
        await child.start(threads=1)
        with pytest.raises(ChildEnded, match="No module named"):
            await child.exchange({"order": "begin"}, lambda _: None)
        assert await ask(other, "hello") == "hello"


async def test_it_ends_with_the_fork_server_and_another_takes_its_place() -> None:
    async with echo() as process:
        forget_fork_server()
        assert await process.wait() == -signal.SIGKILL
    async with echo() as process:
        assert await ask(process, "hello") == "hello"


async def test_without_the_fork_server_a_process_is_started_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where that ends just when it is asked."""

    async def gone(*_: object, **__: object) -> ForkedProcess:
        raise OSError("it has ended")

    monkeypatch.setattr("neurogrid.training.trainer.child.start_forked", gone)
    fork_server(in_any_thread=True)
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            child = Child("trainer", "neurogrid.there_is_none", (), nursery)
            await child.start(threads=1)
            assert child.pid is not None
            with pytest.raises(ChildEnded, match="No module named"):
                await child.exchange({"order": "begin"}, lambda _: None)
