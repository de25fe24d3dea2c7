"""Reader of a request's JSON: it gives what is to be generated, and finds everything that can be wrong with it.

What is wrong with a field by itself has status 400. Where each field is right, and together they cannot be, or the
model has no such token, it is 422. Two of these are 400 all the same, as OpenAI's API answers them, whose clients look
for that: a text that is too long (`context_length_exceeded`), and a conversation that the model's template refuses
(`chat_template`).
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import trio

from neurogrid.errors import ConfigurationError
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.generation.sampling import derived_seed
from neurogrid.inference.generation.sampling_params import MAX_SEED, SamplingParams
from neurogrid.model.files.chat_template import RENDER_SECONDS, TemplateBusyError
from neurogrid.model.files.tokenizer import ChatEnding, Tokenizer
from neurogrid.model.grammars import Grammar, GrammarBusyError
from neurogrid.model.images.reader import ImageInputs, TooManyTokensError
from neurogrid.server.errors import APIError
from neurogrid.server.openai.fill_in_prompts import fill_in_ends, fill_in_prompt, read_filling
from neurogrid.server.openai.image_parts import read_images
from neurogrid.server.openai.not_offered import (
    NOT_IN_CHATS,
    NOT_IN_TEXTS,
    refuse_fields,
    refuse_messages,
)
from neurogrid.server.openai.request_schemas import (
    CHAT_REQUEST,
    COMPLETION_REQUEST,
    MAX_CHOICES,
)
from neurogrid.server.openai.template_values import read_ending, read_variables
from neurogrid.server.openai.tools.answer_grammar import answer_grammar
from neurogrid.server.openai.tools.call_formats import thinking_of
from neurogrid.server.openai.tools.message_reader import MessageForm
from neurogrid.server.openai.tools.tool_requests import read_messages, read_tools
from neurogrid.server.schema_check import check

__all__ = [
    "ChoiceRequest",
    "CompletionRequest",
    "chat_prompt",
    "check_length",
    "encode_text",
    "encode_texts",
    "read_chat",
    "read_completion",
    "read_model_name",
    "recommended_sampling",
]

# As OpenAI's API has it.
DEFAULT_COMPLETION_TOKENS = 16
# Conversations that wait for a template, which takes RENDER_SECONDS at most: for that long, then for their turn.
_TEMPLATES = trio.CapacityLimiter(64)
TEMPLATE_RETRY_AFTER = 5.0
# Conversations whose images are made ready at once: with one model one of them decodes an image, which takes some
# hundred MB.
_IMAGES = trio.CapacityLimiter(2)
# Schemas that wait to be compiled, one after the other; and for how long, where the first one of a large vocabulary
# takes some seconds itself.
_GRAMMARS = trio.CapacityLimiter(16)
GRAMMAR_TIMEOUT = 30.0
# Above it a text is tokenised in a thread: a millisecond or two.
MAX_INLINE_CHARS = 4096
# What the model's makers may recommend otherwise.
_DEFAULTS: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
# Below it a top_p is this: one token in any case.
MIN_TOP_P = 1e-6


@dataclass(frozen=True)
class ChoiceRequest:
    """One answer that is to be generated.

    Attributes:
        prompt: token ids.
        max_tokens: new ones at most; the session has room for all of them. 0 for the prompt alone.
        echo: text before the answer.
        tells_prompt: whether the log probabilities of the prompt's tokens come with it.
        images: those among the prompt's tokens; None for none.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    echo: str = ""
    tells_prompt: bool = False
    images: ImageInputs | None = None


@dataclass(frozen=True)
class CompletionRequest:
    """A request, checked.

    Attributes:
        choices: in the order of their indices, `num_each` of them for each prompt.
        num_kept: of each prompt's, so many are given, those with the highest mean log probability; None for all.
        num_prompt_tokens: of all prompts, each counted once.
        stop: strings before which the text ends.
        num_logprobs, adapter, grammar: as for `Coordinator.generate_tokens`.
        form: what a message is read from; None where the text is the answer.
    """

    choices: tuple[ChoiceRequest, ...]
    num_prompt_tokens: int
    stop: tuple[str, ...]
    num_logprobs: int | None
    ignore_eos: bool
    stream: bool
    include_usage: bool
    adapter: str | None = None
    grammar: Grammar | None = None
    form: MessageForm | None = None
    num_each: int = 1
    num_kept: int | None = None


def read_model_name(model: LoadedModel, adapters: Collection[str], name: object) -> str | None:
    """The adapter that a request names as its model; None for the model itself.

    Raises:
        APIError: 404, it is neither.
    """
    if name is None or name == model.name:
        return None
    if not isinstance(name, str) or name not in adapters:
        more = f", and {len(adapters)} adapters are (/v1/models)" if adapters else ""
        raise APIError(
            404,
            f"the model {str(name)[:100]!r} is not served here, {model.name!r} is{more}",
            param="model",
            code="model_not_found",
        )
    return name


