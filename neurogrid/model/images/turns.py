"""Images that take turns: of several, one at a time is decoded and made ready for the tower.

Most processors of images look at each by itself. Whether one does is tried: two small images, together and in turn,
have to give the same. What is joined then is what it would have made of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch

from neurogrid.errors import ConfigurationError
from neurogrid.model.files.model_code import quiet_transformers

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImagesInTurn", "TooManyTokensError"]

# Of the two that are tried: of other sizes, so that a processor which brings all to one size shows it.
_TRIED_SIZES: Final = ((96, 64), (56, 112))


class TooManyTokensError(ConfigurationError):
    """Images that have more tokens than a session may have."""


class ImagesInTurn:
    """A processor of images in the place of another: the same, but where images take turns (`of`).

    Args:
        images: the other one, of transformers.

    Attributes:
        is_over: all images had their turn in the block of `of`.
        was_asked_otherwise: it was called there for something else than all of them at once.
    """

    def __init__(self, images: Any) -> None:
        self._images = images
        self._decode: Sequence[Callable[[], Image]] = ()
        self._max_tokens: int | None = None
        self.is_over = self.was_asked_otherwise = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_images":  # as where it is copied, and has nothing yet
            raise AttributeError(name)
        return getattr(self._images, name)

    def __call__(self, images: Any, *args: Any, **kwargs: Any) -> Any:
        """Process these images with the other one; where some take turns, those in their place, one at a time."""
        if not self._decode:
            return self._images(images, *args, **kwargs)
        self.was_asked_otherwise |= self.is_over or _count(images) != len(self._decode)
        if self.was_asked_otherwise:
            raise ValueError("it looks at images otherwise than all at once")
        made: list[Any] = []
        num_tokens = 0
        for number, decode in enumerate(self._decode, 1):
            made.append(self._images([decode()], *args, **kwargs))
            num_tokens += self._num_tokens(made[-1])
            if self._max_tokens is not None and num_tokens > self._max_tokens:
                raise TooManyTokensError(
                    f"the first {number} of {len(self._decode)} images have {num_tokens} tokens, and sessions have at "
                    f"most {self._max_tokens}: send fewer, or smaller ones"
                )
        try:
            joined = _joined(made)
        except ValueError:
            self.was_asked_otherwise = True
            raise
        self.is_over = True
        return type(made[0])(joined)

    @contextmanager
    def of(
        self, decode: Sequence[Callable[[], Image]], max_tokens: int | None
    ) -> Iterator[ImagesInTurn]:
        """Have images take turns in the block, whatever it is called with there.

        Args:
            decode: gives each of them.
            max_tokens: of all of them; None for any number.
        """
        self._decode, self._max_tokens = tuple(decode), max_tokens
        self.is_over = self.was_asked_otherwise = False
        try:
            yield self
        finally:
            self._decode = ()

    @cached_property
    def is_possible(self) -> bool:
        """Whether images in turn give what they give together."""
        from PIL import Image

        two = [Image.linear_gradient("L").resize(size).convert("RGB") for size in _TRIED_SIZES]
        try:
            with quiet_transformers():
                together = self._images(two, return_tensors="pt")
                joined = _joined([self._images([each], return_tensors="pt") for each in two])
        except Exception:  # noqa: BLE001 - of any kind: it is another's, and they are not what it is for
            return False
        return together.keys() == joined.keys() and all(
            _are_equal(joined[name], together[name]) for name in joined
        )

    def _num_tokens(self, made: Mapping[str, Any]) -> int:
        """Tokens of an image that has as many as it is large; 0 where all have the same number."""
        if (grid_13 := made.get("image_grid_thw")) is None:
            return 0
        merge = getattr(self._images, "merge_size", 1)
        return sum(
            rows * columns // merge**2 for _, rows, columns in torch.as_tensor(grid_13).tolist()
        )


def _count(images: Any) -> int:
    """Count the images in lists of them, nested or not."""
    return sum(map(_count, images)) if isinstance(images, list | tuple) else 1


def _joined(made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join what was made of each image, one behind the other, by name.

    Raises:
        ValueError: it has other names or shapes for some of them, or is nothing that can be joined.
    """
    if any(each.keys() != made[0].keys() for each in made):
        raise ValueError("it has other names for some images")
    joined: dict[str, Any] = {}
    for name in made[0]:
        values = [each[name] for each in made]
        if all(isinstance(value, torch.Tensor) for value in values):
            if len({value.shape[1:] for value in values}) > 1 or not values[0].dim():
                raise ValueError(f"{name} has other shapes for some images")
            joined[name] = torch.cat(values)
        elif all(isinstance(value, list) for value in values):
            joined[name] = [item for value in values for item in value]
        else:
            raise ValueError(f"{name} is neither a tensor nor a list")
    return joined


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return type(one) is type(other) and one == other
