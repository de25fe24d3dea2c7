"""A worker that does something odd in its second attempt at a round; what, says the first argument.

Run as a program, otherwise with the options of `neurogrid-worker`.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count

import trio

from neurogrid.cli.commands.worker import main
from neurogrid.training.members.chain_rounds import ChainRounds
from neurogrid.training.wire.runs import Average

_NUM_RIGHT = 1
_reduce_all = ChainRounds._reduce_all
_attempts = count()


async def reduce_all(rounds: ChainRounds, average: Average) -> tuple[bytes, ...]:
    """What takes the place of an attempt."""
    is_odd = next(_attempts) == _NUM_RIGHT
    if is_odd and KIND == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_odd and KIND == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if is_odd and KIND == "silent":
        await trio.sleep_forever()
    digests = await _reduce_all(rounds, average)
    return tuple(bytes(32) for _ in digests) if is_odd and KIND == "lies" else digests


if __name__ == "__main__":
    KIND = sys.argv.pop(1)
    ChainRounds._reduce_all = reduce_all  # type: ignore[method-assign]
    sys.exit(main())
