"""Bytes that somebody sent to pixels, by Pillow: bounded before anything is decoded."""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "IMAGE_FORMATS",
    "MAX_IMAGES",
    "MAX_IMAGE_BYTES",
    "MAX_IMAGE_PIXELS",
    "decode_image",
    "open_image",
]

IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are read, as Pillow calls them; of an animation the first frame."""
MAX_IMAGES: Final = 16
"""Images of one prompt."""
MAX_IMAGE_BYTES: Final = 20 * 1024 * 1024
"""Bytes of an image's file: what OpenAI's API takes."""
MAX_IMAGE_PIXELS: Final = 40_000_000
"""Pixels of an image: 160 MB decoded, with what is made of them on the way. A file of some KB may ask for billions."""

# What Pillow's readers raise on files that are cut or wrong within, and on what a camera says beside the pixels.
_BROKEN: Final = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, OverflowError),
    *(struct.error, TypeError, AttributeError, ZeroDivisionError),
)


def open_image(data: bytes) -> Image:
    """The image, of which nothing is decoded yet: Pillow does that when somebody looks at its pixels.

    Raises:
        ConfigurationError: it is none of IMAGE_FORMATS, broken, or too large; in one sentence.
    """
    # Pillow takes some milliseconds, and only who sends images needs it.
    from PIL import Image

    if len(data) > MAX_IMAGE_BYTES:
        raise ConfigurationError(
            f"it has {len(data):,} bytes, and {MAX_IMAGE_BYTES:,} is the limit"
        )
    with _told():
        opened = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    width, height = opened.size
    if width * height > MAX_IMAGE_PIXELS:
        raise ConfigurationError(
            f"it has {width} x {height} pixels, and {MAX_IMAGE_PIXELS:,} in all is the limit"
        )
    return opened


def decode_image(data: bytes) -> Image:
    """The image in RGB, turned as its camera says.

    Raises:
        ConfigurationError: as `open_image`.
    """
    from PIL import ImageOps

    with open_image(data) as opened, _told():
        return ImageOps.exif_transpose(opened).convert("RGB")


@contextmanager
def _told() -> Iterator[None]:
    """Errors of Pillow as a sentence, and no warnings: of what is larger than its own bound, which is above ours, and
    of tags that nobody needs."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Image.DecompressionBombError as exc:
        raise ConfigurationError(
            f"it has far too many pixels: {MAX_IMAGE_PIXELS:,} is the limit"
        ) from exc
    except UnidentifiedImageError as exc:
        kinds = ", ".join(IMAGE_FORMATS[:-1]) + f" or {IMAGE_FORMATS[-1]}"
        raise ConfigurationError(f"it is no image in {kinds}") from exc
    except _BROKEN as exc:
        reason = " ".join(str(exc).split())[:100] or type(exc).__name__
        raise ConfigurationError(f"it is broken ({reason})") from exc
