"""Ranks behind NATs find each other by a ticket: each reaches rank 0, which relays between the others."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e import preloaded
from tests.e2e.namespaces.nat import home, why_no_nat
from tests.e2e.namespaces.netns import Network, network
from tests.e2e.test_torch_distributed import DEADLINE, PROGRAMS


@pytest.fixture
def net() -> Iterator[Network]:
    if reason := why_no_nat():
        pytest.skip(reason)
    with network() as made:
        yield made


@pytest.mark.parametrize("is_symmetric", [False, True], ids=["friendly", "symmetric"])
def test_three_ranks_of_which_two_are_behind_nats(
    net: Network, tmp_path: Path, is_symmetric: bool
) -> None:
    internet = net.lan(1)
    homes = [home(net, internet, number, is_symmetric=is_symmetric) for number in (1, 2)]
    machines = [*internet.machines, *homes]
    address = f"neurogrid://@{tmp_path / 'ticket'}"
    ranks = [
        preloaded.Popen(
            machine.command(
                [sys.executable, str(PROGRAMS), "movements", "neurogrid", address]
                + [str(rank), "3", str(tmp_path)]
            ),
            stderr=subprocess.PIPE,
            text=True,
            env=preloaded.ENVIRONMENT,
        )
        for rank, machine in enumerate(machines)
    ]
    try:
        for rank in ranks:
            _, told = rank.communicate(timeout=DEADLINE)
            assert rank.returncode == 0, told
    finally:
        for rank in ranks:
            rank.kill()
    ring = [torch.load(tmp_path / f"neurogrid-{rank}.pt") for rank in range(3)]
    name = next(name for name in ring[0] if re.fullmatch(r"all_gather torch.float32 \d{7}", name))
    for other in ring[1:]:
        for mine, theirs in zip(other[name], ring[0][name], strict=True):
            assert torch.equal(mine, theirs)
