"""The bytes of one layer: made from memory-mapped files for sending, and read where they arrive.

A layer's blob is one safetensors file of that layer's tensors, in the order of their names, under
their full checkpoint names, in the checkpoint's dtypes. The same tensors give the same bytes, so a
blob is known by its content: its id is the BLAKE3 of its chunks' BLAKE3 (specification, blobs).

Nothing here copies more than a chunk: `LayerBlob` gives slices of the files, `parse_blob` returns
tensors that lie in the buffer it was given. This module knows neither models nor peers.
"""

from __future__ import annotations

import threading
import warnings
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import torch
from safetensors.torch import save

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.foreign.codes import ForeignFormat
from neurogrid.model.files.quantization import CODES, METHODS, CodesForm, parts_of
from neurogrid.model.files.safetensors_header import (
    FILE_DTYPES,
    FLOAT8,
    LENGTH_BYTES,
    TensorEntry,
    encode_header,
    header_length,
    parse_header,
)
from neurogrid.model.files.tensors import dtype_name, tensor_to_bytes
from neurogrid.model.kernels import Codes, quantize
from neurogrid.p2p.wire.blob_id import BlobHasher, blob_id, num_chunks
from neurogrid.p2p.wire.limits import CHUNK_BYTES

__all__ = [
    "CHUNK_BYTES",
    "CodedBlob",
    "CodedMatrix",
    "LayerBlob",
    "LayerContents",
    "MadeTensor",
    "RecentLayers",
    "StoredMatrix",
    "parse_blob",
    "quantized",
    "tensor_of",
    "write_blob",
]

# Tensors in one layer: 20 times a mixture of 256 experts (DeepSeek-V3: 780).
MAX_BLOB_TENSORS = 16_384
# Bytes of a blob's header: 250 a tensor. JSON grows tenfold and more as Python objects.
MAX_BLOB_HEADER_BYTES = 4 * 1024 * 1024
# Layers whose codes stay in memory though nobody holds them: one that is read again at once.
_MAX_RECENT = 1


