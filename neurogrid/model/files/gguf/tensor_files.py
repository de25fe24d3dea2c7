"""The tensors of a model in GGUF, as a checkpoint of transformers has them: names, shapes and orders of rows.

Blocks become codes layer by layer, when a layer is asked for. What travels is what a quantised checkpoint of another
format gives, so workers know nothing of GGUF.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedTokenizerBase

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.blob import CodedMatrix, LayerContents, MadeTensor, tensor_of
from neurogrid.model.files.gguf.architectures import (
    EMBEDDING,
    HEAD,
    NORM,
    Change,
    Place,
    layer_tensors,
)
from neurogrid.model.files.gguf.block_types import BlockType
from neurogrid.model.files.gguf.blocks import codes_of_blocks, form_of_blocks
from neurogrid.model.files.gguf.configs import config_of
from neurogrid.model.files.gguf.model_files import GgufModel, open_model
from neurogrid.model.files.gguf.tokenizer import end_tokens, make_tokenizer
from neurogrid.model.files.quantization import parts_of
from neurogrid.model.files.safetensors_header import TensorEntry
from neurogrid.model.kernels import Codes
from neurogrid.model.unused_memory import let_go_pages

__all__ = ["GgufFiles"]

_END_NAMES: Final = {
    EMBEDDING: "model.embed_tokens.weight",
    NORM: "model.norm.weight",
    HEAD: "lm_head.weight",
}
_DTYPES: Final = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor, or the matrix of one expert: its bytes in the file.

    Attributes:
        order: of the rows as transformers has them, by their numbers here; None for the same.
    """

    type: BlockType
    shape: tuple[int, ...]
    data: memoryview
    order: torch.Tensor | None = None

    @property
    def entry(self) -> TensorEntry:
        """Entry that safetensors would have of it; only tensors of a plain type have one."""
        return TensorEntry(self.type.name, self.shape, 0, self.data.nbytes)

    def plain(self) -> torch.Tensor:
        """The tensor, of a plain type."""
        tensor = tensor_of(self.entry, self.data)
        return tensor if self.order is None else tensor[self.order]

    def less_one(self) -> torch.Tensor:
        """The tensor in float32, less 1."""
        return self.plain().float() - 1

    def codes(self) -> Codes:
        """The matrix, of blocks."""
        num_bytes = self.data.nbytes
        raw = tensor_of(
            TensorEntry("U8", (self.shape[0], num_bytes // self.shape[0]), 0, num_bytes), self.data
        )
        codes, order = codes_of_blocks(self.type, raw), self.order
        if order is None:
            return codes
        minimums = None if codes.minimums is None else codes.minimums[order]
        return Codes(
            codes.bits,
            codes.codes[order],
            codes.scales[order],
            codes.num_inputs,
            minimums,
            codes.table,
        )

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix, of blocks.

        Args:
            name: for errors.

        Raises:
            CheckpointError: a scale is not finite.
        """
        codes = self.codes()
        return form_of_blocks(self.type).read(parts_of(codes), name).dense(dtype)


class GgufFiles:
    """The files of one model in GGUF. Made by `open`; a `TensorFiles`.

    Attributes:
        config: what config.json would be.
        generation_config: what generation_config.json would be: the tokens that end a text.
        files: of the model.
        present_layers: all of them.
        quantised_as: the types of blocks that its layers have; None for none.
        has_codes: whether matrices of the layers are served as the codes that they are.
    """

    def __init__(self, model: GgufModel, config: dict[str, object]) -> None:
        self._model = model
        self._num_heads = {
            Change.QUERY: config["num_attention_heads"],
            Change.KEY: config["num_key_value_heads"],
        }
        self._layers: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for layer_id, name, whole in layer_tensors(model.tensors):
            self._layers[layer_id].append((name, whole))
        infos = [model.tensors[whole] for _, _, whole in layer_tensors(model.tensors)]
        blocks = sorted({info.type.name for info in infos if not info.type.is_plain})
        self.files = frozenset(model.files.values())
        self.present_layers = frozenset(self._layers)
        self.quantised_as = f"GGUF: {', '.join(blocks)}" if blocks else None
        self.has_codes = any(self.layer(layer_id).matrices for layer_id in self._layers)
        sizes: Counter[str] = Counter()
        for info in infos:
            sizes[info.type.name] += prod(info.shape)
        # Of blocks nothing is rounded in float32; of plain numbers they decide themselves.
        dtype = "float32" if blocks else _DTYPES[sizes.most_common(1)[0][0]]
        self.config = {**config, "dtype": dtype}
        ends = end_tokens(model.metadata)
        self.generation_config: dict[str, object] = {"eos_token_id": ends} if ends else {}

    @classmethod
    def open(cls, files: list[Path]) -> GgufFiles:
        """Read the headers of the files.

        Raises:
            CheckpointError: a file is truncated or corrupt, or lacks something.
            UnsupportedModelError: an architecture, a type of tensors or a setting that is not read.
        """
        model = open_model(files)

        def factors(name: str) -> Sequence[float]:
            found: list[float] = _plain_piece(model, name).plain().float().tolist()
            return found

        return cls(model, config_of(model.metadata, model.tensors, factors))

    def layer(self, layer_id: int) -> LayerContents:
        """Tensors of a layer. Matrices of blocks are codes, but dense where transformers joins two of unlike types."""
        tensors: dict[str, tuple[TensorEntry, memoryview]] = {}
        made: dict[str, MadeTensor] = {}
        matrices: dict[str, CodedMatrix] = {}
        for name, whole in self._layers.get(layer_id, ()):
            place = self._model.architecture.layer[name]
            is_coded = self._has_form_of_partner(whole, name, place)
            for number, piece in enumerate(self._pieces(whole, place)):
                as_there = f"model.layers.{layer_id}.{place.name.replace('#', str(number))}"
                if not piece.type.is_plain and is_coded:
                    form = form_of_blocks(piece.type)
                    matrices[as_there] = CodedMatrix(piece.shape, form, piece.codes)
                elif not piece.type.is_plain:
                    make = partial(piece.dense, as_there)
                    made[as_there] = MadeTensor("F32", piece.shape, make)
                elif place.change is Change.PLUS_ONE:
                    made[as_there] = MadeTensor("F32", piece.shape, piece.less_one)
                elif piece.order is not None:
                    made[as_there] = MadeTensor(piece.type.name, piece.shape, piece.plain)
                else:
                    tensors[as_there] = piece.entry, piece.data
        return LayerContents(tensors, made, matrices)

    def let_go(self, layer_id: int) -> None:
        """See `TensorFiles`."""
        found = (self._model.data[whole] for _, whole in self._layers.get(layer_id, ()))
        for data in {id(each): each for each in found}.values():
            let_go_pages(data)

    def layer_files(self, layer_id: int) -> frozenset[Path]:
        """The files of one layer."""
        return frozenset(self._model.files[whole] for _, whole in self._layers.get(layer_id, ()))

    def end_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """See `TensorFiles`."""
        norm = _plain_piece(self._model, NORM)
        is_plus_one = self._model.architecture.norms is Change.PLUS_ONE
        ends = {_END_NAMES[NORM]: norm.less_one() if is_plus_one else norm.plain()}
        for name in (EMBEDDING, HEAD):
            if name in self._model.tensors:
                piece, as_there = _piece(self._model, name), _END_NAMES[name]
                ends[as_there] = (
                    piece.plain() if piece.type.is_plain else piece.dense(as_there, dtype)
                )
        return ends

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            CheckpointError: there is none, or one that is not read.
        """
        return make_tokenizer(self._model.metadata)

    def _pieces(self, whole: str, place: Place) -> Iterator[_Piece]:
        """Yield the tensors of a checkpoint that a tensor of the file is: itself, or the matrices of experts."""
        is_matrix = place.num_dimensions > 1
        piece = _piece(self._model, whole) if is_matrix else _plain_piece(self._model, whole)
        if place.change is Change.EXPERTS:
            num_experts, *shape = piece.shape
            num_bytes = piece.type.num_bytes(shape)
            for number in range(num_experts):
                data = piece.data[number * num_bytes : (number + 1) * num_bytes]
                yield _Piece(piece.type, tuple(shape), data)
        elif place.change is Change.ROW:
            yield _Piece(piece.type, (1, *piece.shape), piece.data)
        elif place.change in self._num_heads:
            order = self._row_order(whole, place, piece.shape[0])
            yield _Piece(piece.type, piece.shape, piece.data, order)
        else:
            yield piece

    def _has_form_of_partner(self, whole: str, name: str, place: Place) -> bool:
        """Whether a tensor is of the type of that which it is put together with; so is one without."""
        partner = whole.removesuffix(name) + place.partner
        tensors = self._model.tensors
        return not place.partner or tensors[partner].type == tensors[whole].type

    def _row_order(self, whole: str, place: Place, num_rows: int) -> torch.Tensor:
        """Indices of the file's rows in transformers' order: a head has pairs in the file, in transformers halves."""
        num_heads = self._num_heads[place.change]
        assert isinstance(num_heads, int)
        if num_rows % (2 * num_heads):
            raise CheckpointError(
                f"{self._model.files[whole]}: {whole!r} has {num_rows} rows, and those of {num_heads} heads are due"
            )
        return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _piece(model: GgufModel, name: str) -> _Piece:
    info = model.tensors[name]
    return _Piece(info.type, info.shape, model.data[name][info.start : info.stop])


def _plain_piece(model: GgufModel, name: str) -> _Piece:
    piece = _piece(model, name)
    if not piece.type.is_plain:
        raise UnsupportedModelError(
            f"{model.files[name]}: {name!r} is {piece.type.name}, and only matrices are read in blocks"
        )
    return piece
