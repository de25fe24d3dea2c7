"""Models: configs, checkpoints, stages, tokenizers. Knows torch and transformers, no network.

The hub is switched off before any module here imports transformers, which reads the variable when
it is imported: a config that a peer sent must not make this machine fetch what it names. That is
the one thing that an import here does.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
