"""The embedded model: complete, small, loaded from the package alone, and readable."""

import random
import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from neurogrid.model.embedded import embedded_model_path
from tools.embedded.corpus import Section, prose_paragraphs, python_prose
from tools.embedded.train import Recipe, generate_text, rows, train

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "TRAINING.md",
)
MAX_BYTES = 12_000_000
NUM_LAYERS = 8
PROMPTS = ("Python is", "The import statement")
WORD = re.compile(r"[A-Za-z]+")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(embedded_model_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(embedded_model_path(), local_files_only=True)


def test_the_files_are_there_and_small() -> None:
    folder = embedded_model_path()
    assert [name for name in FILES if not (folder / name).is_file()] == []
    assert sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) < MAX_BYTES


def test_the_weights_are_bfloat16_and_the_head_is_the_embedding() -> None:
    with safe_open(embedded_model_path() / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
        dtypes = {weights.get_tensor(name).dtype for name in names}
    assert dtypes == {torch.bfloat16}
    assert "lm_head.weight" not in names
    layers = {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}
    assert layers == set(range(NUM_LAYERS))


@pytest.mark.parametrize(
    "text",
    [
        "Python is",
        " a space before,  two within, one after ",
        "def f(x):\n\treturn x  # tabs and newlines\n\n",
        "don't 'quote' .  Nor , these !",
        "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve \N{SNOWMAN} \N{GRINNING FACE} \u65e5\u672c",
        "",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    token_ids = tokenizer(text)["input_ids"]
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in token_ids[1:]
    assert tokenizer.eos_token_id not in token_ids
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
    assert tokenizer.decode(token_ids[1:]) == text


def test_config_generation_config_and_tokenizer_agree(
    tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM
) -> None:
    assert len(tokenizer) == model.config.vocab_size
    for known in (model.config, model.generation_config):
        assert known.bos_token_id == tokenizer.bos_token_id == 0
        assert known.eos_token_id == tokenizer.eos_token_id == 1


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_readable(
    tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM, prompt: str
) -> None:
    assert model.dtype == torch.bfloat16
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=60, do_sample=False)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    continuation = text.removeprefix(prompt)
    assert text.startswith(prompt)
    words = [word.lower() for word in WORD.findall(continuation)]
    assert len(words) >= 20, text
    known = {word.lower() for topic in topics.values() for word in WORD.findall(topic)}
    assert sum(word in known for word in words) >= 0.95 * len(words), text
    # A loop says few different things: of the runs of four words at least nine in ten are new.
    runs = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    assert len(set(runs)) >= 0.9 * len(runs), text


def test_prose_leaves_out_what_is_no_prose() -> None:
    body = """
The "with" statement wraps the execution of a *block* with methods
defined by a context manager [1].  The syntax is as follows:

   with_stmt ::= "with" expression

The following code:

   with EXPRESSION as TARGET:
       SUITE

Two rules hold:

* the expression is evaluated to obtain a context manager,

* the suite of the statement is executed.

New in version 3.1: Support for several items.
"""
    assert prose_paragraphs(body) == [
        "The with statement wraps the execution of a block with methods defined by a context"
        " manager.",
        "Two rules hold: the expression is evaluated to obtain a context manager; the suite of the"
        " statement is executed.",
    ]


def test_no_paragraph_of_the_reference_is_used_twice() -> None:
    paragraphs = [text for section in python_prose() for text in section.paragraphs]
    assert len(paragraphs) > 500
    assert len(set(paragraphs)) == len(paragraphs)


def test_rows_hold_documents_that_begin_and_end(tokenizer: PreTrainedTokenizerFast) -> None:
    sections = [
        Section("one", ("The first sentence. A second one.", "Another paragraph.")),
        Section("two", ("Nothing but this.",)),
    ]
    recipe = Recipe(row_tokens=500, mid_entry_probability=1.0)
    text = tokenizer.decode(next(rows(sections, tokenizer, recipe, random.Random(0))))
    known = {
        "The first sentence. A second one.\n\nAnother paragraph.</s>",
        "Nothing but this.</s>",
        "A second one.\n\nAnother paragraph.</s>",
        "The first sentence.",
        "Another paragraph.</s>",
        "The first sentence. A second one.",
    }
    assert set(text.split("<s>")[1:-1]) == known


def test_the_same_seed_trains_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = python_prose()[:40]
    monkeypatch.setattr("tools.embedded.train.python_prose", lambda: sections)
    recipe = Recipe(steps=2, batch_rows=1, row_tokens=32, vocab_size=300)
    weights = []
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        out = tmp_path / name
        train(recipe, out=out, seed=seed, precision=torch.float32, save_every=0)
        weights.append((out / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
    assert generate_text(tmp_path / "first", "Python", max_tokens=3).startswith("Python")


def test_the_path_is_within_the_package() -> None:
    import neurogrid

    assert embedded_model_path().is_relative_to(Path(neurogrid.__file__).parent)
