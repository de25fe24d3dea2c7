"""A leader that dies, or stands still: its deputy goes on with the run, and nobody acts on two journals."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.runs.entries import DealtEntry, DeputyEntry, Entry, LedEntry, RoundEntry
from neurogrid.training.runs.journal import Journal, read_journal
from neurogrid.training.runs.verdict import verify_journal
from tests.e2e import preloaded
from tests.e2e.preloaded import DEADLINE, TRAIN, Popen
from tests.e2e.training.run_processes import (
    RUN_FILE,
    RunProcesses,
    entries_of,
    open_run,
    used_samples,
)
from tests.ports import free_port

FILE = (
    RUN_FILE
    + "[stop]\nepochs = 1000\n[outer]\nevery = 8\nfragments = 2\ngrace = 2.0\n"
    + "[members]\nmin = 2\n[checkpoints]\nevery = 8\n"
)
NAMES = ("a", "b", "c")


class Deputy:
    """A deputy of a run, in its directory.

    Args:
        copy: its directory, below that of the run's inputs.
    """

    def __init__(
        self, run: RunProcesses, copy: str = "copy", *, options: Sequence[str] = ()
    ) -> None:
        self._run, self._name = run, copy
        joins = self._ticket(run) if copy == "copy" else ()
        self._log = (run.directory / f"{copy}.log").open("a")
        self.process = Popen(
            [
                *(*TRAIN, "deputy", copy, *joins, "--threads", "1", "--name", "deputy"),
                *("--wait", "60", *(options or ("--listen", "/ip4/127.0.0.1/tcp/0"))),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=run.directory,
        )

    def _ticket(self, run: RunProcesses) -> tuple[str, ...]:
        ticket = run.directory / "deputy-ticket"
        made = preloaded.run(
            [*TRAIN[:-1], "ticket", "run/cluster", "--deputy", "--ticket-file", str(ticket)],
            cwd=run.directory,
        )
        assert made.returncode == 0, made.stderr
        return "--join", f"@{ticket}"

    @property
    def copy(self) -> Path:
        """The directory of its copy."""
        return self._run.directory / self._name

    @property
    def log(self) -> str:
        """What it said."""
        return (self._run.directory / f"{self._name}.log").read_text()

    def wait(self, text: str) -> None:
        """Wait until it says something."""
        until = time.monotonic() + DEADLINE
        while text not in self.log:
            assert time.monotonic() < until, (self.log, self._run.log)
            assert self.process.poll() is None, self.log
            time.sleep(0.02)

    def wait_for(self, line: int, kind: type[Entry]) -> None:
        """Wait until its journal has such an entry behind a line, and behind that by which it leads."""
        until = time.monotonic() + DEADLINE
        while True:
            entries = entries_of(self.copy)[line:]
            led = [n for n, entry in enumerate(entries) if isinstance(entry, LedEntry)]
            if led and any(isinstance(entry, kind) for entry in entries[led[0] :]):
                return
            assert time.monotonic() < until, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.05)

    def end(self) -> Path:
        """Wait for the end of the run, which it has led."""
        stdout, _ = self.process.communicate(timeout=DEADLINE)
        assert self.process.returncode == 0, self.log
        return self._run.directory / stdout.removesuffix("\n")

    def close(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


@contextmanager
def open_deputy(directory: Path) -> Iterator[tuple[RunProcesses, Deputy]]:
    """A run with three members that has made some rounds, and a deputy that has all of its journal."""
    with open_run(directory, free_port(), FILE, num_words=6000) as run:
        run.lead()
        for name in NAMES:
            run.join(name)
        run.wait(lambda: (run.run / "cluster" / "whereabouts").exists(), "it listens nowhere")
        deputy = Deputy(run)
        try:
            run.wait(lambda: all(f"{name} takes part" in run.log for name in NAMES), "one lacks")
            run.wait(lambda: "deputy is the deputy" in run.log, "there is no deputy")
            run.wait_round(run.rounds() + 3)
            yield run, deputy
        finally:
            deputy.close()


def check(deputy: Deputy, before: int, epochs: int) -> None:
    """The run went on, by the deputy's journal: all of it once, and under its own signature."""
    entries = entries_of(deputy.copy)
    (led,) = (number for number, entry in enumerate(entries) if isinstance(entry, LedEntry))
    assert led >= before
    assert any(isinstance(entry, RoundEntry) for entry in entries[led:])
    assert not [entry for entry in entries if entry.kind == "resumed"]
    used = used_samples(deputy.copy)
    manifest = Manifest.decode((deputy.copy / "data" / "manifest.json").read_bytes())
    assert set(used.values()) == {epochs}
    assert len(used) == manifest.num_samples
    verdict = verify_journal(deputy.copy)
    assert verdict.is_whole, verdict.problem
    assert verdict.end is not None


def test_a_deputy_goes_on_where_its_leader_was_killed(tmp_path: Path) -> None:
    with open_deputy(tmp_path) as (run, deputy):
        run.kill()
        killed_at = time.monotonic()
        before = len(entries_of(run.run))
        deputy.wait("this deputy leads from here on")
        took = time.monotonic() - killed_at
        began = time.time() - took
        # Started again, it sees that another one leads.
        run.lead("--resume")
        assert run.leader is not None
        assert run.leader.wait(DEADLINE) == 1
        assert "leads the run since term 1" in run.log
        epochs = run.end_with_epoch(deputy.copy)
        checkpoint = deputy.end()
        assert (checkpoint / "tokenizer.json").is_file()
        assert took < 60
    check(deputy, before, epochs)
    recorded = read_journal(deputy.copy / "journal")
    led, dealt, round_ = (
        next(each.time for each in recorded[before:] if isinstance(each.entry, kind)) - began
        for kind in (LedEntry, DealtEntry, RoundEntry)
    )
    print(f"\nafter the kill: led {led:.2f} s, dealt {dealt:.2f} s, next round {round_:.2f} s")
    # What the leader wrote last the deputy has, too.
    assert entries_of(deputy.copy)[:before] == entries_of(run.run)


