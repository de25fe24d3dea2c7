"""One request while it is generated: its sessions, its deadline, and what comes of it, in the order that it comes.

Four things end it early, and each of them closes its sessions on all workers at once: the client goes away, the
deadline passes, one of its answers fails, or the server ends. What was generated goes to the client through a bounded
channel, so that a client that reads slowly holds up no other; some time after the deadline it is left, wherever it
is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import trio
from starlette.types import Receive, Scope, Send

from neurogrid.errors import (
    CapacityError,
    ConfigurationError,
    NeuroGridError,
    NoRouteError,
    RequestRefusedError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.inference.generation.prompt_readers import PromptLogprobs
from neurogrid.server.errors import APIError
from neurogrid.server.openai.answer_writer import (
    AnswerWriter,
    Piece,
    WrittenToken,
    written_prompt,
)
from neurogrid.server.openai.request_reader import CompletionRequest
from neurogrid.server.openai.tools.message_reader import MessageReader

__all__ = [
    "SERVER_SENT",
    "Answer",
    "AnswerShape",
    "Framing",
    "Usage",
    "api_error",
    "server_ended",
    "while_connected",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Pieces that wait for the client to read those before.
MAX_WAITING_PIECES = 64
# Above it what is told of tokens is written out in a thread: a thousand take some milliseconds, and those of a prompt,
# or of many, come at once.
MAX_INLINE_TOKENS = 1024
# Seconds after the deadline in which a client has to take what is left of its answer.
READ_TIMEOUT = 60.0
# What a client is told to wait: for a place in the queue, and for workers. Seconds.
QUEUE_RETRY_AFTER = 1.0
ROUTE_RETRY_AFTER = 5.0


@dataclass(frozen=True)
class Framing:
    """Framing of the events of a stream in its body.

    Attributes:
        before, after: what stands around the JSON of each event.
        last: what the stream ends with, where it ended well.
    """

    content_type: bytes
    before: bytes = b""
    after: bytes = b""
    last: bytes = b""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer; no proxy is to hold events back."""
        return [
            (b"content-type", self.content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]


SERVER_SENT = Framing(b"text/event-stream; charset=utf-8", b"data: ", b"\n\n", b"data: [DONE]\n\n")
"""Framing of completions as OpenAI streams them."""


class Usage:
    """Tokens of a request.

    Attributes:
        num_prompt_tokens: each prompt counted once.
        num_new_tokens: of all answers, stop strings and end-of-sequence tokens included.
        first_at, last_at: when the first and the last of these came, in nanoseconds of `time.monotonic_ns`.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_new_tokens = 0
        self.first_at = self.last_at = 0
        self._reused: dict[tuple[int, ...], int] = {}

    def token_came(self) -> None:
        """One more new token is there."""
        self.num_new_tokens += 1
        self.last_at = time.monotonic_ns()
        self.first_at = self.first_at or self.last_at

    def reused(self, prompt: Sequence[int], num_tokens: int) -> None:
        """Note the tokens of a prompt that were not computed; where several answers tell, the least counts."""
        key = tuple(prompt)
        self._reused[key] = min(num_tokens, self._reused.get(key, num_tokens))

    @property
    def num_reused_tokens(self) -> int:
        """Tokens of the prompts that were not computed."""
        return sum(self._reused.values())

    def as_json(self) -> dict[str, object]:
        """Return the usage as OpenAI's API has it."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_new_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_reused_tokens},
        }


class AnswerShape(Protocol):
    """Shape of an API's answers; made for each request."""

    framing: Framing

    def begin(self, index: int) -> bytes | None:
        """The event with which answer `index` begins in a stream, if there is one."""

    def event(self, index: int, piece: Piece) -> bytes | None:
        """The event that tells a piece; None where it is told later."""

    def usage_event(self, usage: Usage) -> bytes:
        """The event that tells the usage at the end."""

    def error_event(self, error: APIError) -> bytes:
        """The event that tells why nothing more comes."""

    def whole(self, answers: list[list[Piece]], usage: Usage) -> bytes:
        """The JSON of all answers at once."""