class LayerBlob:
    """The blob of one layer, as a sequence of chunks that is made while it is read.

    Args:
        tensors: for each name the entry it has in its file (dtype and shape are used) and the bytes
            of the tensor, usually a slice of a memory-mapped file.
        let_go: lets the pages of the files go.

    Attributes:
        num_bytes: of the blob.
        num_elements: of all tensors.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[TensorEntry, memoryview]],
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        self._let_go = let_go
        self._data: tuple[memoryview, ...] = tuple(data for _, (_, data) in sorted(tensors.items()))
        self._lay_out({name: entry for name, (entry, _) in tensors.items()})

    def _lay_out(self, tensors: Mapping[str, TensorEntry]) -> None:
        """Put tensors one behind the other, by name, behind a header of their own."""
        entries: dict[str, TensorEntry] = {}
        offset = 0
        for name, entry in sorted(tensors.items()):
            stop = offset + entry.num_bytes
            entries[name] = TensorEntry(entry.dtype, entry.shape, offset, stop)
            offset = stop
        self._header = memoryview(encode_header(entries))
        starts = (self._header.nbytes + entry.start for entry in entries.values())
        self._starts = (0, *starts)
        self._digests: bytes | None = None
        self.num_bytes = self._header.nbytes + offset
        self.num_elements = sum(prod(entry.shape) for entry in tensors.values())

    def _tensors(self) -> tuple[memoryview, ...]:
        """The bytes of each tensor, in the order of their names."""
        return self._data

    @property
    def is_made(self) -> bool:
        """Whether its bytes are made, and take memory while it is held."""
        return False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Read it within the block: what is in memory for that stays as long, and goes then."""
        try:
            yield
        finally:
            self._let_go()

    @property
    def num_chunks(self) -> int:
        """Number of chunks that `chunks` yields, at least 1."""
        return num_chunks(self.num_bytes)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes in order, each piece CHUNK_BYTES long but the last; see `chunk`."""
        return map(self.chunk, range(self.num_chunks))

    def chunk(self, index: int) -> bytes | memoryview:
        """The bytes of chunk `index`.

        A chunk inside one tensor is a view of the file; one that spans several is joined.

        Raises:
            IndexError: there is no such chunk.
        """
        if not 0 <= index < self.num_chunks:
            raise IndexError(f"no chunk {index} of {self.num_chunks}")
        start = index * CHUNK_BYTES
        stop = min(start + CHUNK_BYTES, self.num_bytes)
        segments = (self._header, *self._tensors())
        parts: list[memoryview] = []
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            offset = start - self._starts[number]
            part = segments[number][offset : offset + stop - start]
            if part:
                parts.append(part)
            start += part.nbytes
            number += 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def is_hashed(self) -> bool:
        """Whether `digests` takes no time."""
        return self._digests is not None

    def trust_digests(self, digests: bytes) -> None:
        """Take the digests from an earlier time, when the files were the same."""
        self._digests = digests

    def digests(self) -> bytes:
        """The digest of every chunk in order, 32 bytes each.

        The first call reads every byte; the rest do not.
        """
        if self._digests is None:
            hasher = BlobHasher()
            for chunk in self.chunks():
                hasher.update(chunk)
            self._digests = hasher.digests()
        return self._digests

    def blob_id(self) -> bytes:
        """The 32 bytes that name the content, from `digests`."""
        return blob_id((self.digests(),))


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix that travels as codes.

    Attributes:
        shape: [O, I].
        form: of the codes.
        make: makes them of what the files have; raises CheckpointError.
    """

    shape: tuple[int, ...]
    form: CodesForm
    make: Callable[[], Codes]


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor that travels as such, and does not lie in a file as it travels.

    Attributes:
        dtype: the name in a file.
        shape: sizes.
        make: makes it of what the files have; raises CheckpointError.
    """

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def entry(self) -> TensorEntry:
        """Entry of the tensor, as a file would have it."""
        return _entry(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class LayerContents:
    """Tensors of a layer of a checkpoint, by name.

    Attributes:
        tensors: that lie in files as they travel: entries and bytes.
        made: that are made for it.
        matrices: that are codes.
    """

    tensors: Mapping[str, tuple[TensorEntry, memoryview]]
    made: Mapping[str, MadeTensor] = field(default_factory=dict)
    matrices: Mapping[str, CodedMatrix] = field(default_factory=dict)


def _entry(dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(dtype, shape, 0, prod(shape) * FILE_DTYPES[dtype].itemsize)


class CodedBlob(LayerBlob):
    """The blob of one layer of which matrices, or other tensors, are made when they are first read.

    Args:
        parts: of the layer.
        recent: holds what was made.
        let_go: lets the pages of the files go.
    """

    def __init__(
        self,
        parts: LayerContents,
        recent: RecentLayers,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        self._let_go = let_go
        self._parts = parts
        self._recent = recent
        entries = {name: entry for name, (entry, _) in parts.tensors.items()}
        entries |= {name: tensor.entry for name, tensor in parts.made.items()}
        for name, matrix in parts.matrices.items():
            for suffix, (dtype, shape) in matrix.form.entries(matrix.shape).items():
                entries[name + suffix] = _entry(dtype, shape)
        self._lay_out(entries)

    @property
    def is_made(self) -> bool:
        return True

    @contextmanager
    def held(self) -> Iterator[None]:
        with super().held(), self._recent.held(self):
            yield

    def _tensors(self) -> tuple[memoryview, ...]:
        return self._recent.of(self, self._make)

    def _make(self) -> tuple[memoryview, ...]:
        made = {name: data for name, (_, data) in self._parts.tensors.items()}
        made |= {name: tensor_to_bytes(each.make()) for name, each in self._parts.made.items()}
        for name, matrix in self._parts.matrices.items():
            parts = parts_of(matrix.make())
            # As whoever gets them will.
            matrix.form.read(parts, name)
            made |= {name + suffix: tensor_to_bytes(part) for suffix, part in parts.items()}
        return tuple(data for _, data in sorted(made.items()))


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix that a checkpoint has quantised.

    Attributes:
        name: of the matrix.
        stored: how.
        tensors: that make it, by suffix: entries and bytes.
    """

    name: str
    stored: ForeignFormat
    tensors: Mapping[str, tuple[TensorEntry, memoryview]]

    @property
    def shape(self) -> tuple[int, int]:
        """[O, I]; errors as of `codes`."""
        shapes = {suffix: entry.shape for suffix, (entry, _) in self.tensors.items()}
        teller = self.stored.shape_teller
        told = None
        if teller is not None and teller in self.tensors:
            told = tensor_of(*self.tensors[teller])
        with self._named():
            return self.stored.shape(shapes, told)

    @property
    def form(self) -> CodesForm:
        """Form of `codes`, told by the headers; errors as of those."""
        shape = self.shape
        entry, _ = self.tensors[self.stored.scales]
        scale_dtype = self.stored.scale_dtype
        return CodesForm(
            self.stored.bits,
            self.stored.group_of(shape, entry.shape),
            entry.dtype if scale_dtype is None else dtype_name(scale_dtype),
            self.stored.has_minimums,
            self.stored.table is not None,
            self.stored.are_floats,
        )

    def codes(self) -> Codes:
        """The codes that it is.

        Raises:
            CheckpointError: its tensors are not what their format says.
            UnsupportedModelError: no codes are exactly this matrix.
        """
        with self._named():
            return self.stored.decode(
                {suffix: tensor_of(*each) for suffix, each in self.tensors.items()}
            )

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, UnsupportedModelError) as exc:
            raise type(exc)(f"{self.name}: {exc}") from exc


