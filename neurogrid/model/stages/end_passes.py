"""The embedding and the head of a model: its own passes, and for single tokens the part of them that matters.

A pass of the base model with all layers skipped makes a mask, rotary frequencies and a cache's answers that nobody
uses: of 60 us of a warm embedding, 4 are the embedding, and with the cold caches of a token that decodes it is 300.
So for one token a row we call only the modules that lead from what enters the pass to what comes out: a chain.

No family is known here. A chain is found by watching a pass, and taken only where it is proven for the weights and
the classes that are loaded:

- What one module returned is what the next was given: the same memory, not written to in between, and so from the
  pass's input to its result. A scale, a cap, or a position that is added between modules makes new memory or writes to
  the old. It is no chain then, whatever the numbers are, and the whole pass goes on being used.
- That holds, with the same modules, for one row and for several, and at every position and for every token id at which
  code of the model may take another branch: the ends of the range, and at and past each whole number that the config
  names; for hidden states that are not finite, too. A module may depend on its one argument alone: called again, after
  another pass of several tokens, it gives the bits that it gave.
- Chain and pass give equal bits with nobody watching.

Past the last position of the proof the whole pass is used.

What it costs, when the ends are loaded and when they are sped up: two whole products of the head, as two tokens take,
and 100 passes or so of few tokens in which 64 columns of that product are computed. What a linear layer makes of its
argument is its own and the same in both, so the proof is not about the other columns, nor about products of more rows.

Shape legend: B batch, T tokens, D hidden size, V vocabulary, R rows (of 1 token each).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from neurogrid.errors import ModelError
from neurogrid.model.caches.cache import StageCache
from neurogrid.model.files.model_code import MODEL_CODE_ERRORS
from neurogrid.model.stages.module_watch import Seen, Watch, narrow_products
from neurogrid.model.stages.skeleton import Skeleton

__all__ = ["EndPasses"]

# Longer sequences are rare, and the mask of each pass of the proof is as long.
_MAX_PROVEN_POSITIONS = 1 << 20
# For a config that names no longest sequence.
_USUAL_POSITIONS = 1 << 17
# What a config names beyond this many numbers takes too long to try one by one.
_MAX_NUMBERS = 500
# Tokens of the prompts that are put between the passes of the proof.
_PROMPT = 3
_SEED = 20_240_229

_Position: TypeAlias = int | Sequence[int]
_Pass: TypeAlias = Callable[[torch.Tensor, _Position], torch.Tensor]
_Probe: TypeAlias = tuple[torch.Tensor, _Position]


class EndPasses:
    """The ends of a skeleton, before the first layer and after the last, to be run in inference mode.

    Args:
        skeleton: loaded when a pass runs. `find_shortcuts` has to follow each change of its modules.

    Attributes:
        cache: answers for a session in passes in which no layer runs.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self.cache = StageCache(skeleton.config)
        self._embedding: _Chain | None = None
        self._head: _Chain | None = None
        text_config = skeleton.config.get_text_config(decoder=True)
        self._vocab_size: int = text_config.vocab_size
        named = getattr(text_config, "max_position_embeddings", None)
        num_positions = named if isinstance(named, int) and named > 0 else _USUAL_POSITIONS
        self._numbers = frozenset(_whole_numbers(skeleton.config.to_dict()))
        self._last_position = min(num_positions, _MAX_PROVEN_POSITIONS) - 1

    @property
    def shortcuts(self) -> frozenset[str]:
        """Names of the passes, "embedding" and "head", for which a chain is used."""
        chains = {"embedding": self._embedding, "head": self._head}
        return frozenset(name for name, chain in chains.items() if chain is not None)

    def embedding(self, input_ids_BT: torch.Tensor, position: _Position) -> torch.Tensor:
        """Return the hidden state that enters layer 0: [B, T, D].

        Args:
            position: of the first token; one for each row of a batch whose rows differ.
        """
        if self._embedding is not None and self._is_proven(input_ids_BT, position):
            return self._embedding(input_ids_BT)
        return self._whole_embedding(input_ids_BT, position)

    def embedded(self, embedded_BTE: torch.Tensor, position: int) -> torch.Tensor:
        """Return the hidden state that enters layer 0 for what the embedding's module returned: [B, T, D]."""
        self._pretend(position)
        return self._skeleton.run_embedded(embedded_BTE, position, self.cache)

    def head(self, hidden_BTD: torch.Tensor, position: _Position) -> torch.Tensor:
        """Logits [B, 1 or T, V], the last token's last; arguments as those of `embedding`."""
        # What is given as a view of something larger may be copied by the pass.
        if (
            self._head is not None
            and hidden_BTD.is_contiguous()
            and self._is_proven(hidden_BTD, position)
        ):
            return self._head(hidden_BTD)
        return self._whole_head(hidden_BTD, position)

    def head_of_all(self, hidden_BTD: torch.Tensor, position: int) -> torch.Tensor:
        """Logits [1, T, V] of all tokens."""
        self._pretend(position)
        return self._skeleton.run_head_of_all(hidden_BTD, position, self.cache)

    def norm(self, hidden_BTD: torch.Tensor, position: int) -> torch.Tensor:
        """Run what stands between the layers and the head, in most models the final norm: [1, T, D]."""
        self._pretend(position)
        return self._skeleton.run_norm(hidden_BTD, position, self.cache)

    def forget_shortcuts(self) -> None:
        """Run whole passes from now on."""
        self._embedding = self._head = None

    def find_shortcuts(self) -> None:
        """Prove anew for which passes a chain of modules can stand."""
        self.forget_shortcuts()
        if len(self._numbers) > _MAX_NUMBERS:
            return
        self._embedding = self._prove(self._whole_embedding, self._id_probes)
        self._head = self._prove(self._whole_head, self._hidden_probes)

    def _is_proven(self, given: torch.Tensor, position: _Position) -> bool:
        last = position if isinstance(position, int) else max(position)
        return given.shape[1] == 1 and last <= self._last_position

    def _whole_embedding(self, input_ids_BT: torch.Tensor, position: _Position) -> torch.Tensor:
        self._pretend(position)
        return self._skeleton.run_embedding(input_ids_BT, position, self.cache)

    def _whole_head(self, hidden_BTD: torch.Tensor, position: _Position) -> torch.Tensor:
        self._pretend(position)
        return self._skeleton.run_head(hidden_BTD, position, self.cache)

    def _pretend(self, position: _Position) -> None:
        self.cache.pretend(position if isinstance(position, int) else max(position))

    def _prove(self, whole: _Pass, probes: Callable[[], Iterator[_Probe]]) -> _Chain | None:
        try:
            # Only tensors made outside of inference mode count how often they were written to.
            with torch.inference_mode(False), torch.no_grad():
                chain = self._watch(whole, probes())
            if chain is None:
                return None
            given, position = next(probes())
            with torch.inference_mode():
                is_equal = _are_same_bits(chain(given), whole(given, position))
        except (*MODEL_CODE_ERRORS, ModelError):
            # A pass that fails fails again, and says so, where somebody wants its result.
            return None
        return chain if is_equal else None

    def _watch(self, whole: _Pass, probes: Iterator[_Probe]) -> _Chain | None:
        """The chain that all `probes` went through, None if there is none."""
        outside = self._skeleton.modules_outside()
        found: tuple[nn.Module, ...] | None = None
        with narrow_products(outside):
            for given, position in probes:
                with Watch(outside) as watch:
                    entered = Seen.now(given)
                    result = whole(given, position)
                    modules = watch.chain(entered, Seen.now(result))
                if not modules or found not in (None, modules):
                    return None
                found = modules
                # What a prompt's pass may leave in the modules is none of the next token's concern.
                whole(given[:1].repeat_interleave(_PROMPT, dim=1), 0)
                if not _are_same_bits(_Chain(modules, self._skeleton)(given), result):
                    return None
        return None if found is None else _Chain(found, self._skeleton)

    def _id_probes(self) -> Iterator[_Probe]:
        for token_ids, position in self._tokens_and_positions():
            yield torch.tensor(token_ids, device=self._skeleton.device)[:, None], position

    def _hidden_probes(self) -> Iterator[_Probe]:
        generator = torch.Generator().manual_seed(_SEED)
        size, dtype = self._skeleton.hidden_size, self._skeleton.dtype
        for token_ids, position in self._tokens_and_positions():
            hidden_R1D = torch.randn(len(token_ids), 1, size, generator=generator)
            yield hidden_R1D.to(self._skeleton.device, dtype), position
        # What some guard against.
        for extreme in (0.0, torch.finfo(dtype).max, math.inf, -math.inf, math.nan):
            yield torch.full((1, 1, size), extreme, dtype=dtype, device=self._skeleton.device), 0

    def _tokens_and_positions(self) -> Iterator[tuple[list[int], _Position]]:
        last = self._last_position
        named = {position for number in self._numbers for position in (number, number + 1)}
        positions = sorted(
            position for position in named | {0, 1, 7, last // 2, last} if 0 <= position <= last
        )
        generator = torch.Generator().manual_seed(_SEED)
        random_ids = torch.randint(0, self._vocab_size, (9,), generator=generator).tolist()
        named_ids = {number for number in self._numbers if 0 <= number < self._vocab_size}
        token_ids = [*random_ids[:4], *sorted(named_ids | {0, self._vocab_size - 1})]
        for i in range(max(len(positions), len(token_ids))):
            yield [token_ids[i % len(token_ids)]], positions[i % len(positions)]
        # As rows of several sessions: the ways that few_rows.py knows.
        yield random_ids[:1], [last // 3]
        yield random_ids[:2], [last, 0]
        yield random_ids[:3], [last // 2, 0, last]
        yield random_ids, [min(i, last) for i in range(len(random_ids))]


class _Chain:
    """Modules of a skeleton, each given what the one before returned."""

    __slots__ = ("_modules", "_restore")

    def __init__(self, modules: tuple[nn.Module, ...], skeleton: Skeleton) -> None:
        self._modules = modules
        has_state = any(True for module in modules for _ in module.buffers())
        self._restore = skeleton.restore if has_state else None

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        if self._restore is not None:
            self._restore()
        for module in self._modules:
            given = module(given)
        return given


def _are_same_bits(mine: torch.Tensor, its: torch.Tensor) -> bool:
    """Whether all is the same, the sign of zeros and what is not a number included."""
    return mine.dtype == its.dtype and torch.equal(_bits(mine), _bits(its))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _whole_numbers(value: object) -> Iterator[int]:
    """All that stand anywhere in a config."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _whole_numbers(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _whole_numbers(each)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
