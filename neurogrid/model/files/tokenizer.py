"""Text to token ids and back, and text that grows one token at a time.

The tokenizer is the checkpoint's own, read by transformers from the checkpoint's directory and
nowhere else: no code of its own, no hub, no substitute where it is missing.

`TextStream` gives out text as soon as no later token can change it, so that the pieces together are
exactly the text of all ids at once. It decodes a window of recent tokens, never the whole: the group
of tokens before the new ones stays in the window, because what a token decodes to depends on what is
before it (a leading space, a separator). Two things hold text back: a trailing replacement
character, which may be half of a character, and a run of byte tokens (`<0xE4>`), which is decoded as
one and turns into replacement characters if its last byte does not fit.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from neurogrid.errors import CheckpointError, ConfigurationError
from neurogrid.model.files.chat_template import TemplateBusyError, TemplateRenderer
from neurogrid.model.files.model_code import quiet_transformers

__all__ = ["TEMPLATE_ARGUMENTS", "ChatEnding", "TextStream", "TokenKind", "Tokenizer"]

# One of these must be there; transformers would otherwise make up an empty tokenizer or ask the hub.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)

_TEMPLATE_FILE = "chat_template.json"
_VERBATIM = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
_PROBE = "neurogrid looks for this"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SPACE = "▁"  # of SentencePiece
_ALONE = "☺"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

# Tokens in a window that ends in a replacement character before its start is cut off, and those
# kept on either side of the cut: an unfinished character has at most 3 bytes, so at most 3 tokens.
_MAX_WINDOW = 32
_KEPT = 8


# What templates are rendered with besides variables of their own: no variable can have one of these names.
TEMPLATE_ARGUMENTS = frozenset(
    {
        "messages",
        *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
        *inspect.signature(render_jinja_template).parameters,
    }
)


class ChatEnding(enum.Enum):
    """Place at which the text of a conversation ends."""

    ANSWER = enum.auto()
    """Beginning of the assistant's next message."""
    CONTINUED = enum.auto()
    """Middle of the last message, so that it goes on."""
    OPEN = enum.auto()
    """End of the last message; who speaks next is not said."""


class TokenKind(enum.Enum):
    """The kind of a token: what it contributes to a text."""

    TEXT = enum.auto()
    BYTE = enum.auto()
    """One byte, which makes characters together with the byte tokens next to it."""
    NOTHING = enum.auto()
    """A special token, or an id that is nobody's: `decode` leaves both out."""


