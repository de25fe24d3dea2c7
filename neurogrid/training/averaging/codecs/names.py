"""A form of the wire by its name, as run files and rounds say it."""

from __future__ import annotations

import re
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.training.averaging.codecs.codec import Codec
from neurogrid.training.averaging.codecs.floats import Bfloat16, Float16, Float32
from neurogrid.training.averaging.codecs.integers import Int4, Int8
from neurogrid.training.averaging.codecs.sign import Sign
from neurogrid.training.averaging.codecs.top_k import TopK

__all__ = ["parse_codec"]

_PLAIN: Final = {each.name: each for each in (Float32, Float16, Bfloat16, Int8, Int4, Sign)}


def parse_codec(name: str) -> Codec:
    """The form called `name`: `f32`, `f16`, `bf16`, `int8`, `int4`, `sign`, or `topk:K` with K of 4,096 sent.

    `topk` alone is `topk:64`.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if plain := _PLAIN.get(name):
        return plain()
    if match := re.fullmatch(r"topk(?::([1-9][0-9]{0,3}))?", name, re.ASCII):
        return TopK(int(match[1] or 64))
    raise ConfigurationError(
        f"no form of the wire is called {name[:40]!r}: there are {', '.join(_PLAIN)}, and topk:1 to topk:4096"
    )
