"""The role of a member that trains and does nothing else: by which options, and what is taken from it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from neurogrid.cli.commands.main import parse
from neurogrid.cli.commands.worker import take_role, take_work
from neurogrid.cli.options.trust import trust_of
from neurogrid.errors import ConfigurationError
from neurogrid.node.roles import COORDINATOR_TAKES, WORKER_TAKES
from neurogrid.p2p.trust import TRAINER, WORKER, Cluster
from neurogrid.training.leading.leader import LEADER_TAKES
from neurogrid.training.members.service import MEMBER_TAKES


def options_of(*words: str) -> Namespace:
    _, _, options = parse(words)
    return options


@pytest.mark.parametrize(
    ("words", "serves", "trains"),
    [((), True, True), (("--train",), False, True), (("--serve",), True, False)],
)
def test_a_trainer_does_nothing_but_train(
    words: tuple[str, ...], serves: bool, trains: bool
) -> None:
    options = options_of("join", "ngt1x", *words)
    is_asked = options.serve
    take_work(options)
    take_role(options, WORKER, is_asked=is_asked)
    assert (options.serve, options.train) == (serves, trains)
    if is_asked:
        with pytest.raises(ConfigurationError, match="for training alone"):
            take_role(options, TRAINER, is_asked=is_asked)
        return
    take_role(options, TRAINER, is_asked=is_asked)
    assert (options.serve, options.train) == (False, True)


def test_tickets_of_a_coordinator_that_serves_are_for_workers(tmp_path: Path) -> None:
    Cluster.create(tmp_path / "cluster")
    serving = options_of("serve", "--cluster", str(tmp_path / "cluster"), "--ticket-role", TRAINER)
    with pytest.raises(ConfigurationError, match="is for training runs"):
        trust_of(serving, is_worker=False)
    assert trust_of(serving, is_worker=False, leads_run=True).ticket_role == TRAINER
    serving.ticket_role = None
    assert trust_of(serving, is_worker=False).ticket_role == WORKER


def test_what_serving_takes_is_taken_from_no_trainer() -> None:
    for table in (WORKER_TAKES, COORDINATOR_TAKES):
        assert not any(TRAINER in roles for roles in table.values())
    for table in (LEADER_TAKES, MEMBER_TAKES):
        # What a member may do, a trainer may, too.
        assert all((WORKER in roles) == (TRAINER in roles) for roles in table.values())
