"""The backend `neurogrid` of torch.distributed, in real processes: each program once over gloo and once over ours."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import preloaded
from tests.e2e.rank_programs import FLOATS
from tests.ports import free_port

PROGRAMS = Path(__file__).with_name("rank_programs.py")
DEADLINE = 120.0
PEER_ID = r"12D3KooW\w+"


class Ranks:
    """The processes of one program."""

    def __init__(self, processes: Sequence[preloaded.Popen], directory: Path, backend: str) -> None:
        self.processes = processes
        self._directory = directory
        self._backend = backend

    def wait(self) -> list[int]:
        return [process.wait(DEADLINE) for process in self.processes]

    def results(self) -> list[dict[str, Any]]:
        """What each rank has left; all ended well."""
        codes = self.wait()
        assert codes == [0] * len(codes), self.failure(next(i for i, c in enumerate(codes) if c))
        return [
            torch.load(self._directory / f"{self._backend}-{rank}.pt")
            for rank in range(len(self.processes))
        ]

    def failure(self, process: int, *, rank: int | None = None) -> str:
        """How the rank of a process failed: seconds, and the error in one line. They are numbered alike by default."""
        assert self.processes[process].wait(DEADLINE) == 3
        rank = process if rank is None else rank
        return (self._directory / f"{self._backend}-{rank}.txt").read_text().split("\n\n")[0]

    def wait_begun(self) -> None:
        """Return when each has printed that it begins."""
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"


@contextmanager
def running(
    directory: Path,
    program: str,
    size: int,
    *,
    backend: str = "neurogrid",
    init_method: str = "",
    timeout: float = 120.0,
    present: Sequence[int] | None = None,
    env: Mapping[str, str] = preloaded.ENVIRONMENT,
) -> Iterator[Ranks]:
    """Run a program on some ranks, all by default; what is left of them at the end is killed."""
    store = init_method or f"file://{directory / f'{backend}-store'}"
    processes = [
        preloaded.Popen(
            [sys.executable, PROGRAMS, program, backend, store, str(rank), str(size)]
            + [str(directory), str(timeout)],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in (range(size) if present is None else present)
    ]
    try:
        yield Ranks(processes, directory, backend)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def over_both(
    directory: Path, program: str, size: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The results of a program over gloo and over ours, of each rank."""
    both = []
    for backend in ("gloo", "neurogrid"):
        with running(directory, program, size, backend=backend) as ranks:
            both.append(ranks.results())
    return both[0], both[1]


def assert_same(ours: Any, theirs: Any, name: str) -> None:
    """The same bits, in whatever they are."""
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), name
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{name} {key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), name
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other, name)
    else:
        assert ours == theirs, name


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The same but for the order in which four were added."""
    tolerance = 16 * torch.finfo(theirs.dtype).eps
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [2, 4])
def test_reductions_are_those_of_gloo(tmp_path: Path, size: int) -> None:
    """With two ranks bit for bit; with four gloo adds each piece in another order, and ours is that of ranks."""
    theirs, ours = over_both(tmp_path, "reductions", size)
    assert ours[0].keys() == theirs[0].keys()
    lacks = {name.split()[0] for name, tensor in theirs[0].items() if tensor is None}
    assert lacks <= {"AVG"}
    for name, tensor in theirs[0].items():
        for other in ours[1:]:
            assert_same(other[name], ours[0][name], name)
        if tensor is None:
            continue
        is_rounded = tensor.dtype in FLOATS and name.split()[0] in ("SUM", "AVG", "PRODUCT")
        if size == 2 or not is_rounded:
            assert_same(ours[0][name], tensor, name)
        else:
            assert_close(ours[0][name], tensor)


@pytest.mark.parametrize("size", [2, 4])
def test_movements_are_those_of_gloo(tmp_path: Path, size: int) -> None:
    """As with reductions, where they add."""
    theirs, ours = over_both(tmp_path, "movements", size)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert value is not None, f"gloo has no {name}"
            is_rounded = name.startswith(("reduce", "strided")) and value.dtype in FLOATS
            if size > 2 and is_rounded:
                assert_close(mine[name], value)
            else:
                assert_same(mine[name], value, name)


def test_data_parallel_training_has_the_bits_of_gloo_on_two_ranks(tmp_path: Path) -> None:
    theirs, ours = over_both(tmp_path, "ddp", 2)
    assert_same(ours, theirs, "ddp")


def test_data_parallel_training_on_four_ranks(tmp_path: Path) -> None:
    """All have the same bits; gloo's differ by the order of sums."""
    theirs, ours = over_both(tmp_path, "ddp", 4)
    for other in ours[1:]:
        for name in ("plain", "fp16"):
            assert_same(other[f"state {name}"], ours[0][f"state {name}"], name)
    for name, tensor in theirs[0]["state plain"].items():
        torch.testing.assert_close(ours[0]["state plain"][name], tensor, rtol=1e-4, atol=1e-6)


