"""A member of test_reductions.py, in a process of its own: connects, and carries out the plans that it is told.

Reads one JSON value a line: first the addresses of all members, then fields of plans. Prints its address, when it is
connected, and of each plan that it is under way and what became of it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import trio

from neurogrid.p2p import open_host
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.training.averaging.plan import ReductionPlan, Way
from neurogrid.training.averaging.reductions import MembersLostError, Reductions
from neurogrid.training.wire.types import training_table


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


async def read() -> Any:
    line = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
    return json.loads(line) if line else None


async def main() -> None:
    torch.set_num_threads(1)
    async with open_host() as host:
        reductions = Reductions(Exchange(host, training_table()), admit=lambda peer_id: True)
        report(address=host.addresses[0])
        addresses = await read()
        peers = [address.rpartition("/")[2] for address in addresses]
        rank = peers.index(host.peer_id)
        for address in addresses[:rank]:
            await host.connect(address)
        while len(host.connected_peers) < len(peers) - 1:
            await trio.sleep(0.01)
        report(connected=True)
        while (fields := await read()) is not None:
            members = [peers[index] for index in fields.pop("members")]
            num_elements, seed = fields["num_elements"], fields.pop("seed")
            plan = ReductionPlan(
                members=tuple(members),
                weights=(1.0,) * len(members),
                reducers=tuple(members),
                cuts=tuple(fields.pop("cuts")),
                way=Way.BUTTERFLY,
                **fields,
            )
            generator = torch.Generator().manual_seed(seed + rank)
            values = torch.randn(num_elements, generator=generator)
            begun = trio.current_time()
            told: list[frozenset[str]] = []

            def tell_begun(waiting: frozenset[str], told: list[frozenset[str]] = told) -> None:
                if not told:
                    report(begun=True)
                told.append(waiting)

            try:
                result = await reductions.reduce(plan, values, timeout=60, on_waiting=tell_begun)
            except MembersLostError as error:
                lost = [peers.index(peer_id) for peer_id in error.lost]
                report(lost=lost, seconds=trio.current_time() - begun)
            else:
                assert result is not None
                report(digest=result.digest.hex(), sum=result.values.double().sum().item())


trio.run(main)
