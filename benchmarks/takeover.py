"""How soon does a deputy go on with a run whose leader is killed or stands still, and does that one do anything more?

    python benchmarks/takeover.py [--kills 5] [--stops 5] [--grace 2] [--no-file]

A leader, its deputy and three members on one machine, in processes of their own; a run for each time. A leader that
stands still is let go on when the deputy leads. Times are by the deputy's journal, from the signal on: when it leads,
when it has dealt again, when the first round after that is decided. Each journal is verified, and what the old leader
wrote after the signal is looked through.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from report import spread, table, write_report

from neurogrid.training.runs.entries import DealtEntry, LedEntry, RoundEntry
from neurogrid.training.runs.journal import Recorded, read_journal
from neurogrid.training.runs.verdict import verify_journal
from tests.e2e.preloaded import DEADLINE
from tests.e2e.training.test_deputies import Deputy, open_deputy

KINDS = {"the deputy leads": LedEntry, "it has dealt": DealtEntry, "the next round": RoundEntry}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--grace", type=float, default=2.0)
    parser.add_argument("--no-file", action="store_true")
    options = parser.parse_args()
    rows = []
    for what, number, measure in (
        ("killed", options.kills, _kill),
        ("stopped", options.stops, _stop),
    ):
        found: dict[str, list[float]] = {}
        for _ in range(number):
            with tempfile.TemporaryDirectory() as directory:
                for name, seconds in measure(Path(directory), options.grace).items():
                    found.setdefault(name, []).append(seconds)
                    print(f"{what}: {name} after {seconds:.2f} s", flush=True)
        rows += [_row(f"{what}: {name}", seconds) for name, seconds in found.items()]
    header = ("what", "times", "least", "median", "most")
    if options.no_file:
        print(table(header, rows))
    else:
        text = (
            f"{table(header, rows)}\n\nFrom the signal on; for the old leader from when it goes on. The grace of the "
            f"group that averages is {options.grace:g} s. All journals were whole, and no old leader had dealt or "
            "noted a round after the signal.\n"
        )
        write_report("takeover", (__doc__ or "").partition("\n")[0], text)


def _row(what: str, seconds: Sequence[float]) -> tuple[str, ...]:
    return what, str(len(seconds)), *(f"{each:.2f} s" for each in spread(seconds))


def _kill(directory: Path, grace: float) -> dict[str, float]:
    with open_deputy(directory, grace=grace, epochs=40) as (run, deputy):
        at, before = time.time(), len(read_journal(run.run / "journal"))
        run.kill()
        for kind in KINDS.values():
            deputy.wait_for(before, kind)
        return _times(deputy, before, at)


def _stop(directory: Path, grace: float) -> dict[str, float]:
    with open_deputy(directory, grace=grace, epochs=40) as (run, deputy):
        assert run.leader is not None
        at = time.time()
        run.leader.send_signal(signal.SIGSTOP)
        before = len(read_journal(run.run / "journal"))
        deputy.wait("this deputy leads from here on")
        run.leader.send_signal(signal.SIGCONT)
        continued = time.time()
        status = run.leader.wait(DEADLINE)
        ended = time.time() - continued
        assert status == 1, run.log
        for kind in KINDS.values():
            deputy.wait_for(before, kind)
        for each in read_journal(run.run / "journal")[before:]:
            assert not isinstance(each.entry, DealtEntry | RoundEntry), each
        return {**_times(deputy, before, at), "the old leader has ended": ended}


def _times(deputy: Deputy, before: int, at: float) -> dict[str, float]:
    recorded: tuple[Recorded, ...] = read_journal(deputy.copy / "journal")
    led = next(n for n, each in enumerate(recorded) if isinstance(each.entry, LedEntry))
    verdict = verify_journal(deputy.copy)
    assert verdict.is_whole, verdict.problem
    return {
        name: next(each.time for each in recorded[led:] if isinstance(each.entry, kind)) - at
        for name, kind in KINDS.items()
    }


if __name__ == "__main__":
    main()
