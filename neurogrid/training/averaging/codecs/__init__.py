"""The forms of a float32 vector on the wire: numbers in, bytes out, and back (`protocol_spec/training/forms.md`).

The same numbers give the same bytes on every machine, and the same bytes the same numbers: only operations whose
result IEEE 754 fixes are used, element by element, and sums in a fixed order. It knows neither rounds nor peers.

    codec             what every form can do, and the checks that all of them need
    floats            f32, f16, bf16: each element by itself
    integers          int8, int4: groups of 256 with a scale
    top_k             the largest of 4,096, in 2 bits, by index
    sign              one bit, and a scale for 4,096
    names             a form by its name
    error_feedback    what was lost is added next time
"""

from neurogrid.training.averaging.codecs.codec import Codec
from neurogrid.training.averaging.codecs.error_feedback import ErrorFeedback
from neurogrid.training.averaging.codecs.names import parse_codec

__all__ = ["Codec", "ErrorFeedback", "parse_codec"]
