"""A ticket to train, and nothing else: its bearer is a member of the run, and holds no layers for anybody."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.e2e import preloaded
from tests.e2e.preloaded import WORKER
from tests.e2e.training.run_processes import RUN_FILE, open_run
from tests.ports import free_port

RUN = "[stop]\nrounds = 3\n[outer]\nevery = 4\nfragments = 1\n[members]\nmin = 2\n"
IDENTITY = (sys.executable, "-m", "neurogrid.cli.commands.main", "identity")


def test_a_trainer_trains_and_does_not_serve(tmp_path: Path) -> None:
    with open_run(tmp_path, free_port(), RUN_FILE + RUN) as run:
        run.lead("--ticket-role", "trainer")
        run.join("desk")
        run.join("laptop")
        run.end()
    refused = preloaded.run([*WORKER, "--serve", "--cluster", "desk"], cwd=tmp_path)
    assert refused.returncode == 2
    assert "the membership is for training alone" in refused.stderr
    assert run.log.count("has joined as trainer, by a ticket") == 2
    assert all(line["members"] == 2 for line in run.figures())
    told = preloaded.run([*IDENTITY, "desk", "--json"], cwd=tmp_path)
    member = json.loads(told.stdout)["membership"]
    assert (member["role"], member["state"]) == ("trainer", "valid")
    coordinator = json.loads(preloaded.run([*IDENTITY, "run", "--json"], cwd=tmp_path).stdout)
    assert coordinator["peer_id"] == member["coordinator"]
