"""Images by class: a folder for each class, in the order of their names, with images of one size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.preparing.documents import files_under

__all__ = ["IMAGE_SUFFIXES", "ImageFolder"]

IMAGE_SUFFIXES: Final = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"})
# Modes of Pillow that have no colour.
_GREY: Final = frozenset({"1", "L", "LA"})


class ImageFolder:
    """The images below a folder. The headers of all are read at once, the images themselves when they are asked for.

    Args:
        side: height and width that all are resized to; 0 to leave them, if all have the same.

    Attributes:
        classes: names, in the order of labels.
        shape: channels, height, width.

    Raises:
        ConfigurationError: they are of different sizes, of fewer than two classes, or one of them is no image.
    """

    def __init__(self, folder: Path, *, side: int = 0) -> None:
        self._pillow = _pillow(folder)
        self._side = side
        self.classes = sorted(
            each.name
            for each in folder.iterdir()
            if each.is_dir() and not each.name.startswith(".")
        )
        if len(self.classes) < 2:
            raise ConfigurationError(
                f"{folder} has {len(self.classes)} directories of images: there is one for each class, and two at "
                "least to be told apart"
            )
        found = [files_under(folder / name, IMAGE_SUFFIXES) for name in self.classes]
        for name, files in zip(self.classes, found, strict=True):
            if not files:
                raise ConfigurationError(f"{folder / name} is a class without images")
        self._files = [(path, label) for label, files in enumerate(found) for path in files]
        self.shape = self._find_shape()

    def __len__(self) -> int:
        return len(self._files)

    def load(self, numbers: Iterator[int] | list[int]) -> tuple[Any, Any]:
        """Images and labels: uint8 [n, channels, height, width], int64 [n]."""
        chosen = [self._files[number] for number in numbers]
        pixels = np.empty((len(chosen), *self.shape), np.uint8)
        for index, (path, _) in enumerate(chosen):
            pixels[index] = self._pixels(path)
        return pixels, np.array([label for _, label in chosen], np.int64)

    def _find_shape(self) -> tuple[int, int, int]:
        first: tuple[int, int] | None = None
        is_grey = True
        for path, _ in self._files:
            with self._opened(path) as image:
                size = (self._side, self._side) if self._side else image.size
                is_grey &= image.mode in _GREY
            if first is None:
                first = size
            elif first != size:
                raise ConfigurationError(
                    f"{path} is {size[0]} x {size[1]}, and those before it {first[0]} x {first[1]}: give the size that "
                    "all are to have"
                )
        assert first is not None
        return 1 if is_grey else 3, first[1], first[0]

    def _pixels(self, path: Path) -> Any:
        channels, height, width = self.shape
        with self._opened(path) as image:
            try:
                image = image.convert("L" if channels == 1 else "RGB")
            except (OSError, ValueError, SyntaxError) as exc:
                raise ConfigurationError(f"{path} is damaged: {exc}") from exc
            if image.size != (width, height):
                image = image.resize((width, height))
            pixels = np.asarray(image, np.uint8).reshape(height, width, channels)
        return pixels.transpose(2, 0, 1)

    def _opened(self, path: Path) -> Any:
        errors = (OSError, ValueError, SyntaxError, self._pillow.DecompressionBombError)
        try:
            return self._pillow.open(path)
        except errors as exc:
            raise ConfigurationError(f"{path} is no image that can be read: {exc}") from exc


def _pillow(folder: Path) -> ModuleType:
    try:
        from PIL import Image
    except ModuleNotFoundError as exc:
        raise ConfigurationError(
            f"{folder}: reading images takes Pillow: pip install pillow"
        ) from exc
    return Image
