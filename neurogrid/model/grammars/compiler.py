"""Compiling grammars for a model's tokenizer: bounded in time and memory, and kept for the next request.

What a schema costs is known when it has been tried, and a library cannot be interrupted: an `allOf` of thirty patterns
takes longer than anybody waits. So it is tried in a child process with limits, which needs no tokenizer for that, and
compiled here when that went well. What it costs afterwards, token by token, has bounds of the library.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from neurogrid.errors import ConfigurationError
from neurogrid.model.confined import ConfinedProcess, ConfinementError, Limits
from neurogrid.model.files.tokenizer import Tokenizer
from neurogrid.model.grammars.grammar_state import Grammar, told_error

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["COMPILE_SECONDS", "GrammarBusyError", "GrammarCompiler"]

# Schemas of public collections take some milliseconds. Seconds.
COMPILE_SECONDS: Final = 2.0
_LIMITS = Limits(memory_bytes=256 * 1024**2, cpu_seconds=int(COMPILE_SECONDS))
# Grammars that are kept: clients send the same one again and again.
MAX_KEPT = 64
# States of a lexer, some 2 kB each, of one grammar.
MAX_LEXER_STATES = 50_000


class GrammarBusyError(ConfigurationError):
    """Another grammar is being compiled, and takes long; try again."""


class GrammarCompiler:
    """Compiles grammars, from any thread.

    Args:
        tokenizer: the model's.
        vocab_size: the model's logits.
        end_token_ids: tokens that end a sequence: allowed where a grammar is complete.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, end_token_ids: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(token for token in end_token_ids if token < vocab_size)
        self._child = ConfinedProcess(_check_in_child, _LIMITS)
        self._child_lock = threading.Lock()
        self._lock = threading.Lock()
        self._own: LLTokenizer | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    def compile(self, text: str) -> Grammar:
        """The grammar of `text`, as `GrammarText` has it. Blocks: milliseconds, and at worst twice COMPILE_SECONDS.

        The first one for a tokenizer takes up to some seconds more.

        Raises:
            ConfigurationError: it is none, or one that cannot be enforced; or takes more time or memory than it may
                have; or llguidance is not installed, or cannot read this tokenizer.
            GrammarBusyError: another one is under way, for long.
        """
        with self._lock:
            if (kept := self._kept.get(text)) is not None:
                self._kept.move_to_end(text)
                return kept
        if not self._end_token_ids:
            raise ConfigurationError(
                "this model has no token that ends a text, so that no answer of it can be complete"
            )
        _library()
        self._try(text)
        with self._lock:
            grammar = self._compiled(text)
            self._kept[text] = grammar
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _try(self, text: str) -> None:
        if not self._child_lock.acquire(timeout=COMPILE_SECONDS):
            raise GrammarBusyError("another schema is being compiled, and takes long: try again")
        try:
            wrong = self._child.call({"text": text}, seconds=COMPILE_SECONDS)
        except ConfinementError as exc:
            raise ConfigurationError(f"the schema is given up: {exc}") from exc
        finally:
            self._child_lock.release()
        if wrong:
            raise ConfigurationError(str(wrong))

    def _compiled(self, text: str) -> Grammar:
        library = _library()
        matcher = library.LLMatcher(self._own_tokenizer(), text, log_level=0, limits=_limits())
        grammar = Grammar(matcher)
        if matcher.is_error():
            raise ConfigurationError(told_error(matcher.get_error()))
        grammar.begin().allowed()  # what cannot even begin is told before anybody waits for a worker
        return grammar

    def _own_tokenizer(self) -> LLTokenizer:
        if self._own is None:
            as_json = self._tokenizer.as_json()
            if as_json is None:
                raise ConfigurationError(
                    "answers of this model cannot be held to a grammar: its tokenizer is not in tokenizer.json"
                )
            size = max(self._vocab_size, self._tokenizer.vocab_size)
            try:
                self._own = _library().LLTokenizer(
                    as_json, n_vocab=size, eos_token=self._end_token_ids
                )
            except Exception as exc:
                # As broad as this because the library raises bare exceptions for what it does not know.
                reason = " ".join(str(exc).split())[:300]
                raise ConfigurationError(
                    f"answers of this model cannot be held to a grammar: its tokenizer is of a kind that is not known "
                    f"({reason})"
                ) from exc
        return self._own


def _library() -> Any:  # a module
    try:
        import llguidance
    except ModuleNotFoundError as exc:
        raise ConfigurationError(
            "answers by a schema and calls of tools need llguidance, which is not installed here: "
            "pip install -r packaging/requirements/inference.txt (in the source)"
        ) from exc
    return llguidance


def _limits() -> Any:
    return _library().LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def _check_in_child(argument: Mapping[str, str]) -> str:
    """Fault of a grammar; empty if there is none."""
    matcher = _library().LLMatcher
    is_wrong, told = matcher.validate_grammar_with_warnings(argument["text"], limits=_limits())
    return told_error(told[0]) if is_wrong else ""