def test_a_leader_that_stood_still_leads_no_more(tmp_path: Path) -> None:
    with open_deputy(tmp_path) as (run, deputy):
        assert run.leader is not None
        run.leader.send_signal(signal.SIGSTOP)
        before = len(entries_of(run.run))
        deputy.wait("this deputy leads from here on")
        run.leader.send_signal(signal.SIGCONT)
        assert run.leader.wait(DEADLINE) == 1
        assert "leads the run since term 1" in run.log
        epochs = run.end_with_epoch(deputy.copy)
        deputy.end()
        # It has written nothing since, or nothing that anybody followed: what it dealt none.
        after = entries_of(run.run)[before:]
        assert not [entry for entry in after if entry.kind in ("dealt", "round")], after
    check(deputy, before, epochs)


def test_who_led_comes_back_as_the_deputy_and_leads_again(tmp_path: Path) -> None:
    """Two takeovers: the machine that began the run stands by after the first, and the second makes it the leader."""
    with open_deputy(tmp_path) as (run, deputy):
        assert run.leader is not None
        run.leader.send_signal(signal.SIGSTOP)
        deputy.wait_for(len(entries_of(run.run)), RoundEntry)
        run.kill()
        # It has a line that nobody followed: as if it had been killed while it wrote.
        identity = Identity.load(run.run / "cluster" / "identity.key")
        with Journal.open(run.run / "journal", identity) as journal:
            journal.append(DeputyEntry(time.time_ns() // 1000, ""))
        back = Deputy(run, "run", options=("--listen", f"/ip4/127.0.0.1/tcp/{run.port}"))
        try:
            back.wait("the journal has lines that nobody has followed: it is journal.of-term-0")
            deputy.wait("deputy is the deputy: it has all of the journal")
            # Members have yet to be told: one more time than of the first deputy, and that there is none.
            told = [run.directory / f"{name}.log" for name in NAMES]
            until = time.monotonic() + DEADLINE
            while any(path.read_text().count("the leader's deputy is 1") < 2 for path in told):
                assert time.monotonic() < until, deputy.log
                time.sleep(0.05)
            kinds = [entry.kind for entry in entries_of(deputy.copy)]
            before = kinds.index("led") + 1  # of the end the other may lack a line
            deputy.process.kill()
            deputy.process.wait(DEADLINE)
            back.wait_for(before, RoundEntry)
            entries = entries_of(back.copy)
            assert [entry.term for entry in entries if isinstance(entry, LedEntry)] == [1, 2]
            assert len({entry.round for entry in entries if isinstance(entry, RoundEntry)}) == len(
                [entry for entry in entries if isinstance(entry, RoundEntry)]
            )
            verdict = verify_journal(back.copy)
            assert verdict.is_whole, verdict.problem
            # Of before: it is as it was, and its last line stands in no other journal.
            laid_aside = read_journal(run.run / "journal.of-term-0")
            assert laid_aside[-1] not in read_journal(back.copy / "journal")
        finally:
            back.close()


def test_a_leader_goes_on_without_its_deputy(tmp_path: Path) -> None:
    """When half of the members have said that they have none."""
    with open_deputy(tmp_path) as (run, deputy):
        deputy.process.kill()
        deputy.process.wait(DEADLINE)
        before = len(entries_of(run.run))
        run.wait(lambda: "the run goes on without a deputy" in run.log, "it waits for its deputy")
        run.wait_round(run.rounds() + 2)
        after = entries_of(run.run)[before:]
        (dropped,) = (n for n, entry in enumerate(after) if isinstance(entry, DeputyEntry))
        assert [entry for entry in after[dropped:] if entry.kind == "round"]
        verdict = verify_journal(run.run)
        assert verdict.is_whole, verdict.problem


def test_leader_and_members_that_come_back_have_their_deputy_again(tmp_path: Path) -> None:
    """The deputy asks meanwhile, and nobody that it could ask is there any more."""
    with open_deputy(tmp_path) as (run, deputy):
        run.kill()
        for name in NAMES:
            run.kill(name)
        before = run.rounds()
        deputy.wait("asking the members for term 1")
        run.lead("--resume")
        for name in NAMES:
            run.join(name)
        deputy.wait("this deputy copies the run again")
        run.wait_round(before + 2)
        log = run.log
    assert "the run goes on without a deputy" not in log
    assert "this deputy leads" not in deputy.log


def test_a_run_in_stages_has_no_deputy(tmp_path: Path) -> None:
    """That is said at once, and is not asked for again."""
    text = RUN_FILE + "[stop]\nsteps = 100000\n[layout]\nstages = 2\n"
    with open_run(tmp_path, free_port(), text, num_words=6000) as run:
        run.lead()
        run.wait(lambda: (run.run / "cluster" / "whereabouts").exists(), "it listens nowhere")
        deputy = Deputy(run)
        try:
            assert deputy.process.wait(DEADLINE) == 2, deputy.log
            assert "a run in stages has no deputy" in deputy.log
        finally:
            deputy.close()
