"""A member of a group as a process of its own: `python -m tests.e2e.training_peer --number N [OPTION...]`.

It says that it is ready, and reads what to do: `found`, or `join ADDRESS...`; then it averages vectors that are a known
function of its number and the round, one after another, and says what came of each, a JSON object a line. Times are of
`time.monotonic()`, which is the same for all processes of a machine. When it is no member any more it reads on.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from functools import cache
from typing import Any

import torch
import trio
from blake3 import blake3

from neurogrid.errors import NeuroGridError
from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.reach.reach import Reach, ReachOptions
from neurogrid.training.averaging.groups import Group, NotAMemberError, RoundTimeout, open_group
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.wire import GroupSettings

__all__ = ["mean_of", "vector_of", "weight_of"]

PERIOD = 1009


def weight_of(number: int) -> float:
    """A power of two: with it sums, and ratios of weights, are exact."""
    return float(2 ** (number % 4))


def vector_of(number: int, round_: int, num_elements: int) -> torch.Tensor:
    """What a member contributes: whole numbers, so that their sums are exact in any order."""
    start = (31 * number + 7 * round_) % PERIOD
    return _pattern(num_elements + PERIOD)[start : start + num_elements]


@cache
def _pattern(num_elements: int) -> torch.Tensor:
    return (torch.arange(num_elements) % PERIOD).float()


def mean_of(numbers: list[int], round_: int, num_elements: int) -> torch.Tensor:
    """The weighted mean of what these contribute, by a sum that knows nothing of reductions."""
    total = torch.zeros(num_elements)
    for number in numbers:
        total += weight_of(number) * vector_of(number, round_, num_elements)
    return total / sum(weight_of(number) for number in numbers)


def digest_of(values: torch.Tensor) -> str:
    """BLAKE3 of the bytes."""
    return blake3(values.numpy().data.cast("B")).hexdigest()


def say(**what: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


def anonymous_memory() -> int:
    """Bytes of this process that are no file's."""
    with open("/proc/self/status") as lines:
        (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


async def average_on(group: Group, options: argparse.Namespace) -> None:
    """Average until there is an error of which there is no going on."""
    while True:
        round_ = group.round + 1
        vector = vector_of(options.number, round_, options.elements)
        if options.pause:
            await trio.sleep(options.pause)
        begun = time.monotonic()
        try:
            outcome = await group.average(
                vector, weight=weight_of(options.number), timeout=options.timeout
            )
        except RoundTimeout as exc:
            say(error="RoundTimeout", text=str(exc), seconds=time.monotonic() - begun)
            continue
        except NeuroGridError as exc:
            say(error=type(exc).__name__, text=str(exc), seconds=time.monotonic() - begun)
            raise
        now = time.monotonic()
        # A round that this one had no vector for may be an earlier one.
        say(
            at=now,
            round=outcome.round,
            begun=begun,
            seconds=now - begun,
            digest=digest_of(outcome.values),
            contributors=outcome.contributors,
            weights=outcome.weights,
            has_contributed=outcome.has_contributed,
            leads=group.is_leading,
            members=group.members,
            memory=anonymous_memory(),
        )
        del outcome  # nothing is kept here until the next one


async def main(options: argparse.Namespace) -> None:
    layout = Layout(("all",), ((options.elements,),))
    settings = GroupSettings(
        min_members=options.min_members,
        grace=options.grace,
        attempt_timeout=options.attempt_timeout,
        way=options.way,
        codec=options.codec,
        result_codec=options.result_codec,
    )
    async with open_host(listen=options.listen) as host:
        if options.relay:
            reach = Reach(host, ReachOptions(relays=[options.relay]))
            while not any("/p2p-circuit/" in address for address in reach.addresses):
                await trio.sleep(0.02)
        vector_of(options.number, 1, options.elements)  # which takes the longest the first time
        say(
            ready=host.peer_id,
            number=options.number,
            addresses=host.addresses,
            memory=anonymous_memory(),
        )
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            _, *addresses = line.split()
            try:
                async with open_group(
                    host,
                    layout,
                    join=addresses,
                    settings=settings,
                    bandwidth=options.bandwidth,
                    timeout=options.timeout,
                ) as group:
                    say(joined=True, members=group.members, group_round=group.round)
                    await average_on(group, options)
            except NotAMemberError as exc:
                say(dropped=str(exc))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--min-members", type=int, default=4)
    parser.add_argument("--grace", type=float, default=10.0)
    parser.add_argument("--attempt-timeout", type=float, default=30.0)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each round")
    parser.add_argument("--way", default="butterfly")
    parser.add_argument("--codec", default="f32")
    parser.add_argument("--result-codec", default="f32")
    parser.add_argument("--bandwidth", type=float)
    parser.add_argument("--listen", nargs="+", default=["/ip4/127.0.0.1/tcp/0"])
    parser.add_argument("--relay", default="")
    parser.add_argument("--log", default="INFO")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = parse()
    logging.basicConfig(
        format="%(asctime)s.%(msecs)03d %(name)s %(message)s", datefmt="%H:%M:%S", level="WARNING"
    )
    logging.getLogger("neurogrid").setLevel(chosen.log)
    torch.set_num_threads(1)
    trio.run(main, chosen)
