"""Trains the embedded model: ``python -m tools.embedded.train --out DIR``.

A byte-level BPE tokenizer and a Llama with tied embeddings, both trained from nothing on the prose
of Python's language reference (corpus.py), on one CPU thread, in well under an hour. Knows nothing
of the rest of NeuroGrid; what it writes is an ordinary checkpoint folder.

Strategy: whole sections as documents, ``<s> ... </s>``, so that the model learns to stop; in every
epoch half of them are entered at some sentence, so that any sentence may follow ``<s>``. Documents
are shuffled and packed into rows. The text is small enough to be known nearly by heart, and that
is wanted: a demonstration has to be readable. Some sections are held out, so that the loss on
them says how much of it is memory.

The same seed, versions and processor give the same weights; another processor rounds otherwise.

Shapes: B rows in a batch, T tokens in a row.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from tools.embedded.corpus import Section, python_prose

__all__ = [
    "Recipe",
    "generate_text",
    "main",
    "model_config",
    "rows",
    "split_sections",
    "train",
    "train_tokenizer",
]

BOS, EOS = "<s>", "</s>"
PARAGRAPH_BREAK = "\n\n"
# The model continues texts, and was trained on no conversation: one is a document here, its messages are paragraphs.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)
SENTENCE_START = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
IGNORED = -100  # what torch's cross entropy leaves out
PROMPTS = (
    "Python is",
    "The import statement",
    "A function definition",
    "Exceptions are a means of",
)


@dataclass(frozen=True)
class Recipe:
    """What the training run depends on, apart from the text and the seed."""

    steps: int = 1800
    batch_rows: int = 2
    row_tokens: int = 1024
    peak_learning_rate: float = 2e-3
    final_learning_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    gradient_norm: float = 1.0
    dropout: float = 0.1
    # How often a section is entered at a sentence after its first.
    mid_entry_probability: float = 0.5
    # One section in this many is held out.
    validation_every: int = 20
    vocab_size: int = 4096


def split_sections(sections: Sequence[Section], every: int) -> tuple[list[Section], list[Section]]:
    """The sections to train on and those held out: one in ``every``, evenly through the topics."""
    # From the sixth on: so the sections that the demonstration's prompts come from are learned.
    held_out = list(sections[5::every])
    return [section for section in sections if section not in held_out], held_out


def train_tokenizer(
    sections: Sequence[Section], vocab_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE that puts ``<s>`` in front of a text and decodes back to exactly that text.

    No byte is unknown to it: the 256 bytes are in the vocabulary whatever the text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document_text(section) for section in sections), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=max_length,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def model_config(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> LlamaConfig:
    """The shape of the model: 8 layers of 192, about 3.6 million parameters."""
    return LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=recipe.row_tokens,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def document_text(section: Section) -> str:
    """The paragraphs of a section with a blank line between them."""
    return PARAGRAPH_BREAK.join(section.paragraphs)


def rows(
    sections: Sequence[Section],
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    rng: random.Random,
) -> Iterator[list[int]]:
    """Rows of ``row_tokens + 1`` token ids without end: documents shuffled anew in every epoch."""
    pending: list[int] = []
    while True:
        for section in rng.sample(list(sections), len(sections)):
            text = document_text(section)
            cut = 0
            if rng.random() < recipe.mid_entry_probability:
                cut = rng.choice([0, *(match.end() for match in SENTENCE_START.finditer(text))])
            pending += document_tokens(text[cut:], tokenizer)
            if cut:
                # What stands before the entry follows as a document of its own that has no end.
                pending += document_tokens(text[:cut].rstrip(), tokenizer)[:-1]
            while len(pending) > recipe.row_tokens:
                yield pending[: recipe.row_tokens + 1]
                pending = pending[recipe.row_tokens :]


def document_tokens(text: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    token_ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return [*token_ids, tokenizer.eos_token_id]


def loss_of(model: LlamaForCausalLM, batch_BT: torch.Tensor, bos: int) -> torch.Tensor:
    """Mean cross entropy in nats of each next token; ``<s>`` is given, never predicted."""
    logits_BTV = model(input_ids=batch_BT[:, :-1], use_cache=False).logits
    targets_BT = batch_BT[:, 1:].masked_fill(batch_BT[:, 1:] == bos, IGNORED)
    return torch.nn.functional.cross_entropy(
        logits_BTV.float().flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED
    )


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM,
    sections: Sequence[Section],
    tokenizer: PreTrainedTokenizerFast,
    max_tokens: int,
) -> float:
    """Mean loss in nats per token over whole sections, each cut off at ``max_tokens``."""
    model.train(False)
    total, num_tokens = 0.0, 0
    for section in sections:
        token_ids = document_tokens(document_text(section), tokenizer)[: max_tokens + 1]
        loss = loss_of(model, torch.tensor([token_ids]), tokenizer.bos_token_id)
        total += loss.item() * (len(token_ids) - 1)
        num_tokens += len(token_ids) - 1
    model.train()
    return total / num_tokens


def add_dropout(model: LlamaForCausalLM, probability: float) -> None:
    """Drops elements of what the embedding and every block add to the residual stream, while the
    model trains. Llama has no such thing of its own; the checkpoint does not know of it."""

    def drop(module: torch.nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, probability, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then half a cosine down to the final rate."""
    if step < recipe.warmup_steps:
        return recipe.peak_learning_rate * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    span = recipe.peak_learning_rate - recipe.final_learning_rate
    return recipe.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))


