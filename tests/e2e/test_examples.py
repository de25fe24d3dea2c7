"""Each example, run as its reader would run it: in processes of its own, its output compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e import preloaded

EXAMPLES = Path(__file__).parents[2] / "examples"
# The machines are shared, and slow at times; nothing here measures speed.
DEADLINE = 240.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PEER_ID = r"12D3KooW\w+"
# The embedded model knows the Python reference by heart.
FUNCTION_DEFINITION = " is an executable statement. Its execution binds the function name"


def complete(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run an example to its end, good or bad."""
    return preloaded.run([sys.executable, EXAMPLES / name, *args])


def run(name: str, *args: str, log: str = "") -> str:
    """What an example prints; it has to end well, and to log `log` and nothing else."""
    done = complete(name, *args)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(log, done.stderr), done.stderr
    return done.stdout


class Server:
    """An example that has printed its address, and serves."""

    def __init__(self, process: preloaded.Popen, log: Path, *, prints_address: bool = True) -> None:
        self._process = process
        self.log = self._log = log
        if prints_address:
            self.address = self.read_line()
            assert re.fullmatch(f"/ip4/127.0.0.1/tcp/[0-9]+/p2p/{PEER_ID}", self.address)

    def ends(self) -> list[str]:
        """What it still prints until it ends, well."""
        assert self._process.stdout is not None
        lines = self._process.stdout.read().splitlines()
        assert self._process.wait(DEADLINE) == 0, self._log.read_text()
        return lines

    def read_line(self) -> str:
        """The next line that it prints."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it ended: {self._log.read_text()}"
        return line.removesuffix("\n")

    def read_lines(self, number: int) -> list[str]:
        return [self.read_line() for _ in range(number)]


@contextmanager
def found_run(directory: Path, name: str) -> Iterator[Server]:
    """Run an example that founds a run, which says on stderr how to join it, until the block is left."""
    log = directory / f"{name}.log"
    with log.open("w") as stderr:
        process = preloaded.Popen(
            [sys.executable, EXAMPLES / name], stdout=subprocess.PIPE, stderr=stderr
        )
    deadline = threading.Timer(DEADLINE, process.kill)
    deadline.start()
    with process:
        try:
            yield Server(process, log, prints_address=False)
        finally:
            deadline.cancel()
            process.kill()


@contextmanager
def serve(directory: Path, name: str, *args: str, complains: bool = False) -> Iterator[Server]:
    """Run an example until the block is left, or the deadline. It logs something if it `complains`."""
    log = directory / f"{name}-{len(list(directory.glob('*.log')))}.log"
    with log.open("w") as stderr:
        process = preloaded.Popen(
            [sys.executable, EXAMPLES / name, *args], stdout=subprocess.PIPE, stderr=stderr
        )
    # Ends a wait for a line that never comes.
    deadline = threading.Timer(DEADLINE, process.kill)
    deadline.start()
    with process:
        try:
            yield Server(process, log)
            assert process.poll() in (None, 0), log.read_text()
        finally:
            deadline.cancel()
            process.kill()
    assert bool(log.read_text()) == complains, log.read_text()


def test_the_tutorial(tmp_path: Path) -> None:
    with serve(tmp_path, "receive_array.py") as receiver:
        assert run("send_array.py", receiver.address) == "[[ 0.  2.  4.]\n [ 6.  8. 10.]]\n"
        assert re.fullmatch(rf"F32 \(2, 3\) from {PEER_ID}", receiver.read_line())


def test_the_tutorial_has_under_40_lines() -> None:
    names = ("receive_array.py", "send_array.py")
    assert sum(len((EXAMPLES / name).read_text().splitlines()) for name in names) < 40


def test_torch_request(tmp_path: Path) -> None:
    with serve(tmp_path, "torch_request.py") as server:
        assert run("torch_request.py", server.address).splitlines() == [
            "layer 0: torch.bfloat16 [1, 4, 8], 1.5",
            "layer 1: torch.bfloat16 [1, 4, 8], 4.5",
            "layer 2: torch.bfloat16 [1, 4, 8], 7.5",
        ]


def test_blocking_torch(tmp_path: Path) -> None:
    with serve(tmp_path, "blocking_torch.py") as second_half:
        assert run("blocking_torch.py", second_half.address) == "equal to the whole: True\n"


def test_data_parallel(tmp_path: Path) -> None:
    log = tmp_path / "first"
    with (
        log.open("w") as stderr,
        preloaded.Popen(
            [sys.executable, EXAMPLES / "data_parallel.py", "0", "2"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as first,
    ):
        deadline = threading.Timer(DEADLINE, first.kill)
        deadline.start()
        try:
            while not (file := re.search(r"NEUROGRID_TICKET=\$\(cat (\S+)\)", log.read_text())):
                assert first.poll() is None, log.read_text()
                time.sleep(0.05)
            second = preloaded.run(
                [sys.executable, EXAMPLES / "data_parallel.py", "1", "2"],
                env={**ENVIRONMENT, "NEUROGRID_TICKET": Path(file[1]).read_text().strip()},
            )
            assert second.returncode == 0, second.stderr
            assert first.wait(DEADLINE) == 0, log.read_text()
        finally:
            deadline.cancel()
            first.kill()
        assert first.stdout is not None
        said = first.stdout.read()
    assert said == second.stdout
    steps = re.fullmatch(r"step 0: loss (\S+)\nstep 50: loss (\S+)\nstep 100: loss (\S+)\n", said)
    assert steps is not None, said
    assert float(steps[1]) > 1
    assert float(steps[3]) < 0.01


def test_from_asyncio() -> None:
    assert run("from_asyncio.py") == "b'ynam' b'ta' b'ecno'\n"


def test_transports() -> None:
    assert run("transports.py") == "computed, here, there\n"


def test_weights(tmp_path: Path) -> None:
    with serve(tmp_path, "weights.py") as receiver:
        assert run("weights.py", receiver.address) == "layer 7 is usable there\n"
        assert receiver.read_lines(3) == [
            "layer 7: 1 of 3 chunks",
            "layer 7: 2 of 3 chunks",
            "layer 7: 3 of 3 chunks",
        ]


def test_traces(tmp_path: Path) -> None:
    with serve(tmp_path, "traces.py") as server:
        asked, answered = run("traces.py", server.address).splitlines()
        trace_id = asked.removeprefix("asked in trace ")
        assert re.fullmatch("[0-9a-f]{32}", trace_id)
        assert answered == f"answered in trace {trace_id}"
        assert server.read_line() == f"served in trace {trace_id}"


def test_transfer(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(8 * 1024 * 1024))
    with serve(tmp_path, "transfer.py", str(tmp_path / "store")) as taker:
        stopped = run("transfer.py", taker.address, str(file), "4")
        assert re.fullmatch(r"gave up after [4-6] MiB\n", stopped)
    # Another process, and another peer id.
    with serve(tmp_path, "transfer.py", str(tmp_path / "store")) as taker:
        resumed = run("transfer.py", taker.address, str(file))
        there, went = map(int, re.findall(r"([0-9]+) MiB", resumed))
        assert there >= 1
        assert there + went == 8
        assert re.fullmatch(r"\w{64}\.blob: 8388608 B, verified", taker.read_line())
        again = run("transfer.py", taker.address, str(file))
        assert again == "8 MiB were there, 0 MiB went\n"
    (stored,) = (tmp_path / "store").glob("*.blob")
    assert stored.read_bytes() == file.read_bytes()


def test_fetch(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_bytes(name.encode() * 1_000_000)
    with (
        serve(tmp_path, "fetch.py", "give", str(tmp_path / "other"), complains=True) as ignorant,
        serve(tmp_path, "fetch.py", "give", str(tmp_path / "one")) as giver,
    ):
        blob_id = giver.read_line()
        addresses = (ignorant.address, giver.address)
        failed, fetched = run("fetch.py", "get", blob_id, *addresses, log=".*\n").splitlines()
        assert re.fullmatch(rf"{PEER_ID} failed: .*blob {blob_id} is not here", failed)
        assert fetched == f"3000000 B from {giver.address.rpartition('/')[2]}"


def test_identity(tmp_path: Path) -> None:
    args = (str(tmp_path / "peer.key"), "/ip4/127.0.0.1/tcp/0")
    with serve(tmp_path, "identity.py", *args) as host:
        peer_id = host.address.rpartition("/")[2]
    with serve(tmp_path, "identity.py", *args) as host:
        assert host.address.endswith(f"/p2p/{peer_id}")
        # Any example that dials will do; this host serves no tensors.
        done = complete("send_array.py", host.address)
        assert "cannot open a stream" in done.stderr
        here, gone = host.read_lines(2)
        assert re.fullmatch(f"{PEER_ID} is here", here)
        assert gone == here.replace("is here", "is gone")


def test_handlers() -> None:
    log = f".*refused ACTIVATION of {PEER_ID}: layer 12 is not here\n"
    assert run("handlers.py", log=log).splitlines() == [
        "layer 3 is asked for",
        "b'HIDDEN STATE'",
        "layer 12 is asked for",
        "LAYER_NOT_HELD: layer 12 is not here; again in 30 s",
    ]


def test_failover() -> None:
    # It says what it refused.
    assert run("failover.py", log="(?s).+").splitlines() == [
        "PeerUnreachableError; the next one",
        "busy with another; the next one",
        "b'HIDDEN STATE'",
    ]


def test_timeouts() -> None:
    assert run("timeouts.py").splitlines() == [
        "ResponseTimeout; worth a retry: True",
        "cancelled: True",
        "the connection is as good as before: b'done'",
    ]


def test_control() -> None:
    printed = run("control.py").splitlines()
    # Nothing answers a model config, so it may be told of a little later.
    assert sorted(printed) == [
        "a GPU: 23 GiB free",
        "it has layers (1, 2)",
        "now it has layers (1, 2, 3)",
        "the config of tiny came",
    ]


def test_versions() -> None:
    assert run("versions.py").splitlines() == [
        "spoken with it: /neurogrid/tensor/1.0.0",
        "64 B, envelope: None",
        "0.5",
        "1.0.0 carries float16 and nothing else, and this tensor is F32: convert it",
    ]


def test_counters() -> None:
    printed = run("counters.py")
    assert '"activation": {\n        "num_messages": 3,' in printed
    # 101,010 bytes of tensors, with a header of 25 bytes and an envelope each.
    total = re.search(r"^3 activations, ([0-9]+) B with their headers$", printed, re.MULTILINE)
    assert total is not None
    assert 101_010 + 3 * 25 < int(total[1]) < 101_010 + 3 * 200


def test_decode_stream() -> None:
    assert run("decode_stream.py").splitlines() == [
        "RESPONSE of layer 0: 100 B",
        "RESPONSE of layer 1: 100 B",
        "RESPONSE of layer 2: 100 B",
        "then: the stream ended after 1 of 2 bytes of data",
    ]


def test_a_users_own_tests() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", EXAMPLES / "test_with_memory_network.py"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


def test_generate() -> None:
    assert run("generate.py").startswith(FUNCTION_DEFINITION)


def test_generate_on_a_worker_elsewhere(tmp_path: Path) -> None:
    with serve(tmp_path, "worker.py") as worker:
        assert run("generate_blocking.py", worker.address).startswith(FUNCTION_DEFINITION)


def test_many_at_once(tmp_path: Path) -> None:
    with serve(tmp_path, "worker_blocking.py") as worker:
        lines = run("many_at_once.py", worker.address).splitlines()
    prompts = ["A function definition", "A class definition", "The for statement"]
    assert [line.partition(":")[0] for line in lines] == prompts
    assert lines[0].startswith(f"A function definition:{FUNCTION_DEFINITION[:40]}")
    assert all(len(line) > len(prompt) + 20 for line, prompt in zip(lines, prompts, strict=True))


def test_a_model_needs_fifteen_lines_at_most() -> None:
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        if "neurogrid import" in text and "Settings" in text:
            assert len(text.splitlines()) <= 15, path.name


def test_no_example_is_left_out() -> None:
    """And each says at its top what it shows and how to run it."""
    tested = Path(__file__).read_text(encoding="utf-8")
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in tested
        assert f"[{example.name}]({example.name})" in listed
        head = example.read_text(encoding="utf-8").split('"""')[1]
        assert re.search(rf"(python|pytest) examples/{example.name}", head), example.name


