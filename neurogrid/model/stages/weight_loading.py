"""Weights into modules through transformers' own conversion, without making what is not wanted.

transformers converts checkpoints while it loads them (merges the experts of a layer into one
tensor, renames keys), so weights are never assigned by hand: `from_pretrained` of the model's own
class is given a model that already exists, one layer of it real and all else placeholders, with
that layer's tensors. What is to stay out of memory is fed as zeros that occupy one element. A key
that is missing, unexpected or of another shape is an error; nothing stays as it was initialised.

This module does not know where tensors come from, nor which layer they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from neurogrid.errors import CheckpointError
from neurogrid.model.files.model_code import MODEL_CODE_ERRORS, one_line, quiet_transformers
from neurogrid.model.files.safetensors_header import ALIGNMENT
from neurogrid.model.stages.device_copies import DeviceCopies

__all__ = [
    "Pristine",
    "hollow",
    "load_tensors",
    "move_to",
    "place_module",
]

_MAX_NAMES_SHOWN = 3

# Frequencies are as many as half a head is wide; larger buffers are tables that nothing rewrites.
_MAX_BUFFER_ELEMENTS = 65_536


def hollow(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Zeros of the shape and dtype of `tensor` that occupy one element."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def load_tensors(
    model: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    is_wanted: Callable[[str], bool],
    what: str,
    may_lack: bool = False,
) -> None:
    """Load `tensors` into those parameters of `model` whose name `is_wanted`; hollow the others.

    On the CPU. A tensor that needs neither cast nor conversion and whose memory is aligned is used
    as it is: it must stay unchanged afterwards.

    Args:
        model: on the meta device; one that was loaded before would not be initialised again.
        tensors: by checkpoint name, in the layout of the checkpoint.
        is_wanted: tells by its name in the model whether a parameter must come from `tensors`.
        what: for messages, such as "layer 3".
        may_lack: accept that a parameter that is wanted comes from nowhere; it then is what transformers makes it.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape than the config says.
    """
    state = {name: _aligned(tensor) for name, tensor in tensors.items()}
    for name, parameter in model.state_dict().items():
        if not is_wanted(name) and name not in state:
            state[name] = hollow(parameter)
    # A class whose construction gives the model that is there: what it makes is no instance of it,
    # so Python does not call __init__.
    existing: Any = type("Existing", (type(model),), {"__new__": lambda *args, **kwargs: model})
    try:
        with quiet_transformers():
            _, info = existing.from_pretrained(
                None,
                config=model.config,
                state_dict=state,
                dtype=dtype,
                # Not ignored: told below, by name.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except MODEL_CODE_ERRORS as exc:
        raise CheckpointError(
            f"{what} cannot be loaded, a tensor may be missing or of a wrong shape ({one_line(exc)})"
        ) from exc
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        name, shape, expected = mismatched[0]
        raise CheckpointError(
            f"{name} of {what} has shape {list(shape)}, the config says {list(expected)}"
        )
    missing = sorted(name for name in info["missing_keys"] if is_wanted(name))
    if missing and not may_lack:
        raise CheckpointError(f"{what} lacks {_some(missing)}")
    unexpected = sorted(
        name for name in info["unexpected_keys"] if not _adds_nothing(name, tensors)
    )
    if unexpected:
        raise CheckpointError(
            f"{what} has tensors that the model does not know: {_some(unexpected)}"
        )


def _adds_nothing(name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a tensor is a bias of zeros: GPTQ's tools write one for each matrix, whether the model has it or not.

    Args:
        name: as transformers tells it, which may have renamed what stands before the layer's own part.
    """
    parts = name.split(".")
    if parts[-1] != "bias":
        return False
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        found = [each for key, each in tensors.items() if f".{key}".endswith(f".{end}")]
        if found:
            return not any(bool(each.any()) for each in found)
    return False


def move_to(device: torch.device, modules: Iterable[nn.Module]) -> None:
    """Move parameters and buffers of `modules` (not of their children); hollow ones stay hollow.

    What two modules share they share afterwards, too: tied embeddings are one parameter, with one gradient.
    """
    # Each is kept, since its number would be another's once it is let go.
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in modules:
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device == device:
                continue
            if id(parameter) not in moved:
                is_hollow = parameter.numel() > 1 and not any(parameter.stride())
                there = hollow(parameter, device) if is_hollow else parameter.to(device)
                moved[id(parameter)] = parameter, nn.Parameter(there)
            setattr(module, name, moved[id(parameter)][1])


def place_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Put all parameters and buffers of `module` on `device`, where they are when this returns; returns it.

    Others take their places: a tensor of one device cannot become one of every other.
    """
    # What two modules share stays shared. Each is kept, since its number would be another's once it is let go.
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    with DeviceCopies(device) as copies:
        for each in module.modules():
            for name, tensor in (
                *each.named_buffers(recurse=False),
                *each.named_parameters(recurse=False),
            ):
                if tensor.device == device:
                    continue
                if id(tensor) not in moved:
                    there = copies.copy(tensor)
                    if isinstance(tensor, nn.Parameter):
                        there = nn.Parameter(there, requires_grad=tensor.requires_grad)
                    moved[id(tensor)] = tensor, there
                setattr(each, name, moved[id(tensor)][1])
    return module


class Pristine:
    """The state of modules besides weights, as it was: buffers, and plain attributes beside them.

    Rotary embeddings that are scaled by length rewrite their frequencies in a forward and keep them
    for the next, which may be another session's. `restore` before each forward makes a forward
    depend on its arguments alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in modules:
            owned = [
                (module, name, buffer, buffer.clone())
                for name, buffer in module.named_buffers(recurse=False)
                if buffer.numel() <= _MAX_BUFFER_ELEMENTS
            ]
            if owned:
                self._buffers += owned
                plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float))}
                self._attributes.append((vars(module), plain))

    def restore(self, *, anew: bool = False) -> None:
        """Put everything back as it was when this object was made.

        Args:
            anew: in buffers of their own: a backward pass that is still to come needs those of its forward.
        """
        for module, name, buffer, content in self._buffers:
            if anew:
                setattr(module, name, content.clone())
                continue
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            buffer.copy_(content)
        for attributes, plain in self._attributes:
            attributes.update(plain)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, copied if need be to where PyTorch would have put it.

    Kernels choose their order of summation by alignment (seen in MKL: 2e-7 off in float32), so a
    tensor inside a received or mapped file would not give the numbers of the whole model.
    """
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    more = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
