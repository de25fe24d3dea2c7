"""The files of `protocol_spec/vectors/`, and tests that try all cases of a file in turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

__all__ = ["SPECIFICATION", "VECTORS", "in_turn", "names", "subject"]

SPECIFICATION = Path(__file__).parents[2] / "protocol_spec"
VECTORS = SPECIFICATION / "vectors"


def names(pattern: str = "**/*") -> list[str]:
    """Those of the files that fit, such as `trust/ticket`."""
    found = sorted(VECTORS.glob(f"{pattern}.json"))
    return [path.relative_to(VECTORS).with_suffix("").as_posix() for path in found]


@cache
def subject(name: str) -> Any:
    """The content of a file."""
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


def in_turn(
    *files: str, where: Callable[[Any], bool] = lambda case: True
) -> Callable[[Callable[[str, Any], None]], Callable[[str], None]]:
    """Make of a check of one case, given its file's name, a test for each file; what fails names its case.

    Args:
        where: tells which cases are tried; a file without any has no test.
    """
    wanted = {name: [case for case in subject(name)["cases"] if where(case)] for name in files}

    def test_of(check: Callable[[str, Any], None]) -> Callable[[str], None]:
        def test(name: str) -> None:
            for case in wanted[name]:
                try:
                    check(name, case)
                except BaseException as exc:
                    exc.add_note(f"in case {case['id']}")
                    raise

        test.__name__, test.__doc__, test.__module__ = (
            check.__name__,
            check.__doc__,
            check.__module__,
        )
        return pytest.mark.parametrize("name", [name for name in files if wanted[name]])(test)

    return test_of
