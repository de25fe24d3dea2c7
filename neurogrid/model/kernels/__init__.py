"""Products with matrices as a checkpoint has them: bfloat16, or codes of 8 and 4 bits.

`Codes` is the one form of all that is quantised, and `quantize` makes it of weights. `Matrix` multiplies with codes
or with bfloat16, where `library` was built and passes its own check; elsewhere torch's products serve. On CUDA codes
are multiplied, too: of 4 bits by torch's own kernel (int4.py), and by those that Triton compiles (gpu_codes.py).
`CompiledLayer` is all of a decoder layer. `encode_states` and `decode_states` make codes of what a cache holds.
"""

from neurogrid.model.kernels.chosen import library
from neurogrid.model.kernels.coded_states import (
    CODED_DTYPE,
    coded_size,
    decode_states,
    encode_states,
)
from neurogrid.model.kernels.codes import CODE_GROUP, E4M3, HALF_GROUP, Codes, join_rows, quantize
from neurogrid.model.kernels.compiled import Library
from neurogrid.model.kernels.layer import (
    NUM_PLACES,
    Activation,
    CompiledLayer,
    LayerParts,
    Norm,
    NormPart,
)
from neurogrid.model.kernels.linear import (
    Bfloat16Linear,
    CodesLinear,
    NarrowLinear,
    held_codes,
    hold_as_bfloat16,
    in_shape_only,
    matrix_of,
)
from neurogrid.model.kernels.low_rank import LowRank
from neurogrid.model.kernels.matrix import Matrix

__all__ = [
    "CODED_DTYPE",
    "CODE_GROUP",
    "E4M3",
    "HALF_GROUP",
    "NUM_PLACES",
    "Activation",
    "Bfloat16Linear",
    "Codes",
    "CodesLinear",
    "NarrowLinear",
    "CompiledLayer",
    "LayerParts",
    "Library",
    "LowRank",
    "Matrix",
    "Norm",
    "NormPart",
    "coded_size",
    "decode_states",
    "encode_states",
    "held_codes",
    "hold_as_bfloat16",
    "in_shape_only",
    "join_rows",
    "library",
    "matrix_of",
    "quantize",
]
