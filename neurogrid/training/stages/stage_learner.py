"""Some layers of a model, their optimiser and the steps that they take: what the process of a stage computes.

A step is: micro-batches forward and backward, the gradient of what is tied exchanged between the ends of the chain, one
norm over all stages, `apply`. Until then nothing has changed, and `forget_all` makes it as if the step had not begun.

Knows tensors, no other process. Weights, gradients and the optimiser are float32; products are in bfloat16 where the
settings say so and the device has such products. Random numbers come from the seed of the settings, the number of the
step, that of the micro-batch and the first layer alone, and so does a learning rate from its step: what is done again
has the same bits.

With a subspace, hidden states between stages are [B, T, K] where [B, T, D] is said here (model/stages/subspace.py), and
weights are kept in it: new ones, and after each step. So is what `squared_norm` and `apply` take of the gradients.

Shape legend: B sequences, T tokens, D hidden size, K dimensions of a subspace, V vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.model.files.config import build_config
from neurogrid.model.files.quantization import Quantization
from neurogrid.model.files.tensor_names import layer_of
from neurogrid.model.proof.subspace_proof import check_subspace, subspace_of
from neurogrid.model.stages.device import seed_device
from neurogrid.model.stages.narrow import has_narrow_products
from neurogrid.model.stages.subspace import (
    NUM_FREE_LAYERS,
    SubspaceTraits,
    project_gradients,
    project_weights,
)
from neurogrid.model.stages.training_stage import TrainingStage
from neurogrid.training.optimizers import square_of_norm, token_weighted_loss
from neurogrid.training.optimizers.gradients import IGNORED_LABEL
from neurogrid.training.runs.inner_optimizer import make_optimizer, rates_of
from neurogrid.training.stages.holdings import FIRST, LAST, TIED, layer_piece
from neurogrid.training.stages.lora import Adapters, is_adapter_tensor, require_targets
from neurogrid.training.stages.outer_steps import OuterSteps
from neurogrid.training.stages.stage_settings import StageSettings
from neurogrid.training.stages.stage_sums import StageSums
from neurogrid.training.trainer.models import parse_config

__all__ = ["StageLearner"]

# What the outer optimiser keeps of a parameter, where replicas average.
_OUTER: Final = "outer"
# What each kind of optimiser keeps of a parameter; a number of steps is a tensor of no dimensions.
_KEYS: Final = {"adamw": ("exp_avg", "exp_avg_sq", "step"), "sgd": ("momentum_buffer",)}


class StageLearner:
    """The stage that the settings name, on their device.

    Args:
        settings: of this stage.
        tensors: by their checkpoint names those of its layers, codes as their parts, and at the first and the last
            stage all that stand outside the layers. With an adapter those of the adapter, too, by PEFT's names; without
            them it is new. A layer's are asked for when it is its turn, each once.
        takes_over: whether what `tensors` gives is the learner's own from then on; else it is copied.

    Attributes:
        names: of what learns here, sorted: parameters of the whole model, or PEFT's names of an adapter.
        sums: what it has in common with other members of its stage.
        outer: what it has in common with other replicas; None in a chain alone.

    Raises:
        ConfigurationError: the config is no JSON, there are no layers as an adapter names them, or PEFT is missing; or
            a cut lies where no subspace is, or it is too large.
        UnsupportedModelError: the model cannot be trained in stages, or its hidden states not be in a subspace.
        CheckpointError: a tensor is missing, unknown, or of a wrong shape.
        ValueError: the model has no such layers.
    """

    def __init__(
        self, settings: StageSettings, tensors: Mapping[str, Tensor], *, takes_over: bool = False
    ) -> None:
        self._settings = settings
        inner = settings.inner
        self._device = torch.device(settings.device)
        is_narrow = inner.precision == "bfloat16"
        self._has_narrow = is_narrow and has_narrow_products(self._device)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        config = build_config(parse_config(settings.config))
        adapters = None
        if settings.adapter.r:
            given = {name: tensors[name] for name in tensors if is_adapter_tensor(name)}
            adapters = Adapters(settings.adapter, settings.seed, given)
        sizes = config.get_text_config(decoder=True)
        self._vocab_size: int = sizes.vocab_size
        self._hidden_size: int = sizes.hidden_size
        self._subspace = (
            subspace_of(config, settings.subspace, seed=settings.seed, device=self._device)
            if settings.subspace
            else None
        )
        self._stage = stage = TrainingStage(
            config,
            settings.start,
            settings.stop,
            _Others(tensors),
            # What learns is float32; what does not is what it is multiplied in, where the device has such products.
            dtype=torch.bfloat16 if adapters and is_narrow else torch.float32,
            device=self._device,
            keeps_graphs=not settings.recompute,
            adapt=adapters,
            quantization=_quantization_of(settings),
            subspace=self._subspace,
            takes_over=takes_over,
            is_wide=bool(adapters) and is_narrow and not self._has_narrow,
        )
        if adapters:
            require_targets(settings.adapter, stage.templates)
        first, last = stage.ends_that_learn()
        own = (first if self.is_first else frozenset()) | (last if self.is_last else frozenset())
        self._parameters: dict[str, nn.Parameter] = {
            name: parameter
            for name, parameter in sorted(stage.parameters.items())
            if stage.is_of_layer(name) or adapters or name in own
        }
        self.names = tuple(self._parameters)
        # Of one stage that is all of the model nothing has a copy.
        self._tied = () if self.is_first and self.is_last else tuple(sorted(first & last))
        self._copies = frozenset(() if self.is_first else self._tied)
        self._pieces = {name: self._piece_of(name, first) for name in self.names}
        self._has_tied_gradient = False
        self._are_projected = False
        if self._subspace is not None:
            self._require_cuts(stage)
            self._traits = _traits_of(settings.config)
            self._keep_in_subspace()
        self._values = list(self._parameters.values())
        self.sums = StageSums(self._parameters, rank=settings.power_sgd, seed=settings.seed)
        self.outer: OuterSteps | None = None
        if settings.outer_lr:
            shared = first & last
            self.outer = OuterSteps(
                self._parameters,
                {name: TIED if name in shared else self._pieces[name] for name in self.names},
                lr=settings.outer_lr,
                momentum=settings.outer_momentum,
            )
        self._optimizer = self._new_optimizer()
        self._rate_of = rates_of(inner, settings.total_steps)

    @property
    def is_first(self) -> bool:
        """Whether it embeds token ids."""
        return self._stage.is_first

    @property
    def is_last(self) -> bool:
        """Whether it ends with a loss."""
        return self._stage.is_last

    @property
    def is_tied(self) -> bool:
        """Whether it is one of two stages that have the same embedding, which learns: they exchange its gradient."""
        return bool(self._tied)

    @property
    def under_way(self) -> frozenset[int]:
        """The micro-batches whose backward passes are to come."""
        return self._stage.under_way

    @property
    def wanted_pieces(self) -> frozenset[str]:
        """The names of the pieces that `load_pieces` needs; at the last stage "first" too, where it is tied."""
        return frozenset(self._pieces.values())

    def forward(
        self, number: int, given: Tensor, *, step: int, tokens: Tensor | None = None
    ) -> Tensor:
        """Compute a micro-batch's hidden state for the next stage: [B, T, D], float32 or the dtype of products.

        Args:
            number: of the micro-batch within the step.
            given: token ids [B, T], int64, at the first stage, else the hidden state [B, T, D] that came.
            step: its number within the run, from 0.
            tokens: token ids [B, T], int64, where there is a subspace; at the first stage they may be left out.

        Raises:
            ValueError: it is not what is due, that micro-batch is under way here, or this is the last stage.
        """
        self._check_given(given, tokens)
        self._seed(step, number)
        with self._precision():
            return self._stage.forward(number, given, tokens)

    def forward_loss(
        self,
        number: int,
        given: Tensor,
        labels_BT: Tensor,
        num_labels: int,
        *,
        step: int,
        tokens: Tensor | None = None,
    ) -> float:
        """A micro-batch's share of the loss of its batch; at the last stage. The shares add up to the mean.

        Args:
            number, given, step, tokens: as for `forward`.
            labels_BT: int64 [B, T], already shifted; -100 is no label.
            num_labels: of the whole batch.

        Raises:
            ValueError: it is not what is due, that micro-batch is under way here, or this is not the last stage.
        """
        self._check_given(given, tokens)
        self._check_labels(labels_BT, given)
        self._seed(step, number)
        labels_N = labels_BT.to(self._device).flatten()

        def loss_of(logits_BTV: Tensor) -> Tensor:
            return token_weighted_loss(logits_BTV.flatten(0, 1), labels_N, num_labels)

        with self._precision():
            return float(self._stage.forward_loss(number, given, loss_of, tokens))

    def backward(self, number: int, gradient: Tensor | None = None) -> Tensor | None:
        """Add a micro-batch's gradients to those of what learns.

        Where memory runs out, what was added is a part of them: `forget_all`, and do the step again.

        Args:
            number: of a micro-batch that is under way here.
            gradient: of what `forward` gave, [B, T, D]; None at the last stage.

        Returns:
            The gradient of what was given, [B, T, D]; None at the first stage.

        Raises:
            KeyError: it is not under way here.
            ValueError: the gradient is none of what was given.
        """
        self._are_projected = False
        return self._stage.backward(number, gradient)

    def evaluate(
        self, given: Tensor, labels_BT: Tensor | None = None, tokens: Tensor | None = None
    ) -> Tensor | float:
        """A hidden state [B, T, D], or at the last stage the sum of the losses of all labels; nothing is learned.

        Args:
            given, tokens: as for `forward`.
            labels_BT: as for `forward_loss`; at the last stage alone.

        Raises:
            ValueError: it is not what is due.
        """
        self._check_given(given, tokens)
        if (labels_BT is None) == self.is_last:
            raise ValueError("labels are for the last stage, and for no other")
        if labels_BT is not None:
            self._check_labels(labels_BT, given)
        with self._precision():
            result = self._stage.infer(given, tokens)
        if labels_BT is None:
            return result
        labels_N = labels_BT.to(self._device).flatten()
        return float(token_weighted_loss(result.flatten(0, 1), labels_N, 1))

    def forget_all(self) -> None:
        """Let go of all micro-batches and gradients: the step that is under way did not begin."""
        for number in self.under_way:
            self._stage.forget(number)
        self.drop()
        if self.outer is not None:
            self.outer.forget()

    def tied_gradient(self) -> Tensor:
        """This stage's part of the gradient of what is tied, for the other one: float32 [elements], on the CPU.

        Raises:
            ValueError: nothing is tied here, or both parts are together already.
        """
        self._require_tied()
        parts = [_gradient(self._parameters[name]).flatten() for name in self._tied]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu()

    def add_tied_gradient(self, other: Tensor) -> None:
        """Add the other stage's part: both have the same bits then, of the first stage's part plus the last one's.

        Raises:
            ValueError: nothing is tied here, both parts are together already, or it has another shape.
        """
        own = self.tied_gradient()
        if other.shape != own.shape or other.dtype != own.dtype:
            raise ValueError(
                f"a gradient of {own.dtype} {list(own.shape)} is due, got {other.dtype} {list(other.shape)}"
            )
        both = own + other if self.is_first else other + own
        parameters = [self._parameters[name] for name in self._tied]
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part in zip(parameters, both.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(self._device)
        self._has_tied_gradient = True
        self._are_projected = False

    def squared_norm(self) -> float:
        """The sum of the squares of this stage's gradients; those of a copy count at the first stage alone.

        Raises:
            ValueError: the gradient of what is tied is not whole yet.
        """
        self._require_whole()
        self._project_gradients()
        return square_of_norm(
            parameter.grad
            for name, parameter in self._parameters.items()
            if parameter.grad is not None and name not in self._copies
        )

    def apply(
        self, step: int, norm: float, *, rate: float | None = None, clip: float | None = None
    ) -> None:
        """Take the step: clip, change what learns, and clear the gradients.

        Args:
            step: its number within the run, from 0.
            norm: of the gradients of all stages together.
            rate: the learning rate; None for that of the schedule.
            clip: the norm that gradients are clipped to, 0 for no clipping; None for what the settings say.

        Raises:
            ValueError: the norm is not finite, a micro-batch is under way, or the other stage's part of a gradient is
                missing.
        """
        self._require_whole()
        if not math.isfinite(norm):
            raise ValueError(f"nothing is learned from gradients whose norm is {norm}")
        if self.under_way:
            raise ValueError(f"micro-batch {min(self.under_way)} is under way here")
        self._project_gradients()
        if most := self._settings.inner.clip if clip is None else clip:
            torch.nn.utils.clip_grads_with_norm_(
                self._values, most, torch.tensor(norm, dtype=torch.float32)
            )
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate_of(step) if rate is None else rate
            self._optimizer.step()
            self._keep_in_subspace()
        self.sums.commit()
        self.drop()

    def drop(self) -> None:
        """Clear the gradients, and learn nothing from them."""
        self.sums.drop()
        for value in self._values:
            value.grad = None
        self._has_tied_gradient = self._are_projected = False

    def pieces(self) -> dict[str, dict[str, Tensor]]:
        """All that this stage would need to go on with the same bits, cut so that another cut into stages can, too.

        "layer.N" is of a layer, "first" and "last" are of what stands outside the layers. A copy of what is tied is in
        no piece of the last stage, which takes "first" for it, too. Within a piece a parameter has its name, and what
        the optimiser keeps of it `KEY/NAME`; of replicas the outer momentum is `outer/NAME`. Theirs is a state between
        two rounds.

        Returns:
            Tensors on the CPU that may be the learner's own memory: they change with the next step.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            if name in self._copies:
                continue
            piece = found.setdefault(self._pieces[name], {})
            piece[name] = parameter.detach().cpu()
            for key, value in self._state(parameter).items():
                if value is not None:  # momentum of SGD before its first step
                    piece[f"{key}/{name}"] = value.detach().cpu()
            momentum = None if self.outer is None else self.outer.momentum(name)
            if momentum is not None:
                piece[f"{_OUTER}/{name}"] = momentum
        return found

    def load_pieces(self, pieces: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what `pieces` gave, here or at stages that were cut elsewhere; forgets what is under way.

        Args:
            pieces: those of `wanted_pieces`; others may be among them.

        Raises:
            CheckpointError: one is missing, damaged, or of another model or optimiser. Nothing has changed then.
        """
        keys = _KEYS[self._settings.inner.optimizer]
        has_momentum = self.outer is not None and self._settings.outer_momentum > 0
        states: dict[str, dict[str, Tensor]] = {}
        momenta: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            title = self._pieces[name]
            piece = pieces.get(title)
            if piece is None:
                raise CheckpointError(f"the state lacks its piece {title!r}")
            _check_piece(title, piece, name, parameter.shape)
            found = {key: piece[f"{key}/{name}"] for key in keys if f"{key}/{name}" in piece}
            if found and len(found) < len(keys):
                raise CheckpointError(f"piece {title!r} lacks a part of what belongs to {name}")
            for key in found:
                shape = torch.Size() if key == "step" else parameter.shape
                _check_piece(title, piece, f"{key}/{name}", shape)
            states[name] = found
            if has_momentum:
                _check_piece(title, piece, f"{_OUTER}/{name}", parameter.shape)
                momenta[name] = piece[f"{_OUTER}/{name}"]
        self._require_known(pieces, (*keys, _OUTER) if has_momentum else keys)
        self.forget_all()
        self._optimizer = self._new_optimizer()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(pieces[self._pieces[name]][name])
                if states[name] and self._optimizer is not None:
                    self._optimizer.state[parameter] = {
                        key: value.clone() if key == "step" else value.to(self._device, copy=True)
                        for key, value in states[name].items()
                    }
        if self.outer is not None:
            self.outer.load(momenta)

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors that learn as a checkpoint of transformers, or PEFT's file, has them: float32, on the CPU.

        What does not learn is as it was. As of `pieces`, it may be the learner's own memory, and a copy of what is tied
        is the first stage's.
        """
        own = {
            name: parameter.detach().cpu()
            for name, parameter in self._parameters.items()
            if name not in self._copies
        }
        if self._settings.adapter.r:
            return own
        # Parameters of several layers are never put together.
        made: dict[str, Tensor] = {}
        for title in sorted(set(self._pieces.values())):
            made |= self._stage.in_checkpoint(
                {name: tensor for name, tensor in own.items() if self._pieces[name] == title}
            )
        return made

    def _require_cuts(self, stage: TrainingStage) -> None:
        last = stage.num_layers - NUM_FREE_LAYERS
        for cut in (stage.start, stage.stop):
            if 0 < cut < stage.num_layers and cut > last:
                raise ConfigurationError(
                    f"what leaves the last {NUM_FREE_LAYERS} layers is in no subspace: no cut lies behind layer "
                    f"{last - 1}, and this one is before layer {cut}"
                )

    def _keep_in_subspace(self) -> None:
        if self._subspace is not None:
            project_weights(self._subspace, self._traits, self._parameters, self._stage.num_layers)

    def _project_gradients(self) -> None:
        """Leave of the gradients what a step may follow, once they are whole."""
        if self._subspace is not None and not self._are_projected:
            project_gradients(
                self._subspace, self._traits, self._parameters, self._stage.num_layers
            )
            self._are_projected = True

    def _new_optimizer(self) -> torch.optim.Optimizer | None:
        """Make the optimiser; None where nothing learns, as in a stage without any layer that an adapter names."""
        return make_optimizer(self._settings.inner, self._values) if self._values else None

    def _state(self, parameter: Tensor) -> dict[str, Tensor | None]:
        return {} if self._optimizer is None else self._optimizer.state.get(parameter, {})

    def _piece_of(self, name: str, first: frozenset[str]) -> str:
        layer_id = layer_of(name, self._stage.num_layers)
        if layer_id is not None:
            return layer_piece(layer_id)
        if self._stage.is_of_layer(name):
            raise UnsupportedModelError(f"cannot tell which layer {name} belongs to")
        return FIRST if name in first else LAST

    def _require_known(
        self, pieces: Mapping[str, Mapping[str, Tensor]], keys: tuple[str, ...]
    ) -> None:
        """Raises CheckpointError where a piece of this stage alone has what nobody knows."""
        known = {
            title: {name for name in self.names if self._pieces[name] == title}
            for title in self.wanted_pieces
        }
        for title, names in known.items():
            if title == FIRST and not self.is_first:
                continue  # most of it is the first stage's
            expected = names | {f"{key}/{name}" for key in keys for name in names}
            if strangers := sorted(pieces[title].keys() - expected):
                raise CheckpointError(
                    f"piece {title!r} has {strangers[0][:80]!r}: it belongs to another model or optimiser"
                )

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._has_narrow)

    def _seed(self, step: int, number: int) -> None:
        seed_device(self._device, _seed_of(self._settings.seed, step, number, self._settings.start))

    def _check_given(self, given: Tensor, tokens: Tensor | None) -> None:
        if self.is_first:
            _check_ids("token ids", given, self._vocab_size)
            return
        size = self._settings.subspace or self._hidden_size
        if given.ndim != 3 or given.shape[-1] != size or not given.is_floating_point():
            raise ValueError(
                f"a hidden state [B, T, {size}] is due, got {given.dtype} {list(given.shape)}"
            )
        if self._subspace is not None and tokens is not None:
            _check_ids("token ids", tokens, self._vocab_size)
            if tokens.shape != given.shape[:2]:
                raise ValueError(
                    f"token ids {list(given.shape[:2])} are due, got {list(tokens.shape)}"
                )

    def _check_labels(self, labels_BT: Tensor, given: Tensor) -> None:
        if labels_BT.shape != given.shape[:2]:
            raise ValueError(f"labels {list(given.shape[:2])} are due, got {list(labels_BT.shape)}")
        # Elsewhere than here a label beyond the vocabulary ends the process.
        _check_ids("labels", labels_BT.masked_fill(labels_BT == IGNORED_LABEL, 0), self._vocab_size)

    def _require_tied(self) -> None:
        if not self._tied:
            raise ValueError("nothing in this stage is tied")
        if self._has_tied_gradient:
            raise ValueError("the gradient of what is tied is whole already")

    def _require_whole(self) -> None:
        if self._tied and not self._has_tied_gradient:
            raise ValueError("the other stage's gradient of what is tied is missing")


