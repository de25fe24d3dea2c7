"""The compiled products: opened, checked against plain ones, and asked what this processor has.

`kernels.so` lies beside this file where a compiler was there when the package was built, and opens by ctypes: it knows
nothing of Python.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import torch

from neurogrid.errors import ConfigurationError

__all__ = ["ELEMENT_TYPES", "VARIABLE", "Kind", "Library", "MatrixFields", "open_library"]

logger = logging.getLogger(__name__)

VARIABLE: Final = "NEUROGRID_KERNELS"
"""Takes a lower level than the processor's ("avx2" where it has AVX-512), or "none"."""

_FILE: Final = Path(__file__).with_name("kernels.so")
# Of `ng_interface` in kernels.c.
_INTERFACE: Final = 4
_NONE: Final = "none"
_LEVELS: Final = ("neon",) if platform.machine() == "aarch64" else ("avx2", "avx512")

ELEMENT_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of kernels.c for what activations and scales may be."""


class Kind(IntEnum):
    """Products, numbered as in kernels.c.

    INT8: activations are rounded to 8 bits in groups of 32 first. HALF: there is a scale for each 16 inputs.
    E4M3: the codes are floats of 8 bits.
    """

    BF16 = 0
    BF16_DOT = 1
    CODES8 = 2
    CODES8_INT8 = 3
    CODES4 = 4
    CODES4_INT8 = 5
    CODES8_HALF = 6
    CODES8_E4M3 = 7


class MatrixFields(ctypes.Structure):
    """`struct matrix` of kernels.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "minimums", "table", "bias")),
        *(
            (name, ctypes.c_int64)
            for name in ("outputs", "inputs", "padded_inputs", "scale_groups")
        ),
        ("kind", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
    )


class Library:
    """The compiled products at one level.

    Attributes:
        level: "avx512" (with VNNI and bfloat16), "avx2" or "neon".
        has_bf16_dot: whether bfloat16 is multiplied with bfloat16 by an instruction for it.
    """

    def __init__(self, loaded: ctypes.CDLL, level: str) -> None:
        self.level = level
        self.has_bf16_dot = level == "avx512"
        self._number = _LEVELS.index(level) + 1
        self._multiply = loaded.ng_multiply
        pointer, size, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._multiply.argtypes = (
            pointer,
            integer,
            pointer,
            integer,
            pointer,
            integer,
            size,
            integer,
        )
        self._project = loaded.ng_project_layer
        self._project.argtypes = (
            *(
                pointer,
                integer,
                pointer,
                size,
                size,
                pointer,
                pointer,
                size,
                pointer,
                pointer,
                pointer,
                pointer,
            ),
            integer,
        )
        self._finish = loaded.ng_finish_layer
        self._finish.argtypes = (
            *(pointer, integer, pointer, size, size, pointer, pointer, pointer, size, pointer),
            *(pointer, pointer, pointer, pointer, integer),
        )

        self._adapt = loaded.ng_adapt
        self._adapt.argtypes = (*(integer, pointer, pointer, pointer, size, size, size), integer)
        self._adapt.restype = None

    def multiply(self, fields: int, given: torch.Tensor, result: torch.Tensor) -> None:
        """Multiply the rows of `given` [R, I] with a matrix into `result` [R, O], both contiguous.

        Args:
            fields: the address of `MatrixFields`, all of whose pointers the caller holds.

        Raises:
            MemoryError: there is none for the activations in another form.
        """
        failed = self._multiply(
            fields,
            self._number,
            given.data_ptr(),
            ELEMENT_TYPES[given.dtype],
            result.data_ptr(),
            ELEMENT_TYPES[result.dtype],
            given.shape[0],
            torch.get_num_threads(),
        )
        self._check(failed)

    def project(
        self,
        fields: int,
        hidden: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        adapters: Any,
    ) -> None:
        """`ng_project_layer` of kernels.c: the first half of a decoder layer. Checked by `CompiledLayer`."""
        failed = self._project(
            fields,
            self._number,
            hidden.data_ptr(),
            hidden.shape[0],
            hidden.shape[1],
            cosines.data_ptr(),
            sines.data_ptr(),
            cosines.shape[0],
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            adapters,
            torch.get_num_threads(),
        )
        self._check(failed)

    def finish(
        self,
        fields: int,
        hidden: torch.Tensor,
        queries: torch.Tensor,
        keys: Any,
        values: Any,
        num_keys: int,
        first_keys: Any,
        mask: torch.Tensor | None,
        result: torch.Tensor,
        normed: torch.Tensor | None,
        adapters: Any,
    ) -> None:
        """`ng_finish_layer` of kernels.c: the second half of a decoder layer. Checked by `CompiledLayer`."""
        failed = self._finish(
            fields,
            self._number,
            hidden.data_ptr(),
            hidden.shape[0],
            hidden.shape[1],
            queries.data_ptr(),
            keys,
            values,
            num_keys,
            first_keys,
            None if mask is None else mask.data_ptr(),
            result.data_ptr(),
            None if normed is None else normed.data_ptr(),
            adapters,
            torch.get_num_threads(),
        )
        self._check(failed)

    def adapt(self, adapters: Any, given: torch.Tensor, result: torch.Tensor) -> None:
        """`ng_adapt` of kernels.c: add to each row of `result` [R, O] what its adapter makes of `given` [R, I].

        Args:
            adapters: R addresses of `LowRank` on the CPU, with these O and I; 0 for none.
            given, result: float32, contiguous, on the CPU.

        Raises:
            ValueError: they are something else.
        """
        for each in (given, result):
            if each.dtype != torch.float32 or each.dim() != 2 or not each.is_contiguous():
                raise ValueError("rows in float32 that lie together are due")
        if not len(adapters) == given.shape[0] == result.shape[0] or not given.is_cpu:
            raise ValueError(f"{len(adapters)} adapters are given for {list(given.shape)}")
        self._adapt(
            self._number,
            adapters,
            given.data_ptr(),
            result.data_ptr(),
            given.shape[0],
            given.shape[1],
            result.shape[1],
            torch.get_num_threads(),
        )

    def _check(self, failed: int) -> None:
        if failed == 1:
            raise MemoryError("no memory for the activations of a product")
        if failed:
            raise AssertionError(f"no such product at level {self.level}")


def open_library(wanted: str | None) -> Library | None:
    """The products at the highest level of this processor, or at the one that is wanted; None where there are none.

    Raises:
        ConfigurationError: the level that is wanted is not one of this processor, or nothing was built.
    """
    if wanted == _NONE:
        return None
    try:
        loaded = ctypes.CDLL(str(_FILE))
    except OSError as exc:
        if wanted is not None:
            raise ConfigurationError(
                f"{VARIABLE} is {wanted!r}, and the package was built without products"
            ) from exc
        logger.info(
            "torch's own products serve, the compiled ones are not there (%s): build them with a C compiler, by "
            "`make kernels`, for 2 to 5 times the speed",
            exc,
        )
        return None
    if not hasattr(loaded, "ng_interface") or loaded.ng_interface() != _INTERFACE:
        raise ConfigurationError(
            f"{_FILE} is of another version than the package: build it anew, by `make kernels`"
        )
    most = loaded.ng_level()
    levels = _LEVELS[:most]
    if wanted is not None and wanted not in levels:
        raise ConfigurationError(
            f"{VARIABLE} is {wanted!r}; this processor has {', '.join(levels) or 'no level'}, or say {_NONE!r}"
        )
    if not levels:
        logger.info("torch's own products serve: this processor lacks AVX2")
        return None
    return Library(loaded, wanted or levels[-1])
