"""A checkpoint's chat template: rendered in child processes with limits, a few of which are kept.

Jinja's sandbox keeps a template from code and files, and not from memory and time: a line of it may ask for 4 GB, and
clients choose the messages that it loops over. The rendering itself is transformers', so a conversation becomes the
text that `apply_chat_template` gives.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from neurogrid.errors import ConfigurationError
from neurogrid.model.confined import ConfinedProcess, ConfinementError, Limits

__all__ = ["RENDER_SECONDS", "TemplateBusyError", "TemplateRenderer"]

# The longest known template renders the longest conversation in some 10 ms. Seconds.
RENDER_SECONDS = 5.0
# Conversations that are rendered at once; each has a process, once there are so many.
MAX_PROCESSES = 4

_LIMITS = Limits(memory_bytes=512 * 1024**2, cpu_seconds=int(RENDER_SECONDS))


class TemplateBusyError(ConfigurationError):
    """Other conversations hold the template, all of them for long; try again."""


class TemplateRenderer:
    """Renders conversations, from any thread."""

    def __init__(self) -> None:
        # The one that was used last is the first to be used again: it has the template compiled.
        self._idle: queue.LifoQueue[ConfinedProcess] = queue.LifoQueue()
        for _ in range(MAX_PROCESSES):
            self._idle.put(ConfinedProcess(_render_in_child, _LIMITS))

    def render(
        self,
        template: str | Mapping[str, str],
        special_tokens: Mapping[str, object],
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, object],
    ) -> str:
        """The text of a conversation. Blocks: for a few milliseconds, and at worst twice RENDER_SECONDS.

        Args:
            template: Jinja, or several by name, as a tokenizer has it.
            special_tokens: what it may refer to, as `bos_token`.
            messages: each with `role` and `content`.
            arguments: of transformers' `apply_chat_template`, and variables of the template's own; what JSON has.

        Raises:
            ConfigurationError: the template refuses the messages, in its own words; or it takes more time or memory
                than it may have.
            TemplateBusyError: no process was free within RENDER_SECONDS.
        """
        try:
            process = self._idle.get(timeout=RENDER_SECONDS)
        except queue.Empty:
            raise TemplateBusyError(
                f"{MAX_PROCESSES} other conversations have held the model's chat template for {RENDER_SECONDS:g} s; "
                "try again"
            ) from None
        try:
            text = process.call(
                {
                    "template": template,
                    "special_tokens": dict(special_tokens),
                    "messages": [dict(message) for message in messages],
                    "arguments": dict(arguments),
                },
                seconds=RENDER_SECONDS,
            )
        except ConfinementError as exc:
            raise ConfigurationError(
                f"the model's chat template is given up on these messages: {exc}"
            ) from exc
        finally:
            self._idle.put(process)
        return str(text)


class _Templated:
    """The part of a tokenizer that transformers needs to apply a chat template."""

    get_chat_template = PreTrainedTokenizerBase.get_chat_template
    apply_chat_template = PreTrainedTokenizerBase.apply_chat_template

    def __init__(self, template: object, special_tokens: Mapping[str, object]) -> None:
        self.chat_template = template
        self.special_tokens_map = special_tokens


def _render_in_child(argument: Mapping[str, Any]) -> str:
    templated: Any = _Templated(argument["template"], argument["special_tokens"])
    try:
        text = templated.apply_chat_template(
            argument["messages"],
            tokenize=False,
            **argument["arguments"],
        )
    except MemoryError:
        raise
    except Exception as exc:
        # A template may fail in any way that an expression can, `raise_exception` among them.
        reason = " ".join(str(exc).split())[:300] or type(exc).__name__
        raise ConfigurationError(
            f"the model's chat template refuses these messages: {reason}"
        ) from exc
    return str(text)
