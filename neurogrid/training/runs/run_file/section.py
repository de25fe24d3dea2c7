"""The base of all sections of a run file: keys of which each has a kind, checked where a section is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.run_file.values import Kind, NotAllowed, shown

__all__ = ["Path", "Section", "WrongValueError"]

Path = tuple[str, ...]
"""A key of a run file, below its section; a section alone; nothing for the file."""


class WrongValueError(ConfigurationError):
    """A value is not what it may be, or does not fit to another one.

    Attributes:
        paths: the keys that it is about, the first of them first.
    """

    def __init__(self, message: str, *paths: Path) -> None:
        super().__init__(message)
        self.paths = paths


class Section:
    """The base of all sections.

    Attributes:
        title: as it stands in brackets; empty for what stands above the first section.
        keys: what each value may be, in the order in which they are written.
    """

    __slots__ = ()

    title: ClassVar[str]
    keys: ClassVar[Mapping[str, Kind]]

    def __post_init__(self) -> None:
        for key, kind in self.keys.items():
            value = getattr(self, key)
            try:
                taken = kind.read(value)
            except NotAllowed as exc:
                raise self.fault(key, str(exc) or f"is {kind.says}, not {shown(value)}") from None
            object.__setattr__(self, key, taken)
        self._check()

    def _check(self) -> None:
        """Refuse values that do not fit together. Raises: WrongValueError."""

    @classmethod
    def called(cls, key: str) -> str:
        """A key with its section, as errors name it."""
        return f"[{cls.title}] {key}" if cls.title else key

    @classmethod
    def place_of(cls, key: str = "") -> Path:
        """The path of a key in the file: its section, then the key."""
        return tuple(filter(None, (cls.title, key)))

    @classmethod
    def fault(cls, key: str, what: str, *others: Path) -> WrongValueError:
        """The error of one key; `others` are keys that it does not fit to."""
        return WrongValueError(f"{cls.called(key)} {what}", cls.place_of(key), *others)
