"""The model that comes with the package: a small Llama that knows the language reference of Python.

Says where the checkpoint lies, and nothing more: it is read as any other checkpoint is.
TRAINING.md in this folder says what it was trained on, `tools/embedded/train.py` is how.
"""

from pathlib import Path

__all__ = ["embedded_model_path"]


def embedded_model_path() -> Path:
    """The folder with the embedded model's config, weights (safetensors) and tokenizer."""
    return Path(__file__).resolve().parent
