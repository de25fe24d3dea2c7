"""A conversation's text and its images to tokens and the inputs of a tower, by the model's own processor.

transformers' processors turn each placeholder of an image into as many tokens as it takes, by its size. Images are
resized and normalised by the classes that need Pillow alone. No family is known here.

A file of some KB may take hundreds of MB while it is decoded and resized. So images take turns (`turns`) where that
gives what all of them together give.

Shape legend: N images.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.auto import processing_auto

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.model.files.model_code import one_line, quiet_transformers
from neurogrid.model.images.decoding import MAX_IMAGE_PIXELS, decode_image, open_image
from neurogrid.model.images.turns import ImagesInTurn, TooManyTokensError
from neurogrid.p2p.wire import ImageSpan

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageInputs", "ImageReader", "TooManyTokensError"]

# Of one prompt's images, where they have to be decoded at once.
MAX_PIXELS_AT_ONCE: Final = 2 * MAX_IMAGE_PIXELS


@dataclass(frozen=True)
class ImageInputs:
    """The images of a prompt, made ready for the tower.

    Attributes:
        spans: where each is among the prompt's tokens, in order.
        digests: 32 bytes of each, of what the tower is given of it: two images that have the same look the same.
        tensors: what the tower is given for all of them, by the names of its arguments.
    """

    spans: tuple[ImageSpan, ...]
    digests: tuple[bytes, ...]
    tensors: dict[str, torch.Tensor] = field(repr=False)


class ImageReader:
    """The processor of a checkpoint; one call at a time goes through it, from any thread. Made by `open`."""

    def __init__(self, processor: Any, turns: ImagesInTurn, token_id: int) -> None:
        self._processor = processor
        self._turns = turns
        self._token_id = token_id
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path, *, model_type: str, token_id: int) -> ImageReader:
        """Read the processor in a checkpoint directory.

        Args:
            model_type: of the whole model.
            token_id: of the token that stands for images.

        Raises:
            UnsupportedModelError: transformers has no processor for the type.
            CheckpointError: its files are missing or damaged.
        """
        known: Any = processing_auto  # not typed by transformers
        name = known.PROCESSOR_MAPPING_NAMES.get(model_type)
        found: Any = known.processor_class_from_name(name) if isinstance(name, str) else None
        if found is None:
            raise UnsupportedModelError(
                f"transformers has no processor for model type {model_type[:64]!r}"
            )
        if not any((folder / each).is_file() for each in _PROCESSOR_FILES):
            raise CheckpointError(
                f"{folder}: {' or '.join(_PROCESSOR_FILES)} is missing, which says how images are made ready; copy it "
                "there from where the model came from"
            )
        # Videos are not read: their processors need more packages, and nothing here gives them one.
        images_only: Any = type(
            f"{name}OfImages",
            (found,),
            {"check_argument_for_proper_class": lambda self, name, argument: None},
        )
        try:
            with quiet_transformers():
                images: Any = AutoImageProcessor.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False, backend="pil"
                )
                tokenizer: Any = AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
                told, _ = found.get_processor_dict(folder, local_files_only=True)
                turns = ImagesInTurn(images)
                parts = {"image_processor": turns, "tokenizer": tokenizer}
                others = {each: None for each in found.get_attributes() if each not in parts}
                own = {
                    key: value
                    for key, value in told.items()
                    if key not in (*found.get_attributes(), "processor_class", "auto_map")
                }
                processor: Any = images_only(**parts, **others, **_taken(found, own))
        except Exception as exc:
            # As broad as for tokenizers: what damaged files make of it is of any kind.
            raise CheckpointError(
                f"{folder}: the processor of images cannot be read: {one_line(exc) or type(exc).__name__}"
            ) from exc
        return cls(processor, turns, token_id)

    def read(
        self,
        text: str,
        images: Sequence[bytes],
        *,
        max_tokens: int | None = None,
        on_image: Callable[[], object] = lambda: None,
    ) -> tuple[list[int], ImageInputs]:
        """The tokens of a conversation's text, and its images. Blocks: run it in a thread.

        Args:
            text: with one placeholder for each image, as the chat template writes them, and special tokens.
            images: the bytes of their files.
            max_tokens: of all images together; None for any number.
            on_image: called before each of them is decoded, which takes seconds for a large one; ends this by raising.

        Raises:
            TooManyTokensError: they have more.
            ConfigurationError: an image is refused (decoding.py), or the model's processor refuses them; says which.
        """
        opened = [_numbered(number, open_image, data) for number, data in enumerate(images, 1)]

        def decoded(number: int, data: bytes) -> Image:
            on_image()
            return _numbered(number, decode_image, data)

        decode = [partial(decoded, number, data) for number, data in enumerate(images, 1)]
        with self._lock:
            made = self._made_in_turn(text, opened, decode, max_tokens)
            if made is None:
                num_pixels = sum(each.width * each.height for each in opened)
                if num_pixels > MAX_PIXELS_AT_ONCE:
                    raise ConfigurationError(
                        f"these images have {num_pixels:,} pixels together, and {MAX_PIXELS_AT_ONCE:,} is the limit "
                        "with this model: send fewer, or smaller ones"
                    )
                made = self._made(text, [each() for each in decode])
        token_ids: list[int] = made["input_ids"][0].tolist()
        tensors = {
            name: each
            for name, each in made.items()
            if isinstance(each, torch.Tensor) and name not in ("input_ids", "attention_mask")
        }
        return token_ids, self._inputs(token_ids, tensors, len(images))

    def _made_in_turn(
        self,
        text: str,
        opened: Sequence[Image],
        decode: Sequence[Callable[[], Image]],
        max_tokens: int | None,
    ) -> Any:
        """Have the processor read the text and its images, one decoded at a time; None where that cannot be."""
        if not self._turns.is_possible:
            return None
        made: Any = None
        with self._turns.of(decode, max_tokens) as turns:
            try:
                made = self._made(text, opened)
            except ConfigurationError:
                if not turns.was_asked_otherwise:
                    raise
        # One that looks at images by itself has not seen them as they are.
        return made if turns.is_over and not turns.was_asked_otherwise else None

    def _made(self, text: str, images: Sequence[Image]) -> Any:
        try:
            with quiet_transformers():
                return self._processor(
                    text=[text], images=[images], add_special_tokens=False, return_tensors="pt"
                )
        except ConfigurationError:
            raise
        except Exception as exc:
            # Of any kind; StopIteration where there are more placeholders than images.
            reason = one_line(exc) or "the conversation's text has its token for images, too"
            raise ConfigurationError(
                f"the model's processor refuses these images: {reason}"
            ) from exc

    def _inputs(
        self, token_ids: Sequence[int], tensors: dict[str, torch.Tensor], num_images: int
    ) -> ImageInputs:
        places = [i for i, token_id in enumerate(token_ids) if token_id == self._token_id]
        pixels, grid_N3 = tensors["pixel_values"], tensors.get("image_grid_thw")
        if grid_N3 is not None:
            parts = list(pixels.split(grid_N3.prod(-1).tolist()))
            merge = getattr(self._processor.image_processor, "merge_size", 1)
            shapes = [(rows // merge, columns // merge) for _, rows, columns in grid_N3.tolist()]
        else:
            parts = list(pixels)
            shapes = [(1, len(places) // max(num_images, 1))] * num_images
        num_tokens = sum(rows * columns for rows, columns in shapes)
        if len(parts) != num_images or num_tokens != len(places):
            raise ConfigurationError(
                f"the model's processor makes {len(parts)} images with {len(places)} tokens of {num_images} images: "
                "images in several parts are not served"
            )
        spans, at = [], 0
        for rows, columns in shapes:
            span = ImageSpan(places[at], rows, columns)
            at += span.num_tokens
            if places[at - 1] != span.stop - 1:
                raise ConfigurationError("the tokens of an image do not follow each other")
            spans.append(span)
        digests = tuple(
            sha256(repr((shape, tuple(part.shape))).encode() + part.numpy().tobytes()).digest()
            for shape, part in zip(shapes, parts, strict=True)
        )
        return ImageInputs(tuple(spans), digests, tensors)


def _numbered(number: int, function: Callable[[bytes], Image], data: bytes) -> Image:
    """Apply `function` to an image's file; where it raises, say which image that is."""
    try:
        return function(data)
    except ConfigurationError as exc:
        raise ConfigurationError(f"image {number} cannot be read: {exc}") from exc


# One of them has the settings of the image processor.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def _taken(processor_class: Any, told: dict[str, Any]) -> dict[str, Any]:
    """Return those settings of a processor that its class takes."""
    taken = inspect.signature(processor_class.__init__).parameters
    return {key: value for key, value in told.items() if key in taken}
