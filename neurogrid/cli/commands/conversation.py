"""A conversation as the token sequence that each turn extends.

What the model was given and what it wrote stays as it was, token for token, wherever its template allows that: so what
has been computed of it can be used again. Templates that write earlier turns differently (without what a model thought,
say) begin anew by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neurogrid.model.files.tokenizer import Tokenizer

__all__ = ["Conversation", "Turn"]


@dataclass(frozen=True)
class Turn:
    """The model's input for one turn. Made by `Conversation.ask`.

    Attributes:
        said: by the user.
        text: of the whole conversation up to where the answer begins.
        token_ids: of that.
    """

    said: str
    text: str
    token_ids: list[int]


class Conversation:
    """The turns so far.

    Args:
        tokenizer: with a chat template; without one, what is said is continued as plain text.
        system: what the model is told first; empty for nothing.

    Attributes:
        num_turns: that were answered.
    """

    def __init__(self, tokenizer: Tokenizer, *, system: str = "") -> None:
        self._tokenizer = tokenizer
        self._system = system
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._messages: list[dict[str, str]] = []
        if self._system:
            self._messages.append({"role": "system", "content": self._system})
        self._text = ""
        self._token_ids: list[int] = []
        self.num_turns = 0

    @property
    def is_plain(self) -> bool:
        """Whether text is continued, since the model was not trained to answer."""
        return not self._tokenizer.has_chat_template

    @property
    def num_tokens(self) -> int:
        """Tokens so far, answers included."""
        return len(self._token_ids)

    def ask(self, said: str) -> Turn:
        """Return the model's input for this; nothing changes before it was `answered`.

        Raises:
            ConfigurationError: the model's template refuses it.
        """
        tokenizer = self._tokenizer
        if self.is_plain:
            text = f"{self._text}\n{said}" if self._text else said
        else:
            text = tokenizer.chat_text([*self._messages, {"role": "user", "content": said}])
        # The template has the special tokens in it.
        whole = tokenizer.encode(text, add_special_tokens=self.is_plain)
        if self._text and text.startswith(self._text):
            more = tokenizer.encode(text[len(self._text) :], add_special_tokens=False)
            longer = [*self._token_ids, *more]
            # Some tokenizers put a space before whatever they are given.
            if tokenizer.decode(longer) == tokenizer.decode(whole):
                return Turn(said, text, longer)
        return Turn(said, text, whole)

    def answered(self, turn: Turn, token_ids: Sequence[int], text: str) -> None:
        """The model wrote this, perhaps not to its end."""
        self._messages += [
            {"role": "user", "content": turn.said},
            {"role": "assistant", "content": text},
        ]
        self._text = turn.text + text
        self._token_ids = [*turn.token_ids, *token_ids]
        self.num_turns += 1
