"""A worker whose stage sends something odd once, as of a faulty machine or program; what, says the first argument.

Run as a program, otherwise with the options of `neurogrid-worker`.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

import torch

from neurogrid.cli.commands.worker import main
from neurogrid.training.members.chain_stage import ChainStage
from neurogrid.training.stages.stage_process import PlainTensor
from neurogrid.training.stages.tensor_frames import as_frame
from neurogrid.training.wire.runs import RunMessage

# Tensors that are as they should be: those of some steps.
_NUM_RIGHT = 40
_give = ChainStage._give
_calls = count()


def odd(kind: str) -> Any:
    """What takes the place of sending a tensor."""

    def give(
        stage: ChainStage, peer_id: str, code: RunMessage, number: int, tensor: PlainTensor
    ) -> None:
        is_odd = code in (RunMessage.HIDDEN, RunMessage.GRADIENT) and next(_calls) == _NUM_RIGHT
        if is_odd and kind == "shape":
            rows, *rest = tensor.shape
            wrong = as_frame(torch.zeros(rows, rest[0] + 1, rest[1]))
            tensor = PlainTensor(wrong["dtype"], tuple(wrong["shape"]), wrong["data"])
        elif is_odd and kind == "nan":
            wrong = as_frame(torch.full(tensor.shape, float("nan")))
            tensor = PlainTensor(wrong["dtype"], tensor.shape, wrong["data"])
        elif is_odd and kind == "number":
            number += 500
        elif is_odd and kind == "twice":
            _give(stage, peer_id, code, number, tensor)
        elif is_odd and kind == "neighbour":
            # What the stage before this one would send, or the one after it.
            is_hidden = code is RunMessage.HIDDEN
            code = RunMessage.GRADIENT if is_hidden else RunMessage.HIDDEN
        _give(stage, peer_id, code, number, tensor)

    return give


if __name__ == "__main__":
    ChainStage._give = odd(sys.argv.pop(1))  # type: ignore[method-assign]
    sys.exit(main())