class _Others(Mapping[str, Tensor]):
    """Tensors without those of adapters; none is read that nobody asks for."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._names = [name for name in tensors if not is_adapter_tensor(name)]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _check_ids(what: str, ids_BT: Tensor, vocab_size: int) -> None:
    if ids_BT.ndim != 2 or ids_BT.dtype != torch.int64 or not ids_BT.numel():
        raise ValueError(f"{what} [B, T] of int64 are due, got {ids_BT.dtype} {list(ids_BT.shape)}")
    low, high = map(int, torch.aminmax(ids_BT))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{what} are from 0 to {vocab_size - 1}, got {low} to {high}")


def _check_piece(title: str, piece: Mapping[str, Tensor], name: str, shape: torch.Size) -> None:
    value = piece.get(name)
    if value is None:
        raise CheckpointError(f"piece {title!r} lacks {name}")
    if value.shape != shape or value.dtype != torch.float32:
        raise CheckpointError(
            f"{name} in piece {title!r} is {value.dtype} {list(value.shape)}, and the model has torch.float32 "
            f"{list(shape)}"
        )


@functools.lru_cache(maxsize=1)
def _traits_of(config: str) -> SubspaceTraits:
    """Prove that hidden states can be in a subspace: once for a config, also where stages are arranged anew."""
    return check_subspace(build_config(parse_config(config)))


def _quantization_of(settings: StageSettings) -> Quantization | None:
    record = parse_config(settings.quantization) if settings.quantization else None
    return Quantization.from_record(record)


def _seed_of(seed: int, step: int, number: int, start: int) -> int:
    """A seed for one micro-batch: seeds that are near each other make streams that are not alike."""
    text = f"neurogrid stage {seed} {step} {number} {start}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