def test_fully_sharded_training_has_the_bits_of_gloo(tmp_path: Path) -> None:
    theirs, ours = over_both(tmp_path, "fsdp", 2)
    assert_same(ours, theirs, "fsdp")


def test_pipelining_has_the_bits_of_gloo(tmp_path: Path) -> None:
    theirs, ours = over_both(tmp_path, "pipelining", 2)
    assert_same(ours, theirs, "pipelining")


@pytest.mark.parametrize("program", ["endless", "endless_ddp"])
def test_a_rank_that_is_killed_is_named_at_once(tmp_path: Path, program: str) -> None:
    with running(tmp_path, program, 4, timeout=100.0) as ranks:
        ranks.wait_begun()
        time.sleep(0.5)  # somewhere in the middle of one
        ranks.processes[2].kill()
        killed = time.monotonic()
        failures = [ranks.failure(rank) for rank in (0, 1, 3)]
        assert time.monotonic() - killed < 50
    for failure in failures:
        assert re.search(rf"RankError: .*rank 2 \({PEER_ID}\) was lost", failure), failure


def test_a_rank_that_hangs_is_named_at_the_deadline(tmp_path: Path) -> None:
    with running(tmp_path, "endless", 3, timeout=6.0) as ranks:
        ranks.wait_begun()
        time.sleep(0.5)
        ranks.processes[1].send_signal(signal.SIGSTOP)
        failures = [ranks.failure(rank) for rank in (0, 2)]
    # Whichever comes to its deadline first says so to the other.
    at_deadline = (
        rf"all_reduce in process group \w+ did not end within 6 s: waited for rank 1 \({PEER_ID}\)$"
    )
    assert any(re.search(f"RankError: {at_deadline}", failure) for failure in failures), failures
    # What the other is to sum up may wait for the one that hangs, and is waited for in turn.
    other = rf"rank [02] \({PEER_ID}\)"
    for_both = (
        r"all_reduce in process group \w+ did not end within 6 s: waited for "
        rf"({other}, )?rank 1 \({PEER_ID}\)(, {other})?$"
    )
    for failure in failures:
        told = rf"rank [02] \({PEER_ID}\) failed: "
        assert re.search(f"RankError: ({told})?({at_deadline}|{for_both})", failure), failure


def test_a_receive_for_which_nothing_is_sent_names_the_rank(tmp_path: Path) -> None:
    with running(tmp_path, "hears_nothing", 2, timeout=4.0) as ranks:
        failures = [ranks.failure(rank) for rank in (0, 1)]
    assert re.search(rf"rank 1 \({PEER_ID}\)", failures[0]), failures[0]
    assert re.search(rf"rank 0 \({PEER_ID}\)", failures[1]), failures[1]
    # Whichever comes to its deadline first ends, and is lost to the other.
    at_deadline = (
        rf"in process group \w+ did not end within 4 s: waited for rank [01] \({PEER_ID}\)"
    )
    assert any(re.search(at_deadline, failure) for failure in failures), failures


def test_another_shape_is_told_from_a_lost_rank(tmp_path: Path) -> None:
    with running(tmp_path, "other_shapes", 2, timeout=60.0) as ranks:
        failures = [ranks.failure(rank) for rank in (0, 1)]
    assert any("20 B where 16 B belong" in failure for failure in failures), failures
    assert all("RankError" in failure for failure in failures), failures