class Answer:
    """An ASGI application that answers one request.

    Args:
        deadline: of trio's clock.
        gave_up: is set when the server ends and waits no longer.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        request: CompletionRequest,
        shape: AnswerShape,
        *,
        deadline: float,
        gave_up: trio.Event,
    ) -> None:
        self._gave_up = gave_up
        self._coordinator = coordinator
        self._request = request
        self._shape = shape
        self._deadline = deadline
        self._usage = Usage(request.num_prompt_tokens)
        self._scores: list[list[float]] = [[] for _ in request.choices]
        self._sender, self._pieces = trio.open_memory_channel[tuple[int, Piece] | APIError](
            MAX_WAITING_PIECES
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: APIError | None = None

        async def answer() -> None:
            nonlocal error
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._generate)
                nursery.start_soon(self._end_with_server)
                try:
                    await (self._stream(send) if self._request.stream else self._at_once(send))
                except APIError as exc:
                    error = exc
                nursery.cancel_scope.cancel()

        with trio.move_on_at(self._deadline + READ_TIMEOUT):
            await while_connected(receive, answer)
            if error is not None:
                await error.response(scope["path"])(scope, receive, send)

    async def _generate(self) -> None:
        """Fill the channel, and close it; the last thing in it may be an error.

        After a bug it stays open: what came so far must not be taken for the whole.
        """
        failure: APIError | None = None
        try:
            with trio.fail_at(self._deadline), unwrap_errors():
                async with trio.open_nursery() as nursery:
                    for index in range(len(self._request.choices)):
                        nursery.start_soon(self._generate_one, index)
        except trio.TooSlowError:
            failure = APIError(
                504, "the answer was not finished in time (--request-timeout)", code="timeout"
            )
        except NeuroGridError as exc:
            failure = api_error(exc)
        if failure is not None:
            await self._sender.send(failure)
        self._sender.close()

    async def _end_with_server(self) -> None:
        """Tell the client before its sessions are closed, which takes as long as a worker is silent."""
        await self._gave_up.wait()
        with suppress(trio.ClosedResourceError):  # all of the answer is on its way
            await self._sender.send(server_ended())

    async def _generate_one(self, index: int) -> None:
        choice = self._request.choices[index]
        tokenizer, form = self._coordinator.model.tokenizer, self._request.form
        marks = form.marks if form is not None else ()
        ids = ((tokenizer.special_id(mark), mark) for mark in marks)
        message_reader = MessageReader(form) if form is not None else None
        writer = AnswerWriter(
            tokenizer,
            choice.prompt,
            stop=self._request.stop,
            min_tokens=choice.sampling.min_tokens,
            kept={token_id: mark for token_id, mark in ids if token_id is not None},
            is_read=message_reader is not None,
        )
        echo, num_logprobs = choice.echo, self._request.num_logprobs
        reader: PromptLogprobs | None = None
        if choice.tells_prompt:
            reader = PromptLogprobs(
                choice.prompt,
                num_top=num_logprobs or 0,
                vocab_size=self._coordinator.model.ends.vocab_size,
            )
        if not choice.max_tokens:
            await self._tell_prompt(index, reader)
            return
        if self._request.num_kept is not None:
            num_logprobs = num_logprobs or 0
        generating = self._coordinator.generate_tokens(
            choice.prompt,
            max_tokens=choice.max_tokens,
            sampling=choice.sampling,
            num_logprobs=num_logprobs,
            ignore_eos=self._request.ignore_eos,
            adapter=self._request.adapter,
            grammar=self._request.grammar,
            reader=reader,
            images=choice.images,
        )
        is_first = True
        async with aclosing(generating) as tokens:
            async for token in tokens:
                piece = writer.push(token)
                if message_reader is not None:
                    piece = message_reader.push(piece)
                self._usage.token_came()
                if is_first:
                    self._usage.reused(choice.prompt, token.num_reused)
                    is_first = False
                if token.logprobs is not None:
                    self._scores[index].append(token.logprobs.chosen)
                if choice.echo and piece.tokens:
                    piece = _moved(piece, len(choice.echo))
                if echo:  # not before the first token: until then an error is a status
                    before = await self._written(choice.prompt, reader)
                    piece = replace(piece, text=echo + piece.text, tokens=(*before, *piece.tokens))
                    echo = ""
                if not piece.is_empty:
                    await self._sender.send((index, piece))
                if piece.finish_reason is not None:
                    break

    async def _tell_prompt(self, index: int, reader: PromptLogprobs | None) -> None:
        """Answer with the prompt alone."""
        choice = self._request.choices[index]
        if reader is not None:
            adapter = self._request.adapter
            await self._coordinator.read_prompt(choice.prompt, reader, adapter=adapter)
        tokens = await self._written(choice.prompt, reader)
        await self._sender.send((index, Piece(choice.echo, tokens, "length")))

    async def _written(
        self, prompt: Sequence[int], reader: PromptLogprobs | None
    ) -> tuple[WrittenToken, ...]:
        """The tokens of a prompt that was read; none, if nobody did."""
        if reader is None:
            return ()
        tokenizer = self._coordinator.model.tokenizer
        write = partial(written_prompt, tokenizer, prompt, reader.logprobs())
        return await trio.to_thread.run_sync(write)

    def _kept(self, answers: list[list[Piece]]) -> list[list[Piece]]:
        """The answers that are given: all, or of each prompt's those with the highest mean log probability."""
        num_kept, num_each = self._request.num_kept, self._request.num_each
        if num_kept is None:
            return answers
        means = [sum(scores) / max(len(scores), 1) for scores in self._scores]
        kept: list[list[Piece]] = []
        for start in range(0, len(answers), num_each):
            best = sorted(range(start, start + num_each), key=means.__getitem__, reverse=True)
            kept += [answers[index] for index in best[:num_kept]]
        return kept

    async def _at_once(self, send: Send) -> None:
        answers: list[list[Piece]] = [[] for _ in self._request.choices]
        async for item in self._pieces:
            index, piece = _piece(item)
            answers[index].append(piece)
        kept = self._kept(answers)
        num_tokens = sum(len(piece.tokens) for pieces in kept for piece in pieces)
        body = await _written_out(partial(self._shape.whole, kept, self._usage), num_tokens)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """Send events as they come. Until the first of them, an error is a status; after it, an event."""
        begun: set[int] = set()
        is_started = False
        framing = self._shape.framing

        async def send_event(data: bytes | None) -> None:
            if data is not None:
                body = framing.before + data + framing.after
                await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            async for item in self._pieces:
                index, piece = _piece(item)
                if not is_started:
                    is_started = True
                    headers = framing.headers
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                if index not in begun:
                    begun.add(index)
                    await send_event(self._shape.begin(index))
                event = partial(self._shape.event, index, piece)
                await send_event(await _written_out(event, len(piece.tokens)))
            if self._request.include_usage:
                await send_event(self._shape.usage_event(self._usage))
            last = framing.last
        except APIError as error:
            if not is_started:
                raise
            await send_event(self._shape.error_event(error))
            last = b""
        await send({"type": "http.response.body", "body": last})


