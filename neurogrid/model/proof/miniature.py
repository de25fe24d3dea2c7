"""The proof, before a model is served, that it can be split: on a miniature of its own config.

A miniature with random weights is saved as a checkpoint and loaded again into stages, cut in several
places, and compared with transformers' own whole model: logits of each step against its `forward`,
and tokens against its `generate`, past every length at which the model changes its ways. Unequal or
impossible means refused, with the reason.

It knows no family. What `generate` does with its cache on the way is observed, not looked up: where
it drops it and starts anew, so must a coordinator (`SplitTraits.recompute_at`).

Last, whether rows of several sessions may share a forward pass (miniature_rows.py), whether tokens may be guessed
(miniature_guesses.py), and whether layers may be compiled (miniature_fused.py). No model is refused for any of them: it
runs one session after another, and says so, without guesses, or as it is.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedConfig

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.files.model_code import one_line, quiet_transformers
from neurogrid.model.files.tensor_names import layer_of
from neurogrid.model.proof.miniature_config import LengthLimit, miniatures
from neurogrid.model.proof.miniature_fused import layers_fuse
from neurogrid.model.proof.miniature_guesses import rolls_back
from neurogrid.model.proof.miniature_rows import ROWS_TOLERANCE, NotEqualError, row_bounds
from neurogrid.model.proof.miniature_split import Split, saved_tensors
from neurogrid.model.stages.skeleton import build_on_meta, find_layers, num_decoder_layers
from neurogrid.model.stages.weight_loading import Pristine

__all__ = ["SEED", "SplitTraits", "check_splittable", "proving", "randomise", "small_model"]

# Relative to the largest logit. Stages do what `forward` does, in the same shapes, so they must give
# the same bits; `generate` passes a mask of ones, which may choose another kernel.
_GENERATE_TOLERANCE = 1e-5
# Chunks against one go: other shapes, other order of summation. A cache that is ignored, or a chunk
# that is masked wrongly, is off by tenths.
_CHUNKS_TOLERANCE = 1e-3

_MAX_PARAMETERS = 50_000_000
SEED = 20_240_229
_PROMPT, _PAST_LAST_LIMIT = 5, 4


@dataclass(frozen=True, slots=True)
class SplitTraits:
    """The traits of a model that a coordinator must know to get the tokens that `generate` gives.

    Attributes:
        recompute_at: the length at which the caches are rebuilt by one prefill, None for never.
            When a session's caches hold fewer tokens than this and the tokens to come next make it
            this many or more, all caches of the session are dropped and everything so far, the new
            tokens included, goes through in one prefill.
        row_bounds: lengths that rows of one forward must not straddle; empty where any rows may
            share one. None where none may: sessions then run one after another.
        rows_refused: why not, in that case.
        takes_chunks: whether several tokens may be fed to a session that has begun, wherever it is cut: it
            gives what one prefill of all its tokens gives, up to rounding. Some families then begin their
            recurrent states anew.
        fuses: whether its layers may be compiled.
        same_bits: whether a token then gets the same bits, whatever it is computed with; only where the model takes
            chunks of any prompt.
        rolls_back: whether several tokens may be fed to a session that has begun, and the last of them be forgotten
            again at any length: what comes then is what comes without them, up to rounding.
    """

    recompute_at: int | None = None
    row_bounds: tuple[int, ...] | None = ()
    rows_refused: str = ""
    takes_chunks: bool = False
    fuses: bool = False
    same_bits: bool = False
    rolls_back: bool = False


def check_splittable(config: PreTrainedConfig) -> SplitTraits:
    """Prove on a miniature of `config` that stages compute what the whole model does.

    On the CPU, in float32; takes about a second and a few MB for a config that makes sense (proof.py: for the others).

    Raises:
        UnsupportedModelError: with the reason, in one line.
    """
    what = f"model type {config.model_type!r} cannot be split"
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{what}: it has an encoder and a decoder")
    with proving(what):
        limits, model = small_model(config)
        return _Check(limits, model).run()


@contextmanager
def proving(what: str) -> Iterator[None]:
    """Try a miniature in the block: random numbers are the same each time, and of nobody else.

    Args:
        what: is refused where it fails.

    Raises:
        UnsupportedModelError: it failed; says why, in one line.
    """
    with quiet_transformers(), torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        try:
            yield
        except UnsupportedModelError as exc:
            raise UnsupportedModelError(f"{what}: {exc}") from exc
        except Exception as exc:  # whatever a model's code may raise is a refusal here
            raise UnsupportedModelError(
                f"{what}: its miniature failed with {type(exc).__name__}: {one_line(exc)}"
            ) from exc


def small_model(config: PreTrainedConfig) -> tuple[tuple[LengthLimit, ...], Any]:
    """The smallest miniature that transformers can build and run, with random weights."""
    failure = "no miniature"
    from_config: Any = AutoModelForCausalLM.from_config  # not typed by transformers
    for small in miniatures(config):
        try:
            small_config = small.build()
            on_meta = build_on_meta(small_config, torch.float32)
            count = sum(parameter.numel() for parameter in on_meta.parameters())
            if count > _MAX_PARAMETERS:
                failure = f"its miniature would have {count} parameters; {failure}"
                break
            model = from_config(small_config, dtype=torch.float32).eval()
            randomise(model)
            # Not in inference mode: what a forward puts in a buffer has to be writable afterwards.
            with torch.no_grad():
                model(input_ids=torch.zeros(1, _PROMPT, dtype=torch.long))
        except Exception as exc:  # noqa: BLE001  a guess that its code refuses; the next may do
            failure = f"{type(exc).__name__}: {one_line(exc)}"
            continue
        return small.limits, model
    raise UnsupportedModelError(f"no miniature of it can be built ({failure})")


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights that matter: an initialised model is too quiet, its biases and norms are all alike."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.add_(torch.randn_like(buffer), alpha=0.1)


class _Check:
    """The comparisons, over one miniature."""

    def __init__(self, limits: tuple[LengthLimit, ...], model: Any) -> None:
        self._limits = limits
        self._model = model
        self._config: PreTrainedConfig = model.config
        self._pristine = Pristine(list(model.modules()))
        self._num_layers = num_decoder_layers(self._config)
        self._first_layer = model.get_submodule(find_layers(model, self._num_layers))[0]
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        # Past every threshold, with the largest crossed by decoding as well as by a prefill.
        self._length = max((limit.small for limit in limits), default=8) + _PAST_LAST_LIMIT
        vocab_size = self._config.get_text_config(decoder=True).vocab_size
        self._tokens = torch.randint(0, vocab_size, (self._length,)).tolist()

    def run(self) -> SplitTraits:
        tensors = saved_tensors(self._model)
        self._check_names(tensors)
        first, *others = _cuts(self._num_layers)
        splits = [Split(self._config, tensors, first)]
        ends = splits[0].ends
        splits += [Split(self._config, tensors, cuts, ends=ends) for cuts in others]
        turns = [self._turns(plan) for plan in self._plans()]
        for split in splits:
            for turn in turns:
                session = split.new_session()
                for token_ids, expected in turn:
                    _require_equal(
                        session.step(token_ids), expected, f"cut into layers {split.ranges}"
                    )
        self._compare_interleaved(splits[-1], turns)
        self._compare_chunks_with_one_go()
        traits = self._compare_with_generate(splits[0])
        try:
            bounds = row_bounds(splits[0], self._tokens, self._limits)
        except NotEqualError as exc:
            traits = replace(traits, row_bounds=None, rows_refused=str(exc))
        else:
            # Where lengths matter to rows, they matter to chunks.
            takes_chunks = not bounds and self._chunks_give_the_same()
            back = takes_chunks and rolls_back(splits[-1], self._tokens)
            traits = replace(traits, row_bounds=bounds, takes_chunks=takes_chunks, rolls_back=back)
        fused = layers_fuse(self._config, tensors, self._tokens, self._limits, traits.row_bounds)
        same_bits = fused.same_bits and traits.takes_chunks
        return replace(traits, fuses=fused.fuses, same_bits=same_bits)

    def _plans(self) -> list[list[int]]:
        """Numbers of tokens to feed at the steps of each plan: decoding, chunks, and one prefill past all limits."""
        chunk = max(2, (self._length - 3) // 2)
        return [
            [_PROMPT, *[1] * (self._length - _PROMPT)],
            [chunk, self._length - 3 - chunk, 1, 1, 1],
            [self._length - 1, 1],
        ]

    def _check_names(self, tensors: Mapping[str, torch.Tensor]) -> None:
        owners = {layer_of(name, self._num_layers) for name in tensors}
        missing = set(range(self._num_layers)) - owners
        if missing:
            raise UnsupportedModelError(
                f"no tensor of its checkpoint names layer {min(missing)}, such as {min(tensors)!r}"
            )

    def _forward(self, cache: Any, position: int, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [V] of the whole model's own forward."""
        arguments: dict[str, Any] = {}
        if cache is not None:
            arguments = {"past_key_values": cache, "use_cache": True}
        if self._takes_positions:
            # As generate() does. Left out, they start at 0 in some models, cache or not (Bamba).
            end = position + len(token_ids)
            arguments["position_ids"] = torch.arange(position, end)[None]
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([token_ids]), logits_to_keep=1, **arguments)
            logits: torch.Tensor = output.logits[0, -1].float()
            return logits

    def _turns(self, plan: Sequence[int]) -> list[tuple[list[int], torch.Tensor]]:
        """The tokens of each step of `plan`, and the whole model's logits after them."""
        self._pristine.restore()
        cache = DynamicCache(config=self._config)
        turns = []
        position = 0
        for size in plan:
            token_ids = self._tokens[position : position + size]
            turns.append((token_ids, self._forward(cache, position, token_ids)))
            position += size
        return turns

    def _compare_interleaved(
        self, split: Split, turns: Sequence[Sequence[tuple[list[int], torch.Tensor]]]
    ) -> None:
        """Sessions in turn: nothing of one may reach another."""
        sessions = [split.new_session() for _ in turns]
        for step in range(max(map(len, turns))):
            for session, turn in zip(sessions, turns, strict=True):
                if step < len(turn):
                    token_ids, expected = turn[step]
                    _require_equal(session.step(token_ids), expected, "with sessions interleaved")

    def _compare_chunks_with_one_go(self) -> None:
        """Check that the cache is used at all: within the first limit, chunks give what one go gives."""
        length = min([limit.small for limit in self._limits] + [self._length]) - 1
        if length < 2:
            return
        self._pristine.restore()
        expected = self._forward(None, 0, self._tokens[:length])
        _, got = self._turns([length - 1, 1])[-1]
        if not _is_close(got, expected, _CHUNKS_TOLERANCE):
            raise UnsupportedModelError("its forward with a cache does not continue a sequence")

    def _chunks_give_the_same(self) -> bool:
        """Whether several tokens continue a sequence as one prefill would have it, past all limits."""
        length, third = self._length, self._length // 3
        _, expected = self._turns([length])[-1]
        plans = (
            [length // 2, length - length // 2],
            [1, length - 1],
            [third, third, length - 2 * third],
        )
        return all(_is_close(self._turns(plan)[-1][1], expected, ROWS_TOLERANCE) for plan in plans)

    def _compare_with_generate(self, split: Split) -> SplitTraits:
        sizes, tokens, expected = self._generate()
        restart = self._restart(sizes)
        # Some drop their cache where it makes no difference; rebuilding costs a prefill.
        for drop_at in (None, restart) if restart else (None,):
            if self._gives_the_same(split, tokens, expected, drop_at):
                return SplitTraits(None if drop_at is None else self._true_length(drop_at))
        raise UnsupportedModelError("its stages do not give the logits that generate() gives")

    def _generate(self) -> tuple[list[int], list[int], list[torch.Tensor]]:
        """Run `generate`: number of tokens fed at each step, all tokens, logits [V] of each step."""
        sizes: list[int] = []

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden_BTD = args[0] if args else kwargs["hidden_states"]
            sizes.append(hidden_BTD.shape[1])

        greedy: Any = GenerationConfig  # not typed by transformers
        self._pristine.restore()
        prompt_BT = torch.tensor([self._tokens[:_PROMPT]])
        hook = self._first_layer.register_forward_pre_hook(record, with_kwargs=True)
        try:
            output = self._model.generate(
                prompt_BT,
                attention_mask=torch.ones_like(prompt_BT),
                generation_config=greedy(
                    max_new_tokens=self._length - _PROMPT,
                    do_sample=False,
                    use_cache=True,
                    pad_token_id=0,
                    output_logits=True,
                    return_dict_in_generate=True,
                ),
            )
        finally:
            hook.remove()
        return sizes, output.sequences[0].tolist(), [step[0].float() for step in output.logits]

    def _restart(self, sizes: Sequence[int]) -> int | None:
        """The length at which `generate` dropped its cache and started anew."""
        restarts = [i for i, size in enumerate(sizes) if i > 0 and size != 1]
        if not restarts:
            return None
        length = _PROMPT + restarts[0]
        if len(restarts) > 1 or sizes[restarts[0]] != length:
            raise UnsupportedModelError("its generate() does not feed one token a step")
        return length

    def _gives_the_same(
        self,
        split: Split,
        tokens: Sequence[int],
        expected: Sequence[torch.Tensor],
        drop_at: int | None,
    ) -> bool:
        session = split.new_session()
        fed = 0
        for length, logits in enumerate(expected, start=_PROMPT):
            if length == drop_at:
                session.restart()
                fed = 0
            got = session.step_of_last(tokens[fed:length])
            fed = length
            if got.argmax() != logits.argmax() or not _is_close(got, logits, _GENERATE_TOLERANCE):
                return False
        return True

    def _true_length(self, length: int) -> int:
        """The length in the model at which happens what happens at `length` in the miniature."""
        for limit in self._limits:
            if length - limit.small in (0, 1):
                return limit.full + length - limit.small
        raise UnsupportedModelError(
            f"its generate() drops its cache at a length ({length}) that no"
            " key of its config explains"
        )


def _cuts(num_layers: int) -> list[tuple[int, ...]]:
    """Cuts to prove: one layer at each end alone, and one in the middle."""
    if num_layers < 3:
        return [tuple(range(1, num_layers))]
    middle = num_layers // 2
    return sorted({(1, num_layers - 1), (middle, middle + 1)})


def _is_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    largest = float(expected.abs().max())
    return float((got - expected).abs().max()) <= tolerance * largest


def _require_equal(got: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    if not torch.equal(got, expected):
        off = float((got - expected).abs().max())
        raise UnsupportedModelError(
            f"its stages do not give the logits of the whole model: off by {off:.2g} {where}"
        )