def quantized(
    name: str, shape: tuple[int, ...], read: Callable[[], torch.Tensor], method: str
) -> CodedMatrix:
    """A matrix to be quantised by a key of METHODS.

    Args:
        read: gives it.
    """
    form = METHODS[method]

    def make() -> Codes:
        try:
            return quantize(read(), form.bits)
        except ValueError as exc:
            raise CheckpointError(f"{name} cannot be quantised: {exc}") from exc

    return CodedMatrix(shape, form, make)


def tensor_of(entry: TensorEntry, data: memoryview) -> torch.Tensor:
    """A tensor of a file, without a copy; not to be written to."""
    return _view(_as_tensor(data), TensorEntry(entry.dtype, entry.shape, 0, data.nbytes))


class RecentLayers:
    """The codes of the layers that are held, and of that which was read last; no whole model."""

    def __init__(self) -> None:
        self._made: OrderedDict[CodedBlob, tuple[memoryview, ...]] = OrderedDict()
        self._num_holders: Counter[CodedBlob] = Counter()
        # Of both, and never for long: also whoever must not wait takes it.
        self._table = threading.Lock()
        self._making = threading.Lock()

    @contextmanager
    def held(self, blob: CodedBlob) -> Iterator[None]:
        """Keep what is made for `blob` within the block, and let it go with the last that holds it."""
        with self._table:
            self._num_holders[blob] += 1
        try:
            yield
        finally:
            with self._table:
                self._num_holders[blob] -= 1
                if not self._num_holders[blob]:
                    del self._num_holders[blob]
                    self._made.pop(blob, None)

    def of(
        self, blob: CodedBlob, make: Callable[[], tuple[memoryview, ...]]
    ) -> tuple[memoryview, ...]:
        """Return the bytes that were made for `blob`, or make them now: for one blob at a time."""
        if (found := self._find(blob)) is not None:
            return found
        with self._making:
            if (found := self._find(blob)) is not None:
                return found
            with self._table:
                others = [each for each in self._made if each not in self._num_holders]
                for each in others[: len(others) - _MAX_RECENT + 1]:
                    del self._made[each]
            made = make()
            with self._table:
                self._made[blob] = made
            return made

    def _find(self, blob: CodedBlob) -> tuple[memoryview, ...] | None:
        with self._table:
            found = self._made.get(blob)
            if found is not None:
                self._made.move_to_end(blob)
            return found


def write_blob(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The bytes of a blob of these tensors, contiguous and on the CPU, as `parse_blob` reads it; a copy."""
    return save(dict(tensors))


def parse_blob(data: bytes | bytearray | memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a blob, by name, on the CPU, without a copy.

    The tensors lie in `data` and keep it alive; it must not be written to afterwards. Only a tensor
    whose offset its dtype cannot be read at (a mixture of dtypes) is copied.

    Raises:
        CheckpointError: the bytes are not one whole safetensors file within the bounds above.
        UnsupportedModelError: a tensor has a dtype of quantised weights.
    """
    where = "the layer's blob"
    view = memoryview(data).cast("B")
    length = header_length(
        bytes(view[:LENGTH_BYTES]),
        num_file_bytes=view.nbytes,
        where=where,
        limit=MAX_BLOB_HEADER_BYTES,
    )
    body = view[LENGTH_BYTES + length :]
    entries = parse_header(
        view[LENGTH_BYTES : LENGTH_BYTES + length],
        num_data_bytes=body.nbytes,
        where=where,
        max_tensors=MAX_BLOB_TENSORS,
    )
    if not entries:
        raise CheckpointError(f"{where} holds no tensor")
    for name, entry in entries.items():
        if entry.dtype == FLOAT8 and not name.endswith(CODES):
            raise UnsupportedModelError(
                f"{where}: {name[:80]!r} is {FLOAT8}: quantised checkpoints are not supported yet without scales"
            )
    if body.nbytes == 0:
        return {name: _empty(entry) for name, entry in entries.items()}
    storage = _as_tensor(body)
    return {name: _view(storage, entry) for name, entry in entries.items()}


def _as_tensor(body: memoryview) -> torch.Tensor:
    if not body.readonly:
        return torch.frombuffer(body, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch warns that a read-only buffer could be written through the tensor; nobody does.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(body, dtype=torch.uint8)


def _view(storage: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    if entry.num_bytes == 0:
        return _empty(entry)
    raw = storage[entry.start : entry.stop]
    if raw.data_ptr() % FILE_DTYPES[entry.dtype].itemsize:
        raw = raw.clone()
    return raw.view(FILE_DTYPES[entry.dtype]).reshape(entry.shape)


def _empty(entry: TensorEntry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=FILE_DTYPES[entry.dtype])