@pytest.mark.parametrize("scheme", ["env", "tcp"])
def test_the_other_rendezvous_of_torch(tmp_path: Path, scheme: str) -> None:
    port = str(free_port())
    env = {**preloaded.ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    address = "env://" if scheme == "env" else f"tcp://127.0.0.1:{port}"
    with running(tmp_path, "barrier", 2, init_method=address, env=env) as ranks:
        assert ranks.results() == [{"rank": 0}, {"rank": 1}]


def test_what_was_sent_last_arrives_when_a_process_ends_without_a_word(tmp_path: Path) -> None:
    with running(tmp_path, "leaves", 2) as ranks:
        assert ranks.results() == [{"sum": 14_000_000.0}] * 2


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with running(tmp_path, "barrier", 4, timeout=3.0, present=[0, 1]) as ranks:
        failures = [ranks.failure(rank) for rank in (0, 1)]
    for failure in failures:
        assert failure.endswith("RankError: waited 3 s for ranks 2, 3"), failure


def test_ranks_find_each_other_by_a_ticket_in_a_file(tmp_path: Path) -> None:
    ticket = f"neurogrid://@{tmp_path / 'ticket'}"
    with running(tmp_path, "movements", 3, init_method=ticket) as ranks:
        ours = ranks.results()
    assert [result["objects"] for result in ours] == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3
    assert (tmp_path / "ticket").stat().st_mode & 0o777 == 0o600


def test_the_ticket_is_in_the_environment(tmp_path: Path) -> None:
    """Rank 0 says where it is; the others have the same command line, and the ticket in a variable."""
    with first_of_two(tmp_path) as (first, told):
        file = re.search(r"NEUROGRID_TICKET=\$\(cat (\S+)\)", told)
        assert file is not None, told
        env = {**preloaded.ENVIRONMENT, "NEUROGRID_TICKET": Path(file[1]).read_text().strip()}
        second = preloaded.run(
            [sys.executable, PROGRAMS, "barrier", "neurogrid", "neurogrid://", "1", "2", tmp_path],
            env=env,
        )
        assert second.returncode == 0, second.stderr
        assert first.wait(DEADLINE) == 0
    assert torch.load(tmp_path / "neurogrid-1.pt") == {"rank": 1}


def test_a_ticket_by_itself_is_enough(tmp_path: Path) -> None:
    with first_of_two(tmp_path) as (first, told):
        file = re.search(r"NEUROGRID_TICKET=\$\(cat (\S+)\)", told)
        assert file is not None, told
        ticket = Path(file[1]).read_text().strip()
        second = preloaded.run(
            [sys.executable, PROGRAMS, "barrier", "neurogrid", ticket, "1", "2", tmp_path],
            env=preloaded.ENVIRONMENT,
        )
        assert second.returncode == 0, second.stderr
        assert first.wait(DEADLINE) == 0


def test_no_ticket_and_a_wrong_one_say_what_to_do(tmp_path: Path) -> None:
    for address, said in (
        ("neurogrid://", "rank 1 needs the ticket that rank 0 shows: set NEUROGRID_TICKET"),
        ("neurogrid://ngt1abc", "the ticket is cut or altered"),
        ("nonsense", "this is no ticket"),
    ):
        with running(tmp_path, "barrier", 2, init_method=address, present=[1]) as ranks:
            assert f"ConfigurationError: {said}" in ranks.failure(0, rank=1)


def test_a_rank_zero_that_is_gone_is_named(tmp_path: Path) -> None:
    with first_of_two(tmp_path) as (first, told):
        file = re.search(r"NEUROGRID_TICKET=\$\(cat (\S+)\)", told)
        assert file is not None, told
        ticket = Path(file[1]).read_text().strip()
        first.kill()
        first.wait(DEADLINE)
    with running(
        tmp_path, "barrier", 2, init_method=f"neurogrid://{ticket}", timeout=3.0, present=[1]
    ) as ranks:
        failure = ranks.failure(0, rank=1)
    assert re.search(rf"RankError: rank 0 \({PEER_ID}\) was not reached within 3 s", failure), (
        failure
    )


@contextmanager
def first_of_two(directory: Path) -> Iterator[tuple[preloaded.Popen, str]]:
    """Rank 0 of two, and what it tells whoever starts the other."""
    with preloaded.Popen(
        [sys.executable, PROGRAMS, "barrier", "neurogrid", "neurogrid://", "0", "2", directory],
        stderr=subprocess.PIPE,
        text=True,
        env=preloaded.ENVIRONMENT,
    ) as process:
        try:
            assert process.stderr is not None
            yield process, process.stderr.readline()
        finally:
            process.kill()


def test_torch_knows_the_backend_by_itself(tmp_path: Path) -> None:
    """Where NeuroGrid is installed, nothing of it need be imported."""
    project = tomllib.loads((PROGRAMS.parents[2] / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["torch.backends"]
    metadata = tmp_path / "neurogrid_entry-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: neurogrid-entry\nVersion: 1\n")
    lines = "\n".join(f"{name} = {target}" for name, target in entries.items())
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{lines}\n")
    place = os.pathsep.join((str(tmp_path), str(PROGRAMS.parents[2])))
    for statement in ("import torch.distributed as d", "import neurogrid.training.distributed"):
        said = subprocess.run(
            [
                sys.executable,
                "-c",
                f"{statement}; import sys, torch.distributed as d; "
                "print('neurogrid' in d.Backend.backend_list, 'trio' in sys.modules)",
            ],
            env={**os.environ, "PYTHONPATH": place},
            capture_output=True,
            text=True,
            check=True,
        )
        assert said.stdout == "True False\n"
