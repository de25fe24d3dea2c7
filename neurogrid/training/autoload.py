"""The entry point `torch.backends`, called at the end of torch's import: the backend `neurogrid` is known then.

Imports nothing but what says its name; `TORCH_DEVICE_BACKEND_AUTOLOAD=0` keeps torch from calling it.
"""

from __future__ import annotations

import sys

__all__ = ["register"]


def register() -> None:
    """Tell torch of the backend, unless its module is what imports torch just now, and does it then."""
    name = "neurogrid.training.distributed"
    if name not in sys.modules:
        __import__(name)
