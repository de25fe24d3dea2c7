"""Extras of the distribution, by the modules that each brings.

    neurogrid              the transport library
    neurogrid[inference]   and the commands, the model, the server
    neurogrid[training]    and what training makes adapters, reads and reports with, beside inference
    neurogrid[otel]        and what sends traces to a collector

What installs one is a file of packaging/requirements, since pip by itself would compile (docs/installing.md).
Nothing is imported here, and a test compares the table with pyproject.toml.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

__all__ = ["EXTRAS", "missing_extra", "missing_of"]

# Modules that each extra brings, by the names that they are imported by.
EXTRAS: Final[dict[str, frozenset[str]]] = {
    "inference": frozenset(
        {
            "torch",
            "numpy",
            "safetensors",
            "transformers",
            "tokenizers",
            "huggingface_hub",
            "httpx2",
            "rich",
            "jinja2",
            "llguidance",
            "starlette",
            "hypercorn",
            "h11",
            "prometheus_client",
            "shtab",
            "PIL",
        }
    ),
    "training": frozenset({"accelerate", "peft", "pyarrow"}),
    "otel": frozenset({"opentelemetry.sdk", "opentelemetry.exporter"}),
}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Say what to install, in a sentence; None where no extra of ours would bring the module."""
    module = error.name or ""
    for extra, modules in EXTRAS.items():
        if any(module == name or module.startswith(f"{name}.") for name in modules):
            return f"{module} is not installed: pip install -r packaging/requirements/{extra}.txt (in the source)"
    return None


def missing_of(extra: str) -> str | None:
    """The same of the first module of an extra that is not installed; None where it is whole."""
    for module in sorted(EXTRAS[extra], key=str.lower):
        if find_spec(module) is None:
            return missing_extra(ModuleNotFoundError(name=module))
    return None
