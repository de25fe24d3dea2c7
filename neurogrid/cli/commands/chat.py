"""`--chat`: talk to the model in the terminal, or by a pipe, a line a turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import trio

from neurogrid.cli.commands.conversation import Conversation, Turn
from neurogrid.cli.commands.pace import Pace
from neurogrid.cli.terminal.line_reader import LineReader, in_leavable_thread
from neurogrid.cli.terminal.screen import Screen
from neurogrid.errors import ConfigurationError, NeuroGridError

if TYPE_CHECKING:
    from neurogrid.inference.generation.coordinator import Coordinator
    from neurogrid.inference.generation.sampling import SamplingParams

__all__ = ["Chat"]

HELP: Final = """\
/reset   begin a new conversation
/stats   how long it is, and how fast the last answer came
/quit    end, as Ctrl-D does
Ctrl-C   stops an answer, or empties the line
arrows   bring back earlier lines"""


@dataclass
class _Answer:
    """An answer while it comes."""

    pace: Pace = field(default_factory=Pace)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


class Chat:
    """A conversation with the model of a coordinator.

    Args:
        coordinator: ready.
        system: what the model is told first; empty for nothing.
        max_tokens: of one answer.
        adapter: with which it answers; None for the model alone.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        screen: Screen,
        lines: LineReader,
        *,
        system: str,
        sampling: SamplingParams,
        max_tokens: int,
        adapter: str | None,
    ) -> None:
        self._adapter = adapter
        self._coordinator = coordinator
        self._screen = screen
        self._lines = lines
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._conversation = Conversation(coordinator.model.tokenizer, system=system)
        self._answering: trio.CancelScope | None = None
        self._last: _Answer | None = None
        if system and self._conversation.is_plain:
            raise ConfigurationError(
                "--system needs a model with a chat template, and this one has none"
            )

    def stop(self) -> bool:
        """Stop the answer that is being written; False if none is."""
        if self._answering is None:
            return False
        self._answering.cancel()
        return True

    async def run(self) -> None:
        """Talk until nothing more is said.

        Raises:
            NeuroGridError: an answer failed, and nobody is there to ask again.
        """
        self._greet()
        prompt = "text> " if self._conversation.is_plain else "you> "
        while (line := await self._lines.read(prompt)) is not None:
            said = line.strip()
            if not said:
                continue
            if said == "/quit":
                return
            if command := self._commands.get(said):
                command()
            elif said.startswith("/") and " " not in said and "/" not in said[1:]:
                self._screen.say(f"{said} is no command: /help names them")
            else:
                # A text may begin with spaces.
                await self._turn(line if self._conversation.is_plain else said)

    @property
    def _commands(self) -> dict[str, Callable[[], None]]:
        return {"/help": self._help, "/reset": self._reset, "/stats": self._stats}

    def _greet(self) -> None:
        model = self._coordinator.model
        if self._conversation.is_plain:
            self._screen.say(
                f"{model.name} has no chat template: it was not trained to answer. What you type is continued as "
                "plain text, after all that stands there already."
            )
        elif self._lines.is_interactive:
            beside = f" with {self._adapter}" if self._adapter else ""
            self._screen.say(f"talk to {model.name}{beside}")
        if self._lines.is_interactive:
            self._screen.say("/help explains, Ctrl-C stops an answer, Ctrl-D ends")

    def _help(self) -> None:
        for line in HELP.splitlines():
            self._screen.say(line)

    def _reset(self) -> None:
        self._conversation.reset()
        self._screen.say("a new conversation begins")

    def _stats(self) -> None:
        talk, model = self._conversation, self._coordinator.model
        self._screen.say(
            f"{talk.num_turns} turn{'s' * (talk.num_turns != 1)}, {talk.num_tokens} of "
            f"{model.max_seq_len} tokens"
        )
        if self._last is not None:
            self._screen.say(f"last answer: {len(self._last.token_ids)} tokens, {self._last.pace}")

    async def _turn(self, said: str) -> None:
        try:
            # A template takes as long as it likes.
            turn = await in_leavable_thread(lambda: self._conversation.ask(said))
            bound = self._coordinator.model.max_seq_len
            if len(turn.token_ids) >= bound:
                raise ConfigurationError(
                    f"the conversation would have {len(turn.token_ids)} tokens, and this model takes {bound} "
                    "with the answer: /reset begins a new one (--max-seq-len, or the model's own bound)"
                )
            await self._answer(turn)
        except NeuroGridError as exc:
            if not self._lines.is_interactive:
                raise
            self._screen.end_line()
            self._screen.say(f"no answer: {exc}")

    async def _answer(self, turn: Turn) -> None:
        """Write the answer to the screen as it comes, and remember as much of it as came."""
        answer = self._last = _Answer()
        with trio.CancelScope() as scope:
            self._answering = scope
            try:
                await self._generate(turn, answer)
            finally:
                self._answering = None
        # On a terminal the next prompt stands apart.
        self._screen.write("\n\n" if self._lines.is_interactive else "\n")
        if answer.token_ids:
            self._conversation.answered(turn, answer.token_ids, answer.text)
        if why := self._why_it_ended(answer):
            self._screen.say(why)

    def _why_it_ended(self, answer: _Answer) -> str:
        """Reason for which the answer ended early or came to nothing; empty where it did neither."""
        num_tokens, bound = self._conversation.num_tokens, self._coordinator.model.max_seq_len
        if answer.finish_reason is None:
            return "stopped"
        if answer.finish_reason == "length":
            if num_tokens >= bound:
                return f"the conversation has reached the {bound} tokens that this model takes: /reset begins a new one"
            return f"cut after {len(answer.token_ids)} tokens (--max-tokens)"
        return "" if answer.token_ids else "the model had nothing to say"

    async def _generate(self, turn: Turn, answer: _Answer) -> None:
        coordinator = self._coordinator
        text = coordinator.model.tokenizer.stream()

        def write(piece: str) -> None:
            answer.text += piece
            self._screen.write(piece)

        generating = coordinator.generate_tokens(
            turn.token_ids,
            max_tokens=self._max_tokens,
            sampling=self._sampling,
            adapter=self._adapter,
        )
        try:
            async with aclosing(generating) as tokens:
                async for token in tokens:
                    answer.pace.tick()
                    answer.finish_reason = token.finish_reason
                    if token.finish_reason != "stop":
                        answer.token_ids.append(token.token_id)
                        write(text.push(token.token_id))
        finally:
            write(text.finish())