async def while_connected(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Do `work` as long as the client is there; it is cancelled when it goes away.

    Args:
        receive: of a request whose body was read.
    """
    with unwrap_errors():
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await work()
            nursery.cancel_scope.cancel()


async def _written_out(write: Callable[[], T], num_tokens: int) -> T:
    """Call `write`, which writes out so many tokens with their log probabilities."""
    if num_tokens > MAX_INLINE_TOKENS:
        return await trio.to_thread.run_sync(write)
    return write()


def _moved(piece: Piece, num_characters: int) -> Piece:
    """The piece of an answer before which there are so many characters."""
    tokens = (replace(token, offset=token.offset + num_characters) for token in piece.tokens)
    return replace(piece, tokens=tuple(tokens))


def _piece(item: tuple[int, Piece] | APIError) -> tuple[int, Piece]:
    if isinstance(item, APIError):
        raise item
    return item


def server_ended() -> APIError:
    """The error of a request that is not finished when the server ends."""
    return APIError(
        503,
        "the server was told to end before this answer was finished: ask again",
        code="server_ended",
        retry_after=ROUTE_RETRY_AFTER,
    )


def api_error(error: NeuroGridError) -> APIError:
    """Return the error that a client is told where computing fails."""
    if isinstance(error, ConfigurationError):
        return APIError(400, str(error), code="invalid_value")
    if isinstance(error, CapacityError | RequestRefusedError):
        return APIError(
            429,
            f"{error}: try again later (--max-queue)",
            code="queue_full",
            retry_after=QUEUE_RETRY_AFTER,
        )
    if isinstance(error, NoRouteError):
        return APIError(503, str(error), code="no_route", retry_after=ROUTE_RETRY_AFTER)
    logger.warning("a request failed: %s", error)
    return APIError(500, str(error), code="generation_failed")
