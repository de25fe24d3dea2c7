"""Models: configs, checkpoints, stages, tokenizers. Knows torch and transformers, no network.

The hub is switched off before any module here imports transformers, which reads the variable when
it is imported: a config that a peer sent must not make this machine fetch what it names. That is
the one thing that an import here does. `neurogrid.hub` fetches what somebody named, in a process of
its own.
"""

import os
from typing import Final

HUB_OFFLINE_BEFORE: Final = os.environ.get("HF_HUB_OFFLINE")
"""The variable as this process got it."""

os.environ["HF_HUB_OFFLINE"] = "1"
