"""Workers that a run cannot use, or that are not like the others: what its leader says, and how it goes on."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

from neurogrid.training.checkpoints import export
from tests.e2e.training.odd_worker import OLD_TORCH
from tests.e2e.training.run_processes import RUN_FILE, open_run, rounds_of
from tests.ports import free_port

SLOW = (sys.executable, str(Path(__file__).with_name("slow_worker.py")))
ODD = (sys.executable, str(Path(__file__).with_name("odd_worker.py")))
OTHER = (sys.executable, str(Path(__file__).with_name("other_model_worker.py")))


def test_one_is_too_small_and_one_is_odd(tmp_path: Path) -> None:
    """And the checkpoints are where the run file says; and a run that has ended is not prolonged."""
    run_file = (
        RUN_FILE
        + "[stop]\nrounds = 6\n[outer]\nevery = 4\nfragments = 2\n[members]\nmin = 2\n"
        + '[checkpoints]\ndir = "kept/here"\n'
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        run.lead()
        run.join("small", "--memory-limit", "512KiB")
        run.wait(lambda: "small takes no part yet" in run.log, "nobody said that it is too small")
        run.join("other", program=OTHER)
        run.wait(lambda: "other has failed" in run.log, "nobody said that its model is another")
        run.join("fine")
        run.join("odd", program=ODD)
        checkpoint = run.end()
        run.lead("--resume")
        assert run.end() == checkpoint
        odd = (tmp_path / "odd.log").read_text()
    assert re.search(
        r"small takes no part yet: 9[0-9]{2},[0-9]{3} bytes of memory \(0\.00 GiB\) are needed, and 524,288 "
        r"\(0\.00 GiB\) are lent \(--memory-limit\)",
        run.log,
    )
    assert f"odd has torch {OLD_TORCH} where most have {version('torch')}" in run.log
    assert "the weights are not finite any more" in odd
    assert "small takes part" not in run.log
    assert re.search(
        r"other has failed: the model has \d+ parameters here and \d+ with the leader: versions of transformers differ",
        run.log,
    )
    assert "other takes part" not in run.log
    assert rounds_of(run.run)[-1].round >= 6
    assert checkpoint.resolve().parent == tmp_path / "kept" / "here"
    assert (tmp_path / "kept" / "here" / "latest").resolve() == checkpoint.resolve()
    assert export(run.run, tmp_path / "model").samefile(checkpoint)
    assert re.search(
        r"the run has ended: .*\. To train further or otherwise, begin another run \(--dir\) with \[model\] config = "
        rf'"{re.escape(str(tmp_path))}/run/checkpoints/latest"',
        run.log,
    )


def test_one_that_cannot_make_it_is_not_waited_for(tmp_path: Path) -> None:
    """The grace is longer than this test may take; the slow one needs an hour for its work, and says so."""
    run_file = (
        RUN_FILE
        + '[stop]\nrounds = 2\n[outer]\nmethod = "diloco"\nevery = 30\nprojected = false\ngrace = 1200.0\n'
        + "[members]\nmin = 2\n"
    )
    with open_run(tmp_path, free_port(), run_file) as run:
        run.lead()
        run.join("quick")
        run.join("slow", program=SLOW)
        run.end()
    assert "slow takes part" in run.log
    assert {len(entry.contributions) for entry in rounds_of(run.run)} == {1}
