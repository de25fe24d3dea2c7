"""Kernels that Triton compiles on the machine: whether there are any, and their launches.

torch brings Triton along where it is built for CUDA. To compile takes a C compiler and Python's headers, too, and some
seconds for each form of codes, once on a machine: Triton keeps what it made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from subprocess import SubprocessError
from types import ModuleType
from typing import Any

import torch

__all__ = ["Launcher", "what_is_wrong"]

# What pointers are multiples of where kernels are compiled for wide loads.
_ALIGNMENT = 16


@cache
def _kernels() -> ModuleType | None:
    """The kernels of `triton_kernels`; None where there is no Triton."""
    try:
        from neurogrid.model.kernels import triton_kernels
    except ImportError:
        return None
    return triton_kernels


def what_is_wrong(check: Callable[[], str]) -> str:
    """Return the reason for which kernels do not serve, in words; empty if they do.

    Args:
        check: launches some, and says what is wrong with what they give.

    Raises:
        torch.OutOfMemoryError: the device has no memory for it at this moment, which says nothing of the kernels.
    """
    kernels = _kernels()
    if kernels is None:
        return "there is no Triton"
    try:
        return check()
    except torch.OutOfMemoryError:
        raise
    # What was compiled may not be loaded, as from a file system that runs nothing: that is an ImportError.
    except (RuntimeError, OSError, ImportError, SubprocessError, kernels.TritonError) as exc:
        return f"they cannot be compiled ({str(exc).strip().partition(chr(10))[0]})"


class Launcher:
    """Launches one kernel for one matrix.

    Triton's own dispatch looks at each argument each time. So it has the first launch, and later ones go to what it
    compiled for that.

    Args:
        name: of the kernel.
        tensors: the matrix, the kernel's first arguments; they have to live as long as this.
        sizes: its next arguments.
        constants: what it is compiled for, its last arguments in their order.
        options: of the compiler.
    """

    def __init__(
        self,
        name: str,
        tensors: tuple[torch.Tensor, ...],
        sizes: tuple[int, ...],
        constants: Mapping[str, int],
        **options: Any,
    ) -> None:
        self._kernel = getattr(_kernels(), name)
        self._tensors = tensors
        self._sizes = sizes
        self._constants = tuple(constants.values())
        self._options = options
        self._known = (*(tensor.data_ptr() for tensor in tensors), *sizes)
        self._device_index = tensors[0].device.index
        self._compiled: dict[tuple[torch.dtype, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, ...], tensors: tuple[torch.Tensor, ...], *numbers: int
    ) -> None:
        """Launch it in the current stream of the matrix' device.

        Args:
            tensors: arguments that are others each time, after those of the matrix.
            numbers: arguments after these.
        """
        dtypes = tuple(tensor.dtype for tensor in tensors)
        pointers = [tensor.data_ptr() for tensor in tensors]
        is_aligned = not any(pointer % _ALIGNMENT for pointer in pointers)
        compiled = self._compiled.get(dtypes) if is_aligned else None
        with torch.accelerator.device_index(self._device_index):
            if compiled is not None:
                compiled[grid](*self._known, *pointers, *numbers, *self._constants)
                return
            compiled = self._kernel[grid](
                *self._tensors,
                *self._sizes,
                *tensors,
                *numbers,
                *self._constants,
                **self._options,
            )
        if is_aligned:
            self._compiled[dtypes] = compiled
