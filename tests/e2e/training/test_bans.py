"""A member that does other than it was told is out, and stays out, also in another process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.runs.audit import audit
from neurogrid.training.runs.entries import BannedEntry, JoinedEntry, LeftEntry
from neurogrid.training.runs.journal import read_journal
from tests.e2e import preloaded
from tests.e2e.preloaded import TRAIN
from tests.e2e.training.run_processes import RUN_FILE, open_run
from tests.e2e.training.test_run_seen import ask, url_of, wait_status
from tests.ports import free_port

GREEDY = (sys.executable, str(Path(__file__).with_name("greedy_worker.py")))
RUN = """
[stop]
rounds = 400
[outer]
every = 4
fragments = 1
[members]
min = 1
"""


def names_of(status: dict[str, Any]) -> set[str]:
    return {member["name"] for member in status["members"]}


def test_who_counts_for_more_than_it_was_given_is_banned(tmp_path: Path) -> None:
    with open_run(tmp_path, free_port(), RUN_FILE + RUN) as run:
        run.lead("--http-port", "0")
        url = url_of(run)
        run.join("greedy", program=GREEDY)
        run.join("fine")
        run.wait(lambda: "greedy is banned for 60 min: its contribution" in run.log, "no ban")
        run.wait_round(run.rounds() + 2)  # without it
        run.kill("greedy")
        wait_status(url, lambda status: names_of(status) == {"fine"})
        run.join("greedy")  # another process, and an honest one
        wait_status(url, lambda status: names_of(status) == {"fine", "greedy"})
        run.wait_round(run.rounds() + 3)
        members = {each["name"]: each for each in ask(url, "/v1/training/status")["members"]}
        assert (members["greedy"]["seat"], members["greedy"]["state"]) == (None, "asked")
        status = preloaded.run([*TRAIN, "status", "run"], cwd=tmp_path)
        greedy = Identity.load(tmp_path / "greedy" / "identity.key").peer_id
    entries = [each.entry for each in read_journal(run.run / "journal")]
    [ban] = [each for each in entries if isinstance(each, BannedEntry)]
    assert (ban.peer, ban.number, ban.until - ban.at) == (greedy, 1, 3600)
    after = entries[entries.index(ban) :]
    assert not any(isinstance(each, JoinedEntry) and each.peer == greedy for each in after)
    left = next(each for each in after if isinstance(each, LeftEntry))
    assert left.reason.startswith("banned: ")
    found = audit(entries)
    assert found.is_sound, found.problems
    assert f"banned       {greedy} until " in status.stdout, status.stderr
