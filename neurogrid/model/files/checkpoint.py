"""A model in files: opened, checked, and read layer by layer without reading it whole.

What is wrong with it is said when it is opened, by the headers alone, in one line that names the file and what to do.
Weights stay in the files, which are mapped into memory; nothing here makes a model or knows where the bytes go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.model.files.blob import (
    CodedBlob,
    LayerBlob,
    LayerContents,
    RecentLayers,
    quantized,
    tensor_of,
)
from neurogrid.model.files.checkpoint_files import model_name_of, read_json, read_model_config
from neurogrid.model.files.config import build_config
from neurogrid.model.files.gguf.model_files import gguf_files
from neurogrid.model.files.gguf.tensor_files import GgufFiles
from neurogrid.model.files.image_part import text_part
from neurogrid.model.files.quantization import (
    AS_STORED,
    Linears,
    Quantization,
    choose_quantization,
    record_of_stored,
)
from neurogrid.model.files.safetensors_files import SafetensorsFiles
from neurogrid.model.files.safetensors_header import FILE_DTYPES, TensorEntry
from neurogrid.model.files.tensor_files import TensorFiles
from neurogrid.model.files.tokenizer import Tokenizer

__all__ = ["Checkpoint"]

# Forms of which blobs, and with them their digests, are kept.
_MAX_FORMS = 4


class Checkpoint:
    """A directory with `config.json` and safetensors, as transformers saves it, or a model in GGUF. Made by `open`.

    Attributes:
        path: the directory, or the file.
        config: config.json as it is, not sanitised; of GGUF what it would be; of a model that takes images that of its
            model of text (image_part.py), whose names all tensors but `image_tensors` have.
        image_config: config.json of a model that takes images, as it is; None of others.
        generation_config: generation_config.json, likewise; empty where there is none.
        num_layers: decoder layers by the config.
        present_layers: the layers all of whose tensors are here.
    """

    def __init__(
        self,
        path: Path,
        files: TensorFiles,
        *,
        config: dict[str, object],
        generation_config: dict[str, object],
        num_layers: int,
        image_config: dict[str, object] | None = None,
    ) -> None:
        self.path = path
        self.image_config = image_config
        self.config = config
        self.generation_config = generation_config
        self.num_layers = num_layers
        self.present_layers = files.present_layers
        self._files = files
        self._blobs: dict[Quantization | str | None, dict[int, LayerBlob]] = {}
        self._recent = RecentLayers()

    @classmethod
    def open(cls, path: str | Path, *, partial: bool = False) -> Checkpoint:
        """Read the headers of the model in the directory or file `path`, and check them.

        Args:
            partial: accept that shards which an index names, and layers, are not here.

        Raises:
            ConfigurationError: there is no such directory or file.
            CheckpointError: a file is missing, truncated, corrupt or of another format.
            UnsupportedModelError: weights quantised in a way that is not read, or a config that `build_config` refuses.
        """
        path = Path(path)
        if in_gguf := gguf_files(path):
            checkpoint = cls._open_gguf(path, in_gguf)
        else:
            checkpoint = cls._open_directory(path, partial=partial)
        missing = sorted(set(range(checkpoint.num_layers)) - checkpoint.present_layers)
        if missing and not partial:
            # BERT and its like, whose layers are those of an encoder.
            if getattr(build_config(checkpoint.config), "is_decoder", True) is False:
                raise UnsupportedModelError(
                    f"{path}: this is an encoder ({checkpoint.config.get('model_type')}), whose tokens see those "
                    "behind them; models that generate text can be served, and give embeddings too"
                )
            raise CheckpointError(
                f"{path}: no tensors for layer {missing[0]} ({len(missing)} of {checkpoint.num_layers} "
                "layers have none); config.json and the weights do not belong together"
            )
        return checkpoint

    @classmethod
    def _open_gguf(cls, path: Path, in_gguf: list[Path]) -> Checkpoint:
        files = GgufFiles.open(in_gguf)
        return cls(
            path,
            files,
            config=files.config,
            generation_config=files.generation_config,
            num_layers=build_config(files.config).num_hidden_layers,
        )

    @classmethod
    def _open_directory(cls, folder: Path, *, partial: bool) -> Checkpoint:
        config = whole = read_model_config(folder)
        text = text_part(whole)
        if text is not None:
            config = text
        num_layers: int = build_config(config).num_hidden_layers
        generation_config: dict[str, object] = {}
        if (folder / "generation_config.json").exists():
            generation_config = read_json(folder / "generation_config.json", "")
        return cls(
            folder,
            SafetensorsFiles.open(
                folder, whole, num_layers, partial=partial, takes_images=text is not None
            ),
            config=config,
            generation_config=generation_config,
            num_layers=num_layers,
            image_config=None if text is None else whole,
        )

    @property
    def name(self) -> str:
        """Name of the model, by the checkpoint's path."""
        return model_name_of(self.path)

    @property
    def has_codes(self) -> bool:
        """Whether it has matrices as codes, which are served as they are."""
        return self._files.has_codes

    @property
    def is_quantised(self) -> bool:
        """Whether its layers are quantised, so that no codes can be made of them."""
        return self._files.quantised_as is not None

    @property
    def files(self) -> frozenset[Path]:
        """The files that the tensors which are here lie in."""
        return self._files.files

    def layer_files(self, layer_id: int) -> frozenset[Path]:
        """Return the files of one layer."""
        return self._files.layer_files(layer_id)

    def end_tensors(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """All tensors outside the layers (embedding, final norm, head), on the CPU, mapped where they lie so in a file.

        Args:
            dtype: of matrices that are made of codes: what they are computed in, so that none is made wider first.

        Raises:
            CheckpointError: the file of one of them is not here, or it is not what its format says.
        """
        return self._files.end_tensors(dtype)

    def image_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that make embeddings of images, named as in the whole model's checkpoint; on the CPU, mapped.

        Raises:
            CheckpointError: a file of them is not here, or cannot be read.
            UnsupportedModelError: they are quantised.
        """
        assert isinstance(self._files, SafetensorsFiles), "GGUF has no images here"
        return self._files.image_tensors()

    def open_tokenizer(self) -> Tokenizer:
        """Read the tokenizer.

        Raises:
            CheckpointError: there is none, or it is damaged, or needs code or a package that is not here.
        """
        if isinstance(self._files, GgufFiles):
            return Tokenizer(self._files.tokenizer())
        return Tokenizer.open(self.path)

    def layer_blob(self, layer_id: int, quantization: Quantization | None = None) -> LayerBlob:
        """The bytes of one layer; the same object each time, so that its id is computed once.

        Args:
            quantization: what becomes codes; None for the bytes of the files.

        Raises:
            CheckpointError: the layer is not in `present_layers`, or cannot be had in this form.
        """
        if layer_id not in self.present_layers:
            raise CheckpointError(f"{self.path}: layer {layer_id} is not in this checkpoint")
        if not self.has_form(quantization):
            raise CheckpointError(
                f"{self.path}: layer {layer_id} was asked for in another form than it has here"
            )
        # The codes of the files are what they are, whatever a peer's record has.
        key = quantization if quantization is None or not quantization.is_stored else AS_STORED
        blobs = self._blobs.get(key)
        if blobs is None:
            # Peers name forms, as many as they like.
            while len(self._blobs) >= _MAX_FORMS:
                del self._blobs[next(iter(self._blobs))]
            blobs = self._blobs[key] = {}
        if layer_id not in blobs:
            parts = self._files.layer(layer_id)
            if quantization is not None and not quantization.is_stored:
                parts = _quantized(parts, quantization)
            is_mapped = not parts.made and not parts.matrices
            let_go = partial(self._files.let_go, layer_id)
            blobs[layer_id] = (
                LayerBlob(parts.tensors, let_go)
                if is_mapped
                else CodedBlob(parts, self._recent, let_go)
            )
        return blobs[layer_id]

    def has_form(self, quantization: Quantization | None) -> bool:
        """Whether its layers can be had so: quantised ones as they are, others as they are or by `--quantize`."""
        return self.has_codes == (quantization is not None and quantization.is_stored)

    def quantization(self, method: str | None, model: Linears) -> Quantization | None:
        """Record of the layers' matrices that are codes: as stored, or as `method` is to make them; None for no codes.

        Raises:
            ConfigurationError: something is to be made of what is quantised already.
            CheckpointError, UnsupportedModelError: a matrix cannot be codes.
        """
        quantised_as = self._files.quantised_as
        if method is not None and quantised_as is not None:
            raise ConfigurationError(
                f"{self.path} is quantised already ({quantised_as}): leave out --quantize"
            )
        if method is not None:
            shapes = map(self.layer_shapes, range(self.num_layers))
            return choose_quantization(method, shapes, model)
        if not self.has_codes:
            return None
        layers = {}
        for layer_id in sorted(self.present_layers):
            matrices = self._files.layer(layer_id).matrices
            layers[layer_id] = {
                name: (matrix.shape, matrix.form) for name, matrix in matrices.items()
            }
        if not any(layers.values()):
            raise UnsupportedModelError(
                f"{self.path}: its config says that it is quantised, and no matrix in its layers is"
            )
        return record_of_stored(layers, model, self.num_layers)

    def layer_shapes(self, layer_id: int) -> dict[str, tuple[int, ...]]:
        """The shapes of one layer's tensors, by name."""
        parts = self._files.layer(layer_id)
        shapes = {name: entry.shape for name, (entry, _) in parts.tensors.items()}
        return shapes | {name: tensor.shape for name, tensor in parts.made.items()}


def _quantized(parts: LayerContents, quantization: Quantization) -> LayerContents:
    """A layer that is not quantised, with matrices to be made codes of."""
    matrices = {
        name: quantized(name, entry.shape, _reader(entry, data), quantization.method)
        for name, (entry, data) in parts.tensors.items()
        if _is_made_codes(name, entry.dtype, entry.shape, quantization)
    }
    matrices |= {
        name: quantized(name, tensor.shape, tensor.make, quantization.method)
        for name, tensor in parts.made.items()
        if _is_made_codes(name, tensor.dtype, tensor.shape, quantization)
    }
    return LayerContents(
        {name: each for name, each in parts.tensors.items() if name not in matrices},
        {name: each for name, each in parts.made.items() if name not in matrices},
        matrices,
    )


def _reader(entry: TensorEntry, data: memoryview) -> Callable[[], torch.Tensor]:
    return lambda: tensor_of(entry, data)


def _is_made_codes(name: str, dtype: str, shape: Sequence[int], quantization: Quantization) -> bool:
    return FILE_DTYPES[dtype].is_floating_point and quantization.makes_of(name, shape)
