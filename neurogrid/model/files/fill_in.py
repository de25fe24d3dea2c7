"""Filling in: how a model is told what stands before and behind the text that it is to write.

Models that were trained for it (FIM, fill in the middle) have tokens of their own that say where the text before
begins, where the text behind, and where it is to write. Which ones a checkpoint has, its tokenizer shows: nothing
else says whether it was trained for it, so that one that merely has the tokens is asked, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from neurogrid.model.files.tokenizer import Tokenizer

__all__ = ["ExtraText", "FillIn", "read_fill_in"]


@dataclass(frozen=True)
class _Form:
    """The tokens of a family, as its vocabulary has them.

    Attributes:
        prefix, suffix: before the text before the gap, and before the text behind it.
        middle: where the model writes; empty where that is behind the text before the gap.
        is_suffix_first: whether the text behind the gap comes first.
    """

    prefix: str
    suffix: str
    middle: str
    is_suffix_first: bool = False


_FORMS: Final = (
    # Qwen2.5-Coder (https://arxiv.org/abs/2409.12186, section 3.2) and Qwen3-Coder, CodeGemma, Granite from 3 on.
    _Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder and StarCoder2 (https://arxiv.org/abs/2305.06161), Granite Code.
    _Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # DeepSeek-Coder: https://github.com/deepseek-ai/DeepSeek-Coder, "Code Insertion". Its bars are wide ones, as there.
    _Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    # Code Llama: https://github.com/meta-llama/codellama, `infilling_prompt_tokens`.
    _Form("▁<PRE>", "▁<SUF>", "▁<MID>"),
    # Codestral: https://github.com/mistralai/mistral-common, `encode_fim`.
    _Form("[PREFIX]", "[SUFFIX]", "", is_suffix_first=True),
)
# Before the name of a file, and before that of a project.
_FILE: Final = ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>")
_PROJECT: Final = ("<|repo_name|>", "<repo_name>", "<reponame>")
# What ends the text that fills the gap, beside those two and what ends any text of the model.
_ENDS: Final = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "▁<EOT>")


@dataclass(frozen=True)
class ExtraText:
    """A text of the same project, told to the model before the one with the gap.

    Attributes:
        name: of the file that it is from.
    """

    name: str
    text: str


@dataclass(frozen=True)
class FillIn:
    """Tokens with which a tokenizer has a model fill in a gap. Made by `read_fill_in`.

    Attributes:
        end_ids: the tokens that end the text in the gap and are no text of it.
    """

    end_ids: tuple[int, ...]
    _tokenizer: Tokenizer
    _form: _Form
    _prefix: int
    _suffix: int
    _middle: int | None
    _file: int | None
    _project: int | None

    def prompt(
        self, prefix: str | Sequence[int], suffix: str, *, extra: Sequence[int] = ()
    ) -> list[int]:
        """The tokens that have the model write between two texts.

        A special token that a text writes out is that token, as in any prompt; those that say where the texts begin are
        text there, so that a file which has them is no other question.

        Args:
            prefix: text, or its tokens.
            extra: tokens between those that begin any text and these, as of `extra`.
        """
        if isinstance(prefix, str):
            prefix = self._encode(prefix)
        before = [self._prefix, *prefix]
        behind = [self._suffix, *self._encode(suffix, is_within=True)]
        both = [*behind, *before] if self._form.is_suffix_first else [*before, *behind]
        middle = [] if self._middle is None else [self._middle]
        return [*self._tokenizer.encode(""), *extra, *both, *middle]

    def extra(self, texts: Iterable[ExtraText], *, max_tokens: int) -> list[int]:
        """The tokens that tell texts of the same project, the last of them nearest to the gap.

        By the tokens for files and projects where the vocabulary has them, as Qwen2.5-Coder's report has it; else the
        texts alone, each on lines of its own.

        Args:
            max_tokens: of all of them; the first texts, whole ones, are left out where they are more.
        """
        texts = list(texts)
        if not texts or max_tokens <= 0:
            return []
        head: list[int] = []
        tail: list[int] = []
        if self._file is not None:
            if self._project is not None:
                head = [self._project, *self._encode("project\n", is_within=True)]
            tail = [self._file, *self._encode("file\n", is_within=True)]
        room = max_tokens - len(head) - len(tail)
        told: list[int] = []
        for each in reversed(texts):
            if self._file is None:
                ids = self._encode(f"{each.text}\n\n", is_within=True)
            else:
                named = f"{each.name}\n{each.text}\n"
                ids = [self._file, *self._encode(named, is_within=True)]
            if (room := room - len(ids)) < 0:
                break
            told = [*ids, *told]
        return [*head, *told, *tail] if told else []

    def _encode(self, text: str, *, is_within: bool = False) -> list[int]:
        """The tokens of a text, the tokens of the form cut in two where it writes them out.

        Args:
            is_within: whether other text stands before it.
        """
        names = filter(None, (self._form.prefix, self._form.suffix, self._form.middle))
        found = re.finditer("|".join(map(re.escape, names)), text)
        cuts = [0, *((match.start() + match.end()) // 2 for match in found), len(text)]
        first, *others = (text[start:stop] for start, stop in pairwise(cuts))
        if is_within:
            ids = self._tokenizer.encode_within(first)
        else:
            ids = self._tokenizer.encode(first, add_special_tokens=False)
        for other in others:
            ids += self._tokenizer.encode_within(other)
        return ids


def read_fill_in(tokenizer: Tokenizer) -> FillIn | None:
    """Find the tokens that `tokenizer` has for filling in; None where it has none."""

    def first(names: Iterable[str]) -> int | None:
        ids = map(tokenizer.token_id, names)
        return next((token_id for token_id in ids if token_id is not None), None)

    for form in _FORMS:
        prefix, suffix = tokenizer.token_id(form.prefix), tokenizer.token_id(form.suffix)
        middle = tokenizer.token_id(form.middle) if form.middle else None
        if prefix is None or suffix is None or (form.middle and middle is None):
            continue
        ends = (form.prefix, form.suffix, form.middle, *_FILE, *_PROJECT, *_ENDS)
        found = (tokenizer.token_id(name) for name in ends if name)
        return FillIn(
            end_ids=tuple(token_id for token_id in found if token_id is not None),
            _tokenizer=tokenizer,
            _form=form,
            _prefix=prefix,
            _suffix=suffix,
            _middle=middle,
            _file=first(_FILE),
            _project=first(_PROJECT),
        )
    return None