async def read_chat(
    body: Mapping[str, Any], model: LoadedModel, adapters: Collection[str] = ()
) -> CompletionRequest:
    """The request of `/v1/chat/completions`.

    Args:
        adapters: the names of those that are served beside the model.

    Raises:
        APIError: 400, 404 or 422, with the field.
    """
    refuse_fields(body, NOT_IN_CHATS)
    refuse_messages(body.get("messages"), model)
    check(body, CHAT_REQUEST)
    adapter = read_model_name(model, adapters, body.get("model"))
    tools = read_tools(body, model.tokenizer)
    text, prompt, images = await _conversation(body, model, tools.told)
    template = model.tokenizer.chat_template_text(tools=tools.told is not None)
    form = MessageForm(
        call_format=tools.call_format,
        tools=tools.parameters,
        thinking=thinking_of(template, text),
        max_calls=tools.max_calls,
        is_forced=tools.is_named,
    )
    grammar = None
    wanted = answer_grammar(body, tools, form.thinking, model.tokenizer)
    if wanted is not None:
        _refuse_beside_grammar(body)
        grammar = await _compiled(model, *wanted)
    num_logprobs = None
    if body.get("logprobs"):
        num_logprobs = int(body.get("top_logprobs") or 0)
    elif body.get("top_logprobs"):
        raise _impossible("top_logprobs needs logprobs to be true", "top_logprobs")
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    request = _request(body, model, [prompt], [""], "messages", max_tokens, num_logprobs)
    if images is not None:
        choices = tuple(replace(choice, images=images) for choice in request.choices)
        request = replace(request, choices=choices)
    reads = form.call_format is not None or form.thinking is not None
    return replace(request, adapter=adapter, grammar=grammar, form=form if reads else None)


async def chat_prompt(body: Mapping[str, Any], model: LoadedModel) -> list[int]:
    """The tokens of a conversation, by the model's own template.

    Args:
        body: with `messages` and how they end, as in a chat request; checked.

    Raises:
        APIError: 400 or 422, with the field; 503, others hold the template.
    """
    _, prompt, _ = await _conversation(body, model, None)
    return prompt


async def _conversation(
    body: Mapping[str, Any], model: LoadedModel, tools: Sequence[Mapping[str, Any]] | None
) -> tuple[str, list[int], ImageInputs | None]:
    """A conversation as its template writes it, its tokens, and its images; `tools` are told to the template."""
    variables = read_variables(body, model.tokenizer)
    if tools is not None:
        variables["tools"] = tools
    files: list[bytes] = []
    if model.sight is not None:  # in a thread: a body full of images takes half a second
        files = await trio.to_thread.run_sync(read_images, body["messages"])
    messages = read_messages(body["messages"], model.tokenizer)
    rendered = partial(_rendered, model.tokenizer, messages, read_ending(body), variables)
    run_sync: Any = trio.to_thread.run_sync  # its stubs lack `abandon_on_cancel`
    text: str | None = None
    prompt: list[int] = []
    try:
        with trio.move_on_after(2 * RENDER_SECONDS):
            text, prompt = await run_sync(rendered, abandon_on_cancel=True, limiter=_TEMPLATES)
    except TemplateBusyError as exc:
        raise _busy(str(exc)) from exc
    except ConfigurationError as exc:
        raise APIError(400, str(exc), param="messages", code="chat_template") from exc
    if text is None:
        raise _busy("too many conversations wait for the model's chat template")
    if not files:
        return text, prompt, None
    assert model.sight is not None, "refuse_messages has refused them"
    try:
        read = partial(
            model.sight.reader.read,
            text,
            files,
            max_tokens=model.max_seq_len,
            on_image=trio.from_thread.check_cancelled,  # whose client has gone
        )
        prompt, images = await trio.to_thread.run_sync(read, limiter=_IMAGES)
    except TooManyTokensError as exc:
        raise APIError(400, str(exc), param="messages", code="context_length_exceeded") from exc
    except ConfigurationError as exc:
        raise APIError(400, str(exc), param="messages", code="invalid_image") from exc
    return text, prompt, images


