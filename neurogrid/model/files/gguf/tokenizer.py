"""The tokenizer that a GGUF file describes, made by transformers' own builders from keys that are checked here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.gguf.metadata import Metadata
from neurogrid.model.files.model_code import one_line, quiet_transformers

__all__ = ["end_tokens", "make_tokenizer"]

_PREFIX: Final = "tokenizer.ggml."
# The format's numbers of kinds of tokens.
_NORMAL: Final = 1
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
# What ends a turn, where the file has no key for it: llama.cpp knows these by their text, whatever kind is in the file.
_TURN_ENDS: Final = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
        *("<EOT>", "<|end_of_text|>"),
    }
)
# How text is split before it becomes tokens, beside the ways that transformers' builders know by name.
_FIRST_SPLIT: Final = "gpt-2"
# Ways of which llama.cpp knows besides: what is a token needs no merges, and texts begin with the first token unless a
# key says otherwise.
_WHOLE_WORDS: Final = frozenset(
    {
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "jina-v5-nano", "tekken"),
    }
)
_MODELS: Final = ("gpt2", "llama")
# Roles of tokens that nothing here puts into a text.
_NEVER_ADDED: Final = frozenset({"unk_token", "pad_token"})
# Families whose builders put no space before a text, or put one whatever the key says, as their own tokenizers do.
_OWN_SPACES: Final = frozenset({"gemma2", "gemma3", "phi3"})
# A family whose added tokens take the white space behind them along, which no key says; and those that do not.
_STRIPPING: Final = "phi3"
_NOT_STRIPPING: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def end_tokens(metadata: Metadata) -> list[int]:
    """The ids of which any one ends a text, sorted."""
    tokens = metadata.texts(f"{_PREFIX}tokens")
    names = ("eos", "eot", "eom")
    keys = [f"{_PREFIX}{name}_token_id" for name in names]
    ends = {metadata.count(key) for key in keys if key in metadata}
    ends |= {number for number, token in enumerate(tokens) if token in _TURN_ENDS}
    return sorted(number for number in ends if number < len(tokens) or not tokens)


def make_tokenizer(metadata: Metadata) -> PreTrainedTokenizerBase:
    """The tokenizer.

    Raises:
        CheckpointError: the file has none, or one whose keys do not belong together.
        UnsupportedModelError: it is of a kind that is not read, or that this transformers does not know.
    """
    where = metadata.where
    tokens = metadata.texts(f"{_PREFIX}tokens")
    if not tokens:
        raise CheckpointError(f"{where}: no tokenizer in it; convert the model anew")
    if len(set(tokens)) < len(tokens):
        raise CheckpointError(f"{where}: a token stands twice among its tokens")
    model, split = metadata.text(f"{_PREFIX}model"), metadata.text(f"{_PREFIX}pre", "")
    if model not in _MODELS:
        raise UnsupportedModelError(
            f"{where}: a tokenizer of the kind {model[:40]!r}; read are {' and '.join(_MODELS)}"
        )
    given: dict[str, Any] = {"tokenizer_type": model, "pre_tokenizer_type": split, "tokens": tokens}
    for name, found in (
        ("scores", metadata.numbers(f"{_PREFIX}scores")),
        ("token_type", metadata.counts(f"{_PREFIX}token_type")),
    ):
        if found and len(found) != len(tokens):
            raise CheckpointError(f"{where}: {len(tokens)} tokens, and {len(found)} {name}")
        if found:
            given[name] = found
    kinds = given.get("token_type", (_NORMAL,) * len(tokens))
    given["token_type"] = tuple(
        _CONTROL if token in _TURN_ENDS else kind for token, kind in zip(tokens, kinds, strict=True)
    )
    if merges := metadata.texts(f"{_PREFIX}merges"):
        given["merges"] = merges
    elif model == "gpt2" or "scores" not in given:
        raise CheckpointError(f"{where}: neither merges nor scores of its tokens are there")
    is_spaced = metadata.flag(f"{_PREFIX}add_space_prefix", True)
    if model == "llama" and not is_spaced and metadata.architecture not in _OWN_SPACES:
        raise UnsupportedModelError(
            f"{where}: its tokenizer puts no space before a text, which is not read of {metadata.architecture}"
        )
    adds_bos = model == "llama" or split in _WHOLE_WORDS
    kinds = given["token_type"]
    special: dict[str, Any] = {
        "add_bos_token": metadata.flag(f"{_PREFIX}add_bos_token", adds_bos),
        "add_eos_token": metadata.flag(f"{_PREFIX}add_eos_token", False),
    }
    for role, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        token_id = metadata.count(_PREFIX + key, len(tokens))
        # A token of a text is no other one for being named as that which fills up: it would be left out of texts.
        is_text = role in _NEVER_ADDED and token_id < len(tokens) and kinds[token_id] == _NORMAL
        special[role] = tokens[token_id] if token_id < len(tokens) and not is_text else None
    for name in ("bos", "eos"):
        key = f"{_PREFIX}add_{name}_token"
        if special[f"{name}_token"] is None and metadata.flag(key, False):
            raise CheckpointError(
                f"{where}: {key} is true, and {name}_token_id is no token of it; convert the model anew"
            )
    if template := metadata.text("tokenizer.chat_template", ""):
        special["chat_template"] = template
    return _built(metadata.architecture, given, special, where)


def _built(
    architecture: str, given: dict[str, Any], special: dict[str, Any], where: str
) -> PreTrainedTokenizerBase:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS,
            convert_gguf_tokenizer,
        )
    except ImportError as exc:
        raise UnsupportedModelError(
            f"{where}: this transformers makes no tokenizers of GGUF: pip install --upgrade transformers"
        ) from exc
    split = given["pre_tokenizer_type"]
    known = {_FIRST_SPLIT, *GGUF_PRE_TOKENIZER_SPLITS}
    if given["tokenizer_type"] == "gpt2" and split not in known:
        raise UnsupportedModelError(
            f"{where}: its tokenizer splits text as {split[:40]!r}, which is not known here"
        )
    try:
        with quiet_transformers():
            backend, _ = convert_gguf_tokenizer(architecture, given)
            backend = _with_added_tokens(backend, architecture, given)
            if given["tokenizer_type"] == "llama" and architecture not in _OWN_SPACES:
                # Behind an added token, too: so llama.cpp reads add_space_prefix, and so the models have learned it.
                backend.pre_tokenizer = pre_tokenizers.Metaspace(
                    prepend_scheme="always", split=False
                )
            if given["tokenizer_type"] == "gpt2":
                backend.model.ignore_merges = split in _WHOLE_WORDS
            return PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    except Exception as exc:
        # As broad as this because tokenizers raises bare Exception for what it does not like.
        raise CheckpointError(f"{where}: no tokenizer can be made of it: {one_line(exc)}") from exc


def _with_added_tokens(
    backend: Tokenizer, architecture: str, given: Mapping[str, Any]
) -> Tokenizer:
    """The tokenizer with the added tokens of the file under their ids there, and with no others.

    The builders add some of their own families behind the last id, where a file has none of that text. They leave out
    those that an alphabet of bytes does not have, as DeepSeek's with their wide bars: no text would be one of them.
    """
    tokens, is_spelled = given["tokens"], given["tokenizer_type"] == "gpt2"
    found = backend.get_added_tokens_decoder()
    added = {number: token for number, token in found.items() if number < len(tokens)}
    lacking = {
        number: AddedToken(token, normalized=False, special=kind == _CONTROL)
        for number, (token, kind) in enumerate(zip(tokens, given["token_type"], strict=True))
        if is_spelled and kind in (_CONTROL, _USER_DEFINED) and number not in added
    }
    strips = architecture == _STRIPPING and not is_spelled
    if strips:
        added = {number: _stripping(token) for number, token in added.items()}
    elif not lacking and len(added) == len(found):
        return backend
    model = backend.model
    if lacking:
        vocab = backend.get_vocab(with_added_tokens=False)
        names = {number: name for name, number in vocab.items()}
        names |= {number: token.content for number, token in lacking.items()}
        model = models.BPE(
            vocab={name: number for number, name in names.items()},
            merges=[tuple(merge.split(" ")) for merge in given["merges"]],
            continuing_subword_prefix="",
            end_of_word_suffix="",
        )
    made = Tokenizer(model)
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        if (taken := getattr(backend, part)) is not None:
            setattr(made, part, taken)
    made.add_tokens([token for _, token in sorted((added | lacking).items())])
    return made


def _stripping(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.content not in _NOT_STRIPPING,
        normalized=token.normalized,
        special=token.special,
    )