def new_optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' scales alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    scales = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=recipe.peak_learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )


def train(recipe: Recipe, *, out: Path, seed: int, precision: torch.dtype, save_every: int) -> None:
    """Trains from nothing and writes the checkpoint to ``out``, also every ``save_every`` steps.

    ``precision`` is what matrix products are computed in; weights and optimizer stay in float32
    and are saved in bfloat16.
    """
    torch.manual_seed(seed)
    sections = python_prose()
    training, held_out = split_sections(sections, recipe.validation_every)
    tokenizer = train_tokenizer(training, recipe.vocab_size, recipe.row_tokens)
    model = LlamaForCausalLM(model_config(tokenizer, recipe))
    add_dropout(model, recipe.dropout)
    optimizer = new_optimizer(model, recipe)
    num_bytes, num_tokens = text_size(training, tokenizer)
    held_out_bytes, held_out_tokens = text_size(held_out, tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    print(f"training text: {num_bytes:,} bytes, {num_tokens:,} tokens, {len(training)} sections")
    print(
        f"held out: {held_out_bytes:,} bytes, {held_out_tokens:,} tokens, {len(held_out)} sections"
    )

    source = rows(training, tokenizer, recipe, random.Random(seed))
    model.train()
    recent: list[float] = []
    started = time.monotonic()
    for step in range(recipe.steps):
        batch_BT = torch.tensor([next(source) for _ in range(recipe.batch_rows)])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        with autocast(precision):
            loss = loss_of(model, batch_BT, tokenizer.bos_token_id)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        done = step + 1
        if done % 50 == 0 or done == recipe.steps:
            seconds = time.monotonic() - started
            rate = done * recipe.batch_rows * recipe.row_tokens / seconds
            print(
                f"step {done}/{recipe.steps}  training loss {sum(recent) / len(recent):.3f}"
                f"  {rate:,.0f} tokens/s  {seconds:,.0f} s",
                flush=True,
            )
            recent.clear()
        if done == recipe.steps or (save_every and done % save_every == 0):
            validation = held_out_loss(model, held_out, tokenizer, recipe.row_tokens)
            print(f"step {done}/{recipe.steps}  held-out loss {validation:.3f}", flush=True)
            save(model, tokenizer, out)


def autocast(precision: torch.dtype) -> contextlib.AbstractContextManager[object]:
    if precision == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast("cpu", precision)


def text_size(sections: Sequence[Section], tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """Bytes and tokens of the sections, ``<s>`` and ``</s>`` counted."""
    texts = [document_text(section) for section in sections]
    num_tokens = sum(len(document_tokens(text, tokenizer)) for text in texts)
    return sum(len(text.encode()) for text in texts), num_tokens


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes config, weights in bfloat16 and tokenizer as one checkpoint folder."""
    out.mkdir(parents=True, exist_ok=True)
    rounded = LlamaForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.bfloat16()
    rounded.generation_config = generation_config(tokenizer)
    rounded.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner alone; a package is for everyone


def generation_config(
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
) -> GenerationConfig:
    """Where to stop, and for a sample (a temperature above 0) how to draw."""
    entries: dict[str, object] = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if max_new_tokens is not None:
        entries["max_new_tokens"] = max_new_tokens
    if temperature > 0:
        entries |= {"do_sample": True, "temperature": temperature, "top_k": top_k}
    return GenerationConfig(**entries)


@torch.no_grad()
def generate_text(
    path: Path, prompt: str, *, max_tokens: int, temperature: float = 0.0, seed: int = 0
) -> str:
    """Prompt and continuation by the checkpoint at ``path`` in bfloat16; greedy at temperature 0,
    otherwise sampled among the 40 most likely."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    # Not typed: to transformers' own annotation of `generate` this is no model that generates.
    model: Any = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True)
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    config = generation_config(
        tokenizer, max_new_tokens=max_tokens, temperature=temperature, top_k=40
    )
    output = model.generate(**inputs, generation_config=config)
    text: str = tokenizer.decode(output[0], skip_special_tokens=True)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, saves, and prints what the model makes of a few prompts."""
    defaults = Recipe()
    parser = argparse.ArgumentParser(prog="python -m tools.embedded.train")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more of them are not reproducible")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS")
    parser.add_argument(
        "--precision",
        choices=["float32", "bfloat16"],
        default="bfloat16",
        help="of matrix products; float32 is faster where the processor has no bfloat16",
    )
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    recipe = Recipe(steps=arguments.steps)
    train(
        recipe,
        out=arguments.out,
        seed=arguments.seed,
        precision=getattr(torch, arguments.precision),
        save_every=arguments.save_every,
    )
    for prompt in PROMPTS:
        print(f"\n--- greedy: {generate_text(arguments.out, prompt, max_tokens=80)}")
        sampled = generate_text(arguments.out, prompt, max_tokens=80, temperature=0.8)
        print(f"\n--- temperature 0.8, top-k 40: {sampled}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
