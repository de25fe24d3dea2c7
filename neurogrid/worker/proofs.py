"""The wait for a proof that a child process makes: cancelling the wait ends the process."""

from __future__ import annotations

from functools import partial
from typing import Any

import trio

from neurogrid.model.proof.proof import Proof, Proving

__all__ = ["result_of"]


async def result_of(proving: Proving, *, seconds: float) -> Proof:
    """`proving.result`; the child process is killed on cancellation.

    Raises:
        As `Proving.result`.
    """
    run_sync: Any = trio.to_thread.run_sync  # its stubs lack `abandon_on_cancel`
    try:
        proof: Proof = await run_sync(
            partial(proving.result, seconds=seconds), abandon_on_cancel=True
        )
    finally:
        proving.close()
    return proof
