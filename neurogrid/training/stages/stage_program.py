"""A stage's own process: `python -m neurogrid.training.stages.stage_program`, which `open_stage_process` starts.

What it is ordered, and how it answers, is the matter of the trainer's `orders`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from neurogrid.errors import ConfigurationError
from neurogrid.training.stages.outer_steps import OuterSteps
from neurogrid.training.stages.stage_learner import StageLearner
from neurogrid.training.stages.stage_settings import StageSettings
from neurogrid.training.stages.stage_sums import Means
from neurogrid.training.stages.tensor_frames import DTYPES, as_frame, of_frame
from neurogrid.training.stages.weight_files import WeightFiles
from neurogrid.training.trainer.errors import TrainerError
from neurogrid.training.trainer.memory import (
    Memory,
    is_out_of_memory,
    keep_freed,
    lift_limit,
    limit_memory,
    memory_of,
)
from neurogrid.training.trainer.orders import serve_orders
from neurogrid.training.trainer.shared import map_shared

__all__ = ["main"]


def main() -> None:
    """Carry out orders until standard input ends."""
    serve_orders(_Program)


class _Program:
    """A stage that learns."""

    def __init__(self, order: dict[str, Any], answers: BinaryIO) -> None:
        self._stage: StageLearner | None = None
        self._activations = torch.float32
        self._memory: Memory | None = None
        # Of tied embeddings, while both ends exchange their parts of the gradient.
        self._own_tied: torch.Tensor | None = None
        self._their_tied: list[torch.Tensor] = []
        # Of what goes to the other members of the stage, and what comes back.
        self._means: Means | None = None
        self._own = self._mean = torch.empty(0)
        self._calls: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "open": self._open,
            "load": self._load,
            "forward": self._forward,
            "backward": self._backward,
            "evaluate": self._evaluate,
            "tied_gradient": self._tied_gradient,
            "add_tied_gradient": self._add_tied_gradient,
            "share": self._share,
            "begin_mean": self._begin_mean,
            "next_mean": self._next_mean,
            "forget": self._forget,
            "squared_norm": self._squared_norm,
            "apply": self._apply,
            "commit": self._commit,
            "save": self._save,
        }

    def opened(self) -> dict[str, Any]:
        """The answer to the first order, which asks for nothing: what is to be imported is there."""
        return {}

    @property
    def _learner(self) -> StageLearner:
        if self._stage is None:
            raise TrainerError("this process is no stage yet")
        return self._stage

    def _open(self, order: dict[str, Any]) -> dict[str, Any]:
        self._stage = None  # two would take twice the memory
        self._own_tied, self._their_tied = None, []
        self._means, self._own, self._mean = None, torch.empty(0), torch.empty(0)
        settings = StageSettings.parse(order["settings"])
        self._activations = DTYPES[order["activations"]]
        if settings.threads:
            torch.set_num_threads(settings.threads)
        if settings.device == "cpu" and settings.memory_limit:
            lift_limit()
            limit_memory(settings.memory_limit)
        try:
            weights = WeightFiles([Path(path) for path in order["weights"]])
            learner = StageLearner(settings, weights, takes_over=True)
            if order["pieces"]:
                learner.load_pieces(_pieces(order))
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            lift_limit()  # to say so takes some, too
            raise ConfigurationError(
                f"layers {settings.start} to {settings.stop - 1} do not fit into what is free of memory: cut the model "
                "into more stages ([layout] stages), or give the member more (--memory-limit)"
            ) from exc
        if not settings.adapter.r:
            # Beside weights, gradients and moments it is little, and each step has it again.
            keep_freed()
        self._stage = learner
        self._memory = memory_of(torch.device(settings.device), settings.memory_limit)
        return {
            "is_tied": learner.is_tied,
            "memory": self._memory.most(),
            "num_elements": learner.sums.num_elements,
        }

    def _load(self, order: dict[str, Any]) -> dict[str, Any]:
        """Another state of the same layers. The step that was under way did not begin."""
        self._own_tied, self._their_tied, self._means = None, [], None
        self._learner.load_pieces(_pieces(order))
        return {}

    def _forget(self, order: dict[str, Any]) -> dict[str, Any]:
        """The step that was under way did not begin."""
        self._own_tied, self._their_tied, self._means = None, [], None
        self._learner.forget_all()
        return {}

    def _share(self, order: dict[str, Any]) -> dict[str, Any]:
        """Files for vectors that go out, and for what comes back."""
        num = self._learner.sums.num_elements
        self._own = map_shared(Path(order["own"]), num)
        self._mean = map_shared(Path(order["mean"]), num)
        return {}

    def _begin_mean(self, order: dict[str, Any]) -> dict[str, Any]:
        """The first of the vectors that go out, of gradients, of weights, or of what was learned in a round."""
        sums, is_finite = self._learner.sums, True
        if order["what"] == "differences":
            self._means = self._outer.differences(order["groups"])
        elif order["what"] == "weights":
            self._means = sums.weights(order["turn"])
        else:
            if not (is_finite := sums.has_finite_gradients()):
                self._learner.drop()
            self._means = sums.gradients(order["members"], order["chain"])
        return {"num_elements": self._give(next(self._means)), "is_finite": is_finite}

    def _next_mean(self, order: dict[str, Any]) -> dict[str, Any]:
        """A mean has come: the next vector, or the end."""
        if self._means is None:
            raise TrainerError("nothing is to be averaged now")
        try:
            return {"num_elements": self._give(self._means.send(self._mean[: order["num"]]))}
        except StopIteration:
            self._means = None
            return {"num_elements": None}

    def _give(self, vector: torch.Tensor) -> int:
        self._own[: len(vector)] = vector
        return len(vector)

    def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """An order, and its answer."""
        try:
            return self._calls[order["order"]](order)
        except (ValueError, KeyError) as exc:
            raise TrainerError(f"a stage cannot {order['order']}: {exc}") from exc

    def _forward(self, order: dict[str, Any]) -> dict[str, Any]:
        given, number, step = of_frame(order["given"]), order["number"], order["step"]
        tokens, labels = _tensor_of(order["tokens"]), _tensor_of(order["labels"])
        if labels is None:
            result = self._learner.forward(number, given, step=step, tokens=tokens)
            return as_frame(result.to(self._activations))
        loss = self._learner.forward_loss(
            number, given, labels, order["num_labels"], step=step, tokens=tokens
        )
        return {"loss": loss}

    def _backward(self, order: dict[str, Any]) -> dict[str, Any]:
        result = self._learner.backward(order["number"], _tensor_of(order["gradient"]))
        return {} if result is None else as_frame(result.to(self._activations))

    def _evaluate(self, order: dict[str, Any]) -> dict[str, Any]:
        tokens, labels = _tensor_of(order["tokens"]), _tensor_of(order["labels"])
        result = self._learner.evaluate(of_frame(order["given"]), labels, tokens)
        if isinstance(result, torch.Tensor):
            return as_frame(result.to(self._activations))
        return {"loss": result}

    def _tied_gradient(self, order: dict[str, Any]) -> dict[str, Any]:
        """A part of it: the whole may be more than a frame has room for."""
        if self._own_tied is None:
            self._own_tied = self._learner.tied_gradient()
        start = order["start"]
        part = self._own_tied[start : start + order["num"]]
        return {"num_elements": len(self._own_tied), **as_frame(part)}

    def _add_tied_gradient(self, order: dict[str, Any]) -> dict[str, Any]:
        """The next part of the other end's; added when it is there as a whole."""
        if self._own_tied is None:
            raise TrainerError("nothing that is tied is exchanged now")
        self._their_tied.append(of_frame(order["gradient"]))
        if sum(map(len, self._their_tied)) >= len(self._own_tied):
            self._learner.add_tied_gradient(torch.cat(self._their_tied))
            self._own_tied, self._their_tied = None, []
        return {}

    def _squared_norm(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"squared_norm": self._learner.squared_norm()}

    def _apply(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["is_applied"]:
            self._learner.apply(
                order["step"], order["norm"], rate=order["rate"], clip=order["clip"]
            )
        else:
            self._learner.drop()
        assert self._memory is not None
        return {"memory": self._memory.most()}

    def _commit(self, order: dict[str, Any]) -> dict[str, Any]:
        """A round is made."""
        self._outer.commit()
        assert self._memory is not None
        return {"memory": self._memory.most()}

    @property
    def _outer(self) -> OuterSteps:
        if self._learner.outer is None:
            raise TrainerError("this stage is of a chain alone")
        return self._learner.outer

    def _save(self, order: dict[str, Any]) -> dict[str, Any]:
        directory = Path(order["directory"])
        files = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, tensors in self._learner.pieces().items():
                path = directory / f"{name}.safetensors"
                save_file({key: each.cpu().contiguous() for key, each in tensors.items()}, path)
                files[name] = str(path)
        except (OSError, SafetensorError) as exc:
            raise TrainerError(f"{directory}: cannot be written: {exc}; make room there") from exc
        return {"files": files}


def _pieces(order: dict[str, Any]) -> dict[str, WeightFiles]:
    return {name: WeightFiles([Path(path)]) for name, path in order["pieces"].items()}


def _tensor_of(frame: dict[str, Any] | None) -> torch.Tensor | None:
    return None if frame is None else of_frame(frame)


if __name__ == "__main__":
    main()