class Tokenizer:
    """The tokenizer of a checkpoint. Made by `open`.

    Attributes:
        vocab_size: how many tokens there are, added ones included.
    """

    def __init__(self, backend: PreTrainedTokenizerBase) -> None:
        self._backend = backend
        self.vocab_size = len(backend)
        self._renderer = TemplateRenderer()
        self._wants_parts: bool | None = None  # nobody has looked yet
        # The ids that `decode` leaves out: tokenizers looks at a flag, transformers at its own list.
        added = backend.added_tokens_decoder.items()
        self._special_ids = frozenset(
            (token_id for token_id, token in added if token.special)
            if backend.is_fast
            else backend.all_special_ids
        )

    def has_tokens_of(self, other: Tokenizer) -> bool:
        """Whether both have the same tokens under the same ids."""
        mine: dict[str, int] = self._backend.get_vocab()
        return mine == other._backend.get_vocab()

    @classmethod
    def open(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer in the checkpoint directory `path`.

        Raises CheckpointError: its files are missing, damaged, or need code or a package that is
        not here; the text says which.
        """
        folder = Path(path)
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise CheckpointError(
                f"{folder}: no tokenizer; copy tokenizer.json and tokenizer_config.json there from "
                "where the model came from"
            )
        backend = _load(folder)
        if not len(backend):
            raise CheckpointError(f"{folder}: the tokenizer has no tokens; fetch its files again")
        return cls(backend)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with the special tokens that the tokenizer adds, unless it has them already."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def encode_within(self, text: str) -> list[int]:
        """The ids of `text` behind other text, without the space that some tokenizers put before a text."""
        first = self.encode("a", add_special_tokens=False)[:1]
        if not self.names(first)[0].startswith(_SPACE):
            return self.encode(text, add_special_tokens=False)
        # As mistral-common and Code Llama do it: no token goes over from this character to another.
        before = self.encode(_ALONE, add_special_tokens=False)
        return self.encode(_ALONE + text, add_special_tokens=False)[len(before) :]

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a conversation becomes a text."""
        return bool(self._backend.chat_template)

    def chat_template_text(self, *, tools: bool = False) -> str:
        """The text of the chat template; empty where there is none.

        Args:
            tools: of the one for conversations with tools, where a checkpoint has one of its own for them.
        """
        told = self._backend.chat_template
        if isinstance(told, dict):  # which transformers refuses where none of these is there
            told = told.get("tool_use" if tools and "tool_use" in told else "default")
        return str(told or "")

    def template_names(self, name: str, *, tools: bool = False) -> bool:
        """Whether the text of the chat template has `name` in it: a variable that it does not name changes nothing."""
        text = self.chat_template_text(tools=tools)
        return re.search(rf"\b{re.escape(name)}\b", text) is not None

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        ending: ChatEnding = ChatEnding.ANSWER,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, up to where `ending` says; special tokens are in it.

        The checkpoint's own template makes it, in Jinja's sandbox and in a child process with limits. Blocks, at worst
        for twice `RENDER_SECONDS`: run it in a thread.

        Args:
            messages: each with `role` and `content`, perhaps `name`.
            variables: what the template is told besides, as JSON has it; none of `TEMPLATE_ARGUMENTS`.

        Raises:
            ConfigurationError: there is no template, or it refuses these messages, in its own words; or it takes more
                time or memory than it may have.
            TemplateBusyError: other conversations hold it.
        """
        if not self.has_chat_template:
            raise ConfigurationError(
                "this model has no chat template: let it continue a text, or put chat_template.jinja "
                "beside its tokenizer.json"
            )
        if not self.chat_template_text(tools=bool(variables and "tools" in variables)):
            names = ", ".join(sorted(self._backend.chat_template))
            raise ConfigurationError(
                f"this model has several chat templates ({names}), and none called default, which is the one for "
                "these messages: call one of them so where its tokenizer has them"
            )
        if self._takes_parts():
            messages = [_in_parts(message) for message in messages]
        return self._render(
            messages,
            {
                "add_generation_prompt": ending is ChatEnding.ANSWER,
                "continue_final_message": ending is ChatEnding.CONTINUED,
                **(variables or {}),
            },
        )

    def _render(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, object]
    ) -> str:
        return self._renderer.render(
            self._backend.chat_template, self._backend.special_tokens_map, messages, arguments
        )

    def _takes_parts(self) -> bool:
        """Whether the template writes the text of messages only where it stands in parts, as of some that see images.

        They leave out the text of others in silence. So it is tried, where the template looks at types of parts.
        """
        if self._wants_parts is None:
            wants = False
            if re.search(r"""['"]type['"]|\.type\b""", self.chat_template_text()):
                probe = {"role": "user", "content": _PROBE}
                wants = not self._writes(probe) and self._writes(_in_parts(probe))
            self._wants_parts = wants
        return self._wants_parts

    def _writes(self, message: Mapping[str, Any]) -> bool:
        try:
            return _PROBE in self._render([message], {"add_generation_prompt": True})
        except TemplateBusyError:
            raise
        except ConfigurationError:
            return False

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        ending: ChatEnding = ChatEnding.ANSWER,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of `chat_text`."""
        text = self.chat_text(messages, ending=ending, variables=variables)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens, nothing tidied up."""
        return str(
            self._backend.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def decode_verbatim(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens written out."""
        return str(self._backend.decode(list(ids), **_VERBATIM))

    def names(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary has it, which is not always its text; empty for an id that is nobody's."""
        names: Any = self._backend.convert_ids_to_tokens(list(ids))
        return [name or "" for name in names]

    def token_text(self, token_id: int, *, after: Sequence[int] = ()) -> str:
        """Return what a token adds to the text of those before it, special tokens written out.

        Args:
            after: the tokens before it; a few are enough.
        """
        before = str(self._backend.decode(list(after), **_VERBATIM))
        text = str(self._backend.decode([*after, token_id], **_VERBATIM))
        if text.startswith(before):
            return text[len(before) :]
        return text[len(before.rstrip(_REPLACEMENT)) :]  # it completes a character

    def as_json(self) -> str | None:
        """The tokenizer as tokenizers writes it; None where it is not one of that library."""
        if not self._backend.is_fast:
            return None
        backend = copy(self._backend.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return str(backend.to_str())

    def token_id(self, name: str) -> int | None:
        """The id of the token that the vocabulary has under exactly this name; None where it has none."""
        token_id: Any = self._backend.convert_tokens_to_ids(name)
        # Where it has none, there may be one for all that is unknown.
        return token_id if token_id is not None and self.names([token_id]) == [name] else None

    def special_id(self, text: str) -> int | None:
        """The id of a special token, which `decode` leaves out; None where `text` is no such token."""
        token_id: Any = self._backend.convert_tokens_to_ids(text)
        return token_id if token_id in self._special_ids else None

    def stream(self, kept: Mapping[int, str] | None = None) -> TextStream:
        """A new stream of text, for the tokens of one completion.

        Args:
            kept: special tokens that are to stand in the text all the same, and as what.
        """
        return TextStream(self, kept)

    def kind(self, token_id: int) -> TokenKind:
        """Return what the id contributes to a text."""
        if token_id in self._special_ids:
            return TokenKind.NOTHING
        token: Any = self._backend.convert_ids_to_tokens(token_id)
        if token is None:
            return TokenKind.NOTHING
        return TokenKind.BYTE if _BYTE_TOKEN.fullmatch(token) else TokenKind.TEXT


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose text stands in a part."""
    if not isinstance(message.get("content"), str) or message.get("role") == "tool":
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


class TextStream:
    """The text of one completion, token by token.

    All that `push` returned and what `finish` returns, joined, is `decode` of all ids pushed. The
    time for n tokens grows with n, not with its square.

    Args:
        kept: special tokens that are text here, by what they are to be; what follows one is decoded by itself.
    """

    def __init__(self, tokenizer: Tokenizer, kept: Mapping[int, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._kept = kept or {}
        self._window: list[int] = []
        self._num_context = 0  # tokens at the start of the window whose text was given out
        self._num_given = 0  # characters of the window's text that were given out

    def push(self, token_id: int) -> str:
        """Take the next token; the text that is certain now, often empty."""
        if (marker := self._kept.get(token_id)) is not None:
            text = self.finish() + marker
            self._window, self._num_context, self._num_given = [], 0, 0
            return text
        kind = self._tokenizer.kind(token_id)
        if kind is TokenKind.NOTHING:
            return ""
        self._window.append(token_id)
        if kind is TokenKind.BYTE:
            return ""
        text = self._tokenizer.decode(self._window)
        if not text.endswith(_REPLACEMENT):
            piece = text[self._num_given :]
            self._move_on(text)
            return piece
        piece = text[self._num_given : -1]
        self._num_given += len(piece)
        if len(self._window) % _MAX_WINDOW == 0:
            self._cut(text)
        return piece

    def finish(self) -> str:
        """The rest of the text, what can no longer be completed included. No push after it."""
        return self._tokenizer.decode(self._window)[self._num_given :]

    def _move_on(self, text: str) -> None:
        """Make the newest group the context of the next, unless it decodes to nothing by itself:
        a lone space at the start of a text does, and in the middle it does not.
        """
        group = self._window[self._num_context :]
        group_text = self._tokenizer.decode(group)
        if group_text:
            self._window, self._num_context = group, len(group)
            self._num_given = len(group_text)
        else:
            self._num_given = len(text)

    def _cut(self, text: str) -> None:
        """Drop the start of a window that keeps ending in a replacement character, if what follows
        decodes the same without it; noise would be decoded anew with every token otherwise.
        """
        middle = len(self._window) - _KEPT
        before = self._tokenizer.decode(self._window[:middle])
        shorter = self._window[middle - _KEPT :]
        context = self._tokenizer.decode(shorter[:_KEPT])
        same = self._tokenizer.decode(shorter) == context + text[len(before) :]
        if context and same and text.startswith(before):
            self._window, self._num_context = shorter, _KEPT
            self._num_given += len(context) - len(before)


def _templates(told: Any) -> str | dict[str, str]:
    """A chat template, or several by name, as the older files have them: by name, or in a list."""
    if isinstance(told, list):
        told = {each["name"]: each["template"] for each in told}
    texts = told.values() if isinstance(told, dict) else (told,)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"what {_TEMPLATE_FILE} has is no chat template")
    found: str | dict[str, str] = told
    return found


def _load(folder: Path) -> PreTrainedTokenizerBase:
    try:
        with quiet_transformers():
            backend = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            # Where processors of images had theirs before they wrote chat_template.jinja.
            if backend.chat_template is None and (folder / _TEMPLATE_FILE).is_file():
                told = json.loads((folder / _TEMPLATE_FILE).read_text(encoding="utf-8"))
                backend.chat_template = _templates(told["chat_template"])
            return backend
    except Exception as exc:
        # As broad as this because tokenizers raises bare Exception for a damaged file.
        reason = " ".join(str(exc).split())[:300] or type(exc).__name__
        if "trust_remote_code" in str(exc):
            reason = "it needs code of its own, which is never run; it must come as tokenizer.json"
        raise CheckpointError(f"{folder}: the tokenizer cannot be read: {reason}") from exc
