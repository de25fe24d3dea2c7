"""Four members in processes of their own, over TCP: one result for all, and no waiting for one that is killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.e2e.preloaded import ENVIRONMENT, Popen

MEMBER = Path(__file__).with_name("reducing_member.py")
NUM_MEMBERS = 4
CHUNK_ELEMENTS = 64 * 1024


class Member:
    """One process."""

    def __init__(self, process: Popen) -> None:
        self.process = process

    def tell(self, what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def members() -> Iterator[list[Member]]:
    """All of them, connected with each other."""
    with ExitStack() as stack:
        found = []
        for _ in range(NUM_MEMBERS):
            process = Popen(
                [sys.executable, str(MEMBER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=ENVIRONMENT,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            found.append(Member(process))
        addresses = [member.hear()["address"] for member in found]
        for member in found:
            member.tell(addresses)
        assert all(member.hear()["connected"] for member in found)
        yield found
        for member in found:
            assert member.process.stdin is not None
            member.process.stdin.close()


def plan(ranks: list[int], num_chunks: int, seed: int = 0) -> dict[str, Any]:
    return {
        "reduction": random.getrandbits(64),
        "members": ranks,
        "cuts": [num_chunks * index // len(ranks) for index in range(len(ranks) + 1)],
        "num_elements": num_chunks * CHUNK_ELEMENTS - 1,
        "chunk_elements": CHUNK_ELEMENTS,
        "codec": "f16",
        "result_codec": "f16",
        "seed": seed,
    }


def tell_all(found: list[Member], fields: dict[str, Any]) -> None:
    """Have a plan carried out; returns when it is under way everywhere."""
    for member in found:
        member.tell(fields)
    assert all(member.hear()["begun"] for member in found)


def wanted(ranks: list[int], num_chunks: int) -> float:
    """The sum of the mean, in one process."""
    rows = [
        torch.randn(
            num_chunks * CHUNK_ELEMENTS - 1, generator=torch.Generator().manual_seed(rank)
        ).half()
        for rank in ranks
    ]
    total = rows[0].float()
    for row in rows[1:]:
        total += row.float()
    return float((total / len(rows)).half().double().sum())


def test_all_have_one_result_and_nobody_waits_for_the_dead() -> None:
    everybody = list(range(NUM_MEMBERS))
    with members() as found:
        tell_all(found, plan(everybody, 40))
        outcomes = [member.hear() for member in found]
        assert len({outcome["digest"] for outcome in outcomes}) == 1
        assert outcomes[0]["sum"] == wanted(everybody, 40)

        # 128 MiB, of which it cannot have done its part when it is killed.
        tell_all(found, plan(everybody, 512))
        found[2].process.send_signal(signal.SIGKILL)
        survivors = [member for rank, member in enumerate(found) if rank != 2]
        for outcome in [member.hear() for member in survivors]:
            assert outcome["lost"] == [2]
            assert outcome["seconds"] < 30  # not the end of the time

        tell_all(survivors, plan([0, 1, 3], 40))
        outcomes = [member.hear() for member in survivors]
        assert len({outcome["digest"] for outcome in outcomes}) == 1
        assert outcomes[0]["sum"] == wanted([0, 1, 3], 40)
