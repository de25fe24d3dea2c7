"""What does a grammar cost: to compile a schema, and for each token, by library and vocabulary?

    python benchmarks/grammars.py

Each library that is installed compiles the schemas of `tests/answer_schemas.py`, and goes through an answer to each
that was written beforehand under llguidance's grammar, token by token: it says what may come next, and takes the token.
The tokenizers are byte-level BPE, trained here on Python sources to so many tokens.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import importlib.metadata
import importlib.util
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from report import table, write_report
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))

from neurogrid.model.grammars.grammar_text import GrammarText
from tests.answer_schemas import answer_schemas

END = "</s>"
# A schema that takes longer is counted as one that the library cannot do.
MAX_SECONDS = 30
MAX_ANSWER = 300

Steps = tuple[Callable[[], Any], Callable[[int], Any]]  # what may come next; go on by a token


class TooLongError(Exception):
    """A schema takes longer than MAX_SECONDS."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def raise_error(*_: object) -> None:
        raise TooLongError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, raise_error)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def trained(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of so many tokens, of the sources that are installed."""
    kept = Path(tempfile.gettempdir()) / f"neurogrid-grammars-{vocab_size}.json"
    if not kept.exists():
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        roots = [Path(json.__file__).parents[1], Path(torch.__file__).parents[1]]
        files = sorted({path for root in roots for path in root.rglob("*.py")})
        random.Random(0).shuffle(files)
        texts = (path.read_text(errors="ignore")[:100_000] for path in files[:2000])
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        backend.save(str(kept))
    return PreTrainedTokenizerFast(tokenizer_file=str(kept), eos_token=END)


class LLGuidance:
    """llguidance as neurogrid uses it."""

    package, requires = "llguidance", "llguidance"

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        import llguidance

        self._matcher = llguidance.LLMatcher
        self._own = llguidance.LLTokenizer(
            tokenizer.backend_tokenizer.to_str(),
            n_vocab=len(tokenizer),
            eos_token=tokenizer.eos_token_id,
        )

    def compile(self, schema: dict[str, Any]) -> Callable[[], Steps]:
        grammar = GrammarText()
        grammar.rule("start", grammar.schema(schema))
        whole = self._matcher(self._own, grammar.text, log_level=0)
        if whole.is_error():
            raise ValueError(whole.get_error())

        def begin() -> Steps:
            matcher = whole.deep_copy()
            return matcher.compute_logit_bias, matcher.consume_token

        return begin


class XGrammar:
    package, requires = "xgrammar", "xgrammar"

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        import xgrammar

        self._library, self._size = xgrammar, len(tokenizer)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: dict[str, Any]) -> Callable[[], Steps]:
        compiled = self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)

        def begin() -> Steps:
            matcher = self._library.GrammarMatcher(compiled)
            mask = self._library.allocate_token_bitmask(1, self._size)
            return lambda: matcher.fill_next_token_bitmask(mask), matcher.accept_token

        return begin


class OutlinesCore:
    package, requires = "outlines-core", "outlines_core"

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        import outlines_core
        from outlines_core.json_schema import build_regex_from_schema

        self._library, self._regex = outlines_core, build_regex_from_schema
        texts: dict[bytes, list[int]] = {}
        alphabet = {char: byte for byte, char in _byte_alphabet().items()}
        for token, token_id in tokenizer.get_vocab().items():
            if token_id != tokenizer.eos_token_id:
                texts[bytes(alphabet[char] for char in token)] = [token_id]
        self._vocabulary = outlines_core.Vocabulary(tokenizer.eos_token_id, texts)

    def compile(self, schema: dict[str, Any]) -> Callable[[], Steps]:
        index = self._library.Index(self._regex(json.dumps(schema)), self._vocabulary)

        def begin() -> Steps:
            guide = self._library.Guide(index)
            return guide.get_tokens, guide.advance

        return begin


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's: what byte-level tokenizers write bytes as."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {
        byte: chr(256 + at) for at, byte in enumerate(others)
    }


def written(
    library: LLGuidance,
    tokenizer: PreTrainedTokenizerFast,
    schema: Any,
    closing_V: torch.Tensor,
) -> list[int]:
    """An answer by chance that fits: often what closes something, where that may be."""
    chance = random.Random(json.dumps(schema))
    allowed, advance = library.compile(schema)()
    tokens: list[int] = []
    while len(tokens) < MAX_ANSWER:
        mask_V = torch.frombuffer(bytearray(allowed()), dtype=torch.uint8) > 0
        if mask_V[tokenizer.eos_token_id]:
            break
        closing = (mask_V & closing_V).nonzero().flatten()
        ids = closing if len(closing) and chance.random() < 0.4 else mask_V.nonzero().flatten()
        tokens.append(int(ids[chance.randrange(len(ids))]))
        advance(tokens[-1])
    # As the model would write it, not as chance cut it.
    return tokenizer.encode(tokenizer.decode(tokens), add_special_tokens=False)


def measured(
    kind: Any, tokenizer: PreTrainedTokenizerFast, answers: list[tuple[Any, list[int]]]
) -> list[str]:
    begin = time.process_time()
    library = kind(tokenizer)
    own_seconds = time.process_time() - begin
    compiled, masks, steps, firsts, num_wrong, num_differ = [], [], [], [], 0, 0
    for schema, tokens in answers:
        begin = time.process_time()
        try:
            with at_most(MAX_SECONDS):
                start = library.compile(schema)
        except Exception as exc:  # noqa: BLE001 - whatever a library raises
            num_wrong += 1
            print(kind.package, str(exc)[:120].replace("\n", " "), json.dumps(schema)[:100])
            continue
        compiled.append(time.process_time() - begin)
        allowed, advance = start()
        for number, token_id in enumerate(tokens):
            begin = time.process_time()
            allowed()
            middle = time.process_time()
            (masks if number else firsts).append(middle - begin)
            try:
                is_taken = advance(token_id)
            except ValueError:
                is_taken = False
            steps.append(time.process_time() - middle)
            if is_taken is False:  # another way of setting JSON, or another reading of the schema
                num_differ += 1
                break
    compiled.sort()
    masks.sort()
    steps.sort()

    def at(values: list[float], part: float, scale: float) -> str:
        return f"{values[min(int(part * len(values)), len(values) - 1)] * scale:.2f}"

    return [
        kind.package,
        f"{len(tokenizer):,}",
        f"{own_seconds:.2f}",
        str(num_wrong),
        str(num_differ),
        at(compiled, 0.5, 1e3),
        at(compiled, 1, 1e3),
        at(masks, 0.5, 1e6),
        at(masks, 0.99, 1e6),
        at(masks, 1, 1e6),
        at(steps, 0.5, 1e6),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--vocab", type=int, nargs="+", default=[50_000, 150_000])
    parser.add_argument(
        "--libraries", nargs="+", default=["llguidance", "xgrammar", "outlines-core"]
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [
        kind
        for kind in (LLGuidance, XGrammar, OutlinesCore)
        if kind.package in options.libraries and importlib.util.find_spec(kind.requires)
    ]
    rows = []
    for vocab_size in options.vocab:
        tokenizer = trained(vocab_size)
        own = LLGuidance(tokenizer)
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        closing_V = torch.tensor([token[:1] in '"}],' for token in tokens])
        schemas = answer_schemas(options.schemas)
        answers = [(schema, written(own, tokenizer, schema, closing_V)) for schema in schemas]
        print(f"{sum(len(tokens) for _, tokens in answers):,} tokens", flush=True)
        for kind in kinds:
            rows.append(measured(kind, tokenizer, answers))
            print(rows[-1], flush=True)
    versions = ", ".join(
        f"{kind.package} {importlib.metadata.version(kind.package)}" for kind in kinds
    )
    write_report(
        "grammars",
        f"What does a grammar cost, by library and vocabulary? {options.schemas} schemas (tests/answer_schemas.py), an "
        f"answer of up to {MAX_ANSWER} tokens to each, one thread; "
        f"processor time, as the machine had other work. {versions}.",
        table(
            [
                "library",
                "tokens",
                "tokenizer, s",
                "schemas refused",
                "answers not taken",
                "compile, ms: median",
                "most",
                "mask, us: median",
                "99 %",
                "most",
                "step, us: median",
            ],
            rows,
        )
        + "\n\nRefused: the library says that it cannot do the schema, or takes longer than "
        f"{MAX_SECONDS} s. Not taken: it would have the JSON set otherwise, or reads the schema otherwise; its figures "
        "are those up to there. The first mask of an answer is left out of the masks.",
    )


if __name__ == "__main__":
    main()