async def read_completion(
    body: Mapping[str, Any],
    model: LoadedModel,
    adapters: Collection[str] = (),
    *,
    default_tokens: int | None = DEFAULT_COMPLETION_TOKENS,
) -> CompletionRequest:
    """The request of `/v1/completions`.

    Args:
        adapters: the names of those that are served beside the model.
        default_tokens: new ones at most where the request does not say; None for as many as there is room for.

    Raises:
        APIError: 400, 404 or 422, with the field.
    """
    refuse_fields(body, NOT_IN_TEXTS)
    check(body, COMPLETION_REQUEST)
    adapter = read_model_name(model, adapters, body.get("model"))
    given = body["prompt"]
    if isinstance(given, str) or (given and isinstance(given[0], int | float)):
        given = [given]
    if suffix := body.get("suffix"):
        if body.get("echo"):
            raise _impossible("echo cannot be with suffix: the answer stands between two", "echo")
        filling = read_filling(model, "suffix")
        prompts = [await fill_in_prompt(filling, prompt, suffix) for prompt in given]
        body = {**body, "stop_token_ids": fill_in_ends(filling, model, body.get("stop_token_ids"))}
    else:
        prompts = await encode_texts(given, model)
    num_logprobs = body.get("logprobs")
    echoes = [""] * len(prompts)
    if body.get("echo"):
        for prompt in prompts:
            check_length(prompt, model, "prompt", num_new=0)  # before it is written out again
        echoes = [
            prompt if isinstance(prompt, str) else model.tokenizer.decode(token_ids)
            for prompt, token_ids in zip(given, prompts, strict=True)
        ]
    max_tokens = body.get("max_tokens")
    if max_tokens is None:
        max_tokens = default_tokens
    elif not max_tokens and not body.get("echo"):
        raise _impossible(
            "max_tokens may be 0 with echo alone: there is nothing to answer", "max_tokens"
        )
    num_logprobs = None if num_logprobs is None else int(num_logprobs)
    request = _request(body, model, prompts, echoes, "prompt", max_tokens, num_logprobs)
    return replace(request, adapter=adapter)


def _rendered(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    ending: ChatEnding,
    variables: Mapping[str, object],
) -> tuple[str, list[int]]:
    """The text of a conversation, and its tokens. Blocks."""
    text = tokenizer.chat_text(messages, ending=ending, variables=variables)
    return text, tokenizer.encode(text, add_special_tokens=False)


def _refuse_beside_grammar(body: Mapping[str, Any]) -> None:
    """Refuse what would have an answer go on where it is complete."""
    for name in ("ignore_eos", "min_tokens"):
        if body.get(name):
            raise _impossible(
                f"{name} cannot be where the answer has to fit a schema or be a call, which ends when it is complete",
                name,
            )


async def _compiled(model: LoadedModel, text: str, param: str) -> Grammar:
    run_sync: Any = trio.to_thread.run_sync
    grammar: Grammar | None = None
    try:
        with trio.move_on_after(GRAMMAR_TIMEOUT):
            grammar = await run_sync(
                lambda: model.grammars.compile(text), abandon_on_cancel=True, limiter=_GRAMMARS
            )
    except GrammarBusyError as exc:
        raise _grammar_busy(str(exc)) from exc
    except ConfigurationError as exc:
        message = f"{param} cannot be held to: {exc}"
        raise APIError(400, message, param=param, code="unsupported_parameter") from exc
    if grammar is None:
        raise _grammar_busy("too many schemas wait to be compiled: try again")
    return grammar


async def encode_texts(
    texts: Sequence[str | Sequence[float]], model: LoadedModel
) -> list[list[int]]:
    """The tokens of several texts, some of which may be tokens already; in a thread where they are long together."""

    def encode() -> list[list[int]]:
        return [
            model.tokenizer.encode(text)
            if isinstance(text, str)
            else [int(token_id) for token_id in text]
            for text in texts
        ]

    if sum(map(len, texts)) > MAX_INLINE_CHARS:
        return await trio.to_thread.run_sync(encode)
    return encode()


async def encode_text(
    text: str, model: LoadedModel, *, add_special_tokens: bool = True
) -> list[int]:
    """The tokens of a text; of a long one in a thread."""
    encode = partial(model.tokenizer.encode, text, add_special_tokens=add_special_tokens)
    if len(text) > MAX_INLINE_CHARS:
        return await trio.to_thread.run_sync(encode)
    return encode()