def test_average(tmp_path: Path) -> None:
    with serve(tmp_path, "average.py", "1") as first:
        assert run("average.py", "5", first.address) == "round 3 of 2: [30.0, 30.0, 30.0]\n"
        assert first.read_line() == "round 3 of 2: [30.0, 30.0, 30.0]"
        first.ends()


def invitation(log: Path) -> str:
    """What the first member of a run prints for the others."""
    deadline = time.monotonic() + DEADLINE
    while not (found := re.search(r"others join this run with: (\S+)", log.read_text())):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return found[1]


def test_train_together(tmp_path: Path) -> None:
    with found_run(tmp_path, "train_together.py") as first:
        rounds = run("train_together.py", invitation(first.log), log="(?s).*").splitlines()
        assert len(rounds) == 4
        for number, line in enumerate(rounds, 1):
            assert re.fullmatch(rf"round {number} of 2 members, loss [0-9.]+", line)
        assert first.read_lines(1)[0].startswith("round 1 of 2 members")
        first.ends()


def test_train_with_trainer(tmp_path: Path) -> None:
    with found_run(tmp_path, "train_with_trainer.py") as first:
        other = run("train_with_trainer.py", invitation(first.log), log="(?s).*").splitlines()[-1]
        assert re.fullmatch(r"sum of all weights: -?[0-9.]+", other)
        assert first.ends()[-1] == other
