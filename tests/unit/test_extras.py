"""What an extra brings, and what is said when it is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from neurogrid.extras import EXTRAS, missing_extra

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(extra: str) -> set[str]:
    lines = PYPROJECT["optional-dependencies"][extra]
    return {normal(re.split(r"[<>=!\[; ]", line)[0]) for line in lines}


def test_the_table_is_that_of_the_project() -> None:
    brought = packages_distributions()
    for extra in ("inference", "training"):
        assert {normal(name) for top in EXTRAS[extra] for name in brought[top]} == declared(extra)
    assert declared("otel") == {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"}


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("torch", "inference"),
        ("transformers.models", "inference"),
        ("pyarrow.parquet", "training"),
        ("PIL.Image", "inference"),
        ("opentelemetry.sdk.trace", "otel"),
        ("opentelemetry", None),
        ("torchvision", None),
        ("trio", None),
    ],
)
def test_the_extra_is_named(module: str, extra: str | None) -> None:
    said = missing_extra(ModuleNotFoundError(f"No module named {module!r}", name=module))
    if extra is None:
        assert said is None
    else:
        assert said == (
            f"{module} is not installed: pip install -r packaging/requirements/{extra}.txt (in the source)"
        )


def test_a_name_that_needs_the_extra_says_so() -> None:
    # None in this table is Python's own way to say that a module cannot be imported. In a process of its own: what
    # is taken out of the table here would be imported a second time elsewhere.
    program = "import sys; sys.modules['torch'] = None; import neurogrid; neurogrid.Worker"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1
    said = ended.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"ImportError: .*Worker: torch is not installed: .*packaging/requirements/inference\.txt.*",
        said,
    )