def _request(
    body: Mapping[str, Any],
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    echoes: Sequence[str],
    param: str,
    max_tokens: float | None,
    num_logprobs: int | None,
) -> CompletionRequest:
    num_kept = int(body.get("n") or 1)
    num_each = int(body.get("best_of") or num_kept)
    if num_each < num_kept:
        raise _impossible(f"best_of is {num_each}, and n is {num_kept}, which is more", "best_of")
    if num_each > num_kept and body.get("stream"):
        raise _impossible(
            "best_of more than n cannot be streamed: which are the best is known at the end",
            "best_of",
        )
    if num_each * len(prompts) > MAX_CHOICES:
        raise _impossible(
            f"{len(prompts)} prompts and n or best_of = {num_each} make more than {MAX_CHOICES} answers",
            "n",
        )
    sampling = _sampling(body, model)
    seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
    choices: list[ChoiceRequest] = []
    for prompt, echo in zip(prompts, echoes, strict=True):
        room = _room(prompt, model, param, max_tokens)
        if sampling.min_tokens > room:
            raise _impossible(
                f"min_tokens is {sampling.min_tokens}, and there may be {room} new tokens at most",
                "min_tokens",
            )
        for _ in range(num_each):
            # By its index among all answers: two that begin with the same prompt differ, too.
            own = replace(sampling, seed=derived_seed(seed, len(choices)))
            tells_prompt = bool(body.get("echo")) and num_logprobs is not None
            choices.append(ChoiceRequest(prompt, room, own, echo, tells_prompt))
    stop = body.get("stop") or ()
    return CompletionRequest(
        choices=tuple(choices),
        num_prompt_tokens=sum(map(len, prompts)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        num_logprobs=num_logprobs,
        ignore_eos=bool(body.get("ignore_eos")),
        stream=bool(body.get("stream")),
        num_each=num_each,
        num_kept=num_kept if num_each > num_kept else None,
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def check_length(
    prompt: Sequence[int], model: LoadedModel, param: str, *, num_new: int = 1
) -> None:
    """Refuse a prompt that the model cannot have.

    Args:
        num_new: tokens that there has to be room for behind it.

    Raises:
        APIError: 400, it is too long; 422, it is empty, or has tokens that are none.
    """
    try:
        model.check_prompt(prompt, num_new=num_new)
    except ConfigurationError as exc:
        if len(prompt) + num_new <= model.max_seq_len:
            raise _impossible(str(exc), param) from exc
        raise APIError(400, str(exc), param=param, code="context_length_exceeded") from exc


def _room(prompt: Sequence[int], model: LoadedModel, param: str, max_tokens: float | None) -> int:
    """Number of tokens that may be generated after `prompt`."""
    check_length(prompt, model, param, num_new=0 if max_tokens == 0 else 1)
    free = model.max_seq_len - len(prompt)
    if max_tokens is not None and max_tokens > free:
        raise APIError(
            400,
            f"sessions have at most {model.max_seq_len} tokens: {len(prompt)} of the prompt and "
            f"{int(max_tokens)} new ones are more; ask for at most {free} new ones",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return free if max_tokens is None else int(max_tokens)


def _busy(message: str) -> APIError:
    return APIError(503, message, code="chat_template_busy", retry_after=TEMPLATE_RETRY_AFTER)


def _grammar_busy(message: str) -> APIError:
    return APIError(503, message, code="grammar_busy", retry_after=TEMPLATE_RETRY_AFTER)


def _impossible(message: str, param: str) -> APIError:
    return APIError(422, message, param=param, code="invalid_value")


def _sampling(body: Mapping[str, Any], model: LoadedModel) -> SamplingParams:
    """Return what the request says, or else what the model's makers recommend, or else what OpenAI's API has."""
    given = {name: value for name, value in body.items() if value is not None}
    fields = {**_DEFAULTS, **recommended_sampling(model), **given}
    biases = {
        int(token_id): bias
        for token_id, bias in cast(Mapping[str, float], given.get("logit_bias", {})).items()
    }
    stop_token_ids = tuple(map(int, given.get("stop_token_ids", ())))
    for name, token_ids in (("logit_bias", biases), ("stop_token_ids", stop_token_ids)):
        for token_id in token_ids:
            if token_id >= model.ends.vocab_size:
                raise _impossible(
                    f"the model has tokens 0 to {model.ends.vocab_size - 1}, and not {token_id}",
                    name,
                )
    seed = given.get("seed")
    return SamplingParams(
        temperature=fields["temperature"],
        top_k=max(int(fields["top_k"]), 0),
        top_p=max(fields["top_p"], MIN_TOP_P),
        seed=None if seed is None else int(seed) & MAX_SEED,
        frequency_penalty=given.get("frequency_penalty", 0.0),
        presence_penalty=given.get("presence_penalty", 0.0),
        logit_bias=biases,
        min_p=fields["min_p"],
        repetition_penalty=fields["repetition_penalty"],
        min_tokens=int(given.get("min_tokens", 0)),
        stop_token_ids=stop_token_ids,
    )


def recommended_sampling(model: LoadedModel) -> dict[str, Any]:
    """Sampling that the checkpoint's generation_config.json recommends, as those fields of a request that are valid."""
    config = model.checkpoint.generation_config
    fields = {}
    for name in _DEFAULTS:
        try:
            check(value := config.get(name), CHAT_REQUEST["properties"][name], name)
        except APIError:
            continue  # transformers takes values that mean nothing, too
        if value is not None:
            fields[name] = value
    return fields
