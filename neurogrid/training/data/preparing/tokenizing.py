"""Text to token ids: by the tokenizer of a directory, or by one that is trained on the text itself."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.preparing.documents import Piece

__all__ = ["TextTokenizer", "train_tokenizer"]

BOS: Final = "<s>"
EOS: Final = "</s>"
DEFAULT_VOCAB_SIZE: Final = 4096
# The 256 bytes and the two above.
MIN_VOCAB_SIZE: Final = 258
# What a tokenizer is trained on: more changes few of its tokens, and takes minutes.
MAX_TRAINING_CHARS: Final = 32 * 1024 * 1024
# Text that is tokenized in one call.
_BATCH_CHARS: Final = 1024 * 1024
_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


class TextTokenizer:
    """A tokenizer in a directory.

    Attributes:
        name: "sha256:" and the hash of its tokenizer.json.
        vocab_size: every id is below it.

    Raises:
        ConfigurationError: the directory has no tokenizer.json, or it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = directory / "tokenizer.json"
        try:
            data = path.read_bytes()
            self._tokenizer = Tokenizer.from_buffer(data)
        except OSError as exc:
            raise ConfigurationError(
                f"{path}: {exc.strerror}; a tokenizer is a directory with this file"
            ) from exc
        except Exception as exc:  # the library raises no other class
            raise ConfigurationError(f"{path} is no tokenizer: {exc}") from exc
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = "sha256:" + hashlib.sha256(data).hexdigest()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._end = self._find_end()

    def tokenize(self, pieces: Iterable[Piece]) -> Iterator[tuple[np.ndarray[Any, Any], bool]]:
        """Ids of pieces, int32, and whether a document ends with them; documents end with the end token, if there is
        one, and those without text are none.
        """
        batch: list[Piece] = []
        num_chars = 0
        for piece in pieces:
            batch.append(piece)
            num_chars += len(piece.text)
            if num_chars >= _BATCH_CHARS:
                yield from self._tokenize(batch)
                batch, num_chars = [], 0
        yield from self._tokenize(batch)

    def copy_to(self, directory: Path) -> None:
        """Copy what transformers needs to open it."""
        directory.mkdir()
        for name in _FILES:
            if (self._directory / name).is_file():
                shutil.copyfile(self._directory / name, directory / name)

    def _tokenize(self, batch: list[Piece]) -> Iterator[tuple[np.ndarray[Any, Any], bool]]:
        encodings = self._tokenizer.encode_batch_fast(
            [piece.text for piece in batch], add_special_tokens=False
        )
        for piece, encoding in zip(batch, encodings, strict=True):
            ids = encoding.ids
            if piece.is_last and self._end is not None:
                ids = [*ids, self._end]
            yield np.array(ids, np.int32), piece.is_last

    def _find_end(self) -> int | None:
        """The id of the token that ends a document, as the configuration beside it names it."""
        path = self._directory / "tokenizer_config.json"
        if not path.is_file():
            return None
        try:
            token = json.loads(path.read_bytes()).get("eos_token")
        except (OSError, ValueError, AttributeError) as exc:
            raise ConfigurationError(f"{path} cannot be read: {exc}") from exc
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            return None
        found = self._tokenizer.token_to_id(str(token))
        if found is None:
            raise ConfigurationError(f"{path}: eos_token {str(token)[:40]!r} is no token of it")
        return int(found)


def train_tokenizer(pieces: Iterable[Piece], vocab_size: int, directory: Path) -> TextTokenizer:
    """Train a byte-level BPE: no text is unknown to it. It is written to a directory, which is made.

    Args:
        vocab_size: at most; a short text has fewer tokens.

    Raises:
        ConfigurationError: `vocab_size` is too small.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigurationError(
            f"a vocabulary has at least {MIN_VOCAB_SIZE} tokens, for the 256 bytes and two more, not {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginning(pieces), trainer)
    directory.mkdir()
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "pad_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return TextTokenizer(directory)


def _beginning(pieces: Iterable[Piece]) -> Iterator[str]:
    num_chars = 0
    for piece in pieces:
        yield piece.text
        num_chars += len(piece.text)
        if num_chars >= MAX_TRAINING_CHARS:
            return
