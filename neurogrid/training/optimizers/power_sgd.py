"""PowerSGD: gradients of matrices at a low rank, in two small reductions in the place of a large one.

M = gradient + error, of each member. P = M Q is added up over the members and made orthonormal; then Q = M^T P is added
up, together with all that is not compressed. What all members apply is P Q^T, and the next step begins with this Q.
(Vogels et al., "PowerSGD: Practical low-rank gradient compression for distributed optimization", 2019.)

All of it is linear: of sums it makes the sum, of means the mean. Here it is called the sum.

What a member's own P and Q do not show of its M is its error, which the next step has in it. By its own Q, and not by
the sum's: either way the errors of all add up to what was not applied, and what a member that leaves takes along is
only what nobody was told. Errors are kept at the commit alone; a step that is dropped, or tried again with other
members, has lost nothing.

Each member makes P orthonormal, and P Q^T, by its own libraries, from sums that have the same bits at all. On machines
that are alike so has the outcome. On others it is equal up to ties in rounding, since both are computed in float64 and
rounded; and a direction of P that would be made of rounding alone, which could be any other one elsewhere, is left
out. So replicas on unlike machines may differ by last bits, step by step: nothing here brings them together again.
Whoever needs that averages the weights, too, a random partition at a time, or compares digests of them. To send P Q^T
would be as long as what is compressed here.

    r  rank      [m, n]  a matrix: the first dimension, and all others
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from neurogrid.training.optimizers.vectors import check_finite, check_vector, load_vectors

__all__ = ["PowerSgd"]

FIRST_Q: Final = 1 << 20
"""Elements of the first Q, at most. Only their directions count."""

LEAST_DIRECTION: Final = 2.0**-30
"""Share of its length that a column of P has to have beside those before it: float32 noise is 2^-25, float64 2^-53."""

MAX_PRODUCT: Final = 1 << 22
"""Elements of P Q^T in float64 at once: 32 MiB."""


@dataclass(frozen=True)
class _Matrix:
    """A tensor that is compressed: its number among all, its sides, and its rank."""

    number: int
    rows: int
    columns: int
    rank: int


class PowerSgd:
    """One member's side of a sum of gradients at a low rank, for gradients of fixed shapes.

    A step is `first`, a sum over all members, `second`, another sum, `finish`, and `commit`; each of the three may be
    called again, with another sum, until then. Where nothing is compressed, the first vector is empty, and needs no
    sum. `exchange` is the three as one.

    Holds the compressed gradients twice between `first` and `commit`, else once.

    Args:
        shapes: of the gradients.
        rank: of what is compressed: tensors of two dimensions or more, whose rank is below their smaller side, where
            1 - r (m + n) / (m n) is at least `least_saving`. All others go as they are, and their sum is exact.
        seed: of the first Q, the same with all members.
        least_saving: minus infinity compresses all that it can.
        device: where the gradients are. Vectors that are summed are on the CPU.

    Attributes:
        first_elements, second_elements: of the two vectors that are summed, float32.

    Raises:
        ValueError: the rank is not at least 1.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        rank: int,
        *,
        seed: int = 0,
        least_saving: float = 0.5,
        device: torch.device | str = "cpu",
    ) -> None:
        if rank < 1:
            raise ValueError(f"the rank must be at least 1, not {rank}")
        self._shapes = [tuple(shape) for shape in shapes]
        self._device = torch.device(device)
        self._matrices = []
        for number, shape in enumerate(self._shapes):
            if len(shape) < 2 or 0 in shape:
                continue
            rows, columns = shape[0], math.prod(shape[1:])
            saving = 1 - rank * (rows + columns) / (rows * columns)
            if rank < min(rows, columns) and saving >= least_saving:
                self._matrices.append(_Matrix(number, rows, columns, rank))
        matrices = self._matrices
        compressed = {matrix.number for matrix in matrices}
        self._others = [i for i in range(len(self._shapes)) if i not in compressed]
        self._p_shapes = [(matrix.rows, matrix.rank) for matrix in matrices]
        self._q_shapes = [(matrix.columns, matrix.rank) for matrix in matrices]
        self._second_shapes = self._q_shapes + [self._shapes[i] for i in self._others]
        self.first_elements = sum(map(math.prod, self._p_shapes))
        self.second_elements = sum(map(math.prod, self._second_shapes))
        self._errors = [
            torch.zeros(matrix.rows, matrix.columns, device=self._device) for matrix in matrices
        ]
        self._q = torch.empty(sum(map(math.prod, self._q_shapes)))
        self._whole: list[Tensor] | None = None
        self._uncompressed: list[Tensor] = []
        self._bases: list[Tensor] | None = None
        self._own_qs: list[Tensor] = []
        self._next_q: Tensor | None = None
        self.restart(seed)

    @property
    def compressed(self) -> tuple[int, ...]:
        """The numbers of the tensors that are compressed."""
        return tuple(matrix.number for matrix in self._matrices)

    def restart(self, seed: int) -> None:
        """Draw Q anew, the same at all members of the seed; errors are kept, a step that is under way is dropped."""
        self.drop()
        generator = torch.Generator().manual_seed(seed)
        # Whole numbers: torch's normal ones have other last bits on other processors.
        whole = torch.randint(-FIRST_Q, FIRST_Q + 1, self._q.shape, generator=generator)
        self._q.copy_(whole)

    @property
    def is_pending(self) -> bool:
        """Whether a step came to its end that was neither committed nor dropped."""
        return self._next_q is not None

    def exchange(self, gradients: Sequence[Tensor]) -> Generator[Tensor, Tensor, list[Tensor]]:
        """A step: gives both vectors in turn, is sent the sum of each, and returns what all members apply.

        Where nothing is compressed, the first of the two is left out. Arguments and errors as of `first`, `second` and
        `finish`.
        """
        vector = torch.empty(self.first_elements)
        self.first(gradients, vector)
        if self.first_elements:
            vector = yield vector
        second = torch.empty(self.second_elements)
        self.second(vector, second)
        return self.finish((yield second))

    @torch.no_grad()
    def first(self, gradients: Sequence[Tensor], out: Tensor) -> None:
        """Begin a step: P of all matrices. Of a step that was begun before nothing is left.

        Args:
            gradients: float32, of the shapes; they stay as they are, and are not to change before `second`.
            out: written to; float32 [first_elements], on the CPU.

        Raises:
            ValueError: a shape or a dtype is wrong.
            NotFiniteError: a gradient has an element that is infinite or no number.
        """
        if [tuple(gradient.shape) for gradient in gradients] != self._shapes:
            raise ValueError("the gradients have other shapes than this was made for")
        for number, gradient in enumerate(gradients):
            flat = gradient.detach().reshape(-1)
            check_vector(f"gradient {number}, flattened,", flat, gradient.numel())
            check_finite(f"gradient {number}", flat)
        check_vector("what P is written to", out, self.first_elements)
        self.drop()
        self._whole = whole = [
            gradients[m.number].detach().reshape(m.rows, m.columns) + error
            for m, error in zip(self._matrices, self._errors, strict=True)
        ]
        self._uncompressed = [gradients[i].detach() for i in self._others]
        for own, q, target in zip(
            whole,
            _split(self._q, self._q_shapes),
            _split(out, self._p_shapes),
            strict=True,
        ):
            # Orthonormal: the span is the same, but where the step before left fewer directions than the rank, others
            # take their places.
            target.copy_(own @ _orthonormal(q)[0].float().to(self._device))

    @torch.no_grad()
    def second(self, summed: Tensor, out: Tensor) -> None:
        """Q of all matrices, and after them what is not compressed.

        Args:
            summed: what `first` gave, added up over all members; float32 [first_elements], on the CPU.
            out: written to; float32 [second_elements], on the CPU.

        Raises:
            ValueError: no step was begun, or a shape or a dtype is wrong.
            NotFiniteError: the sum has an element that is infinite or no number.
        """
        if self._whole is None:
            raise ValueError("no step was begun")
        _check_sum(summed, self.first_elements)
        check_vector("what Q is written to", out, self.second_elements)
        self._next_q = None
        self._bases = bases = [
            _directions(p).to(self._device) for p in _split(summed, self._p_shapes)
        ]
        self._own_qs = [own.T @ basis for own, basis in zip(self._whole, bases, strict=True)]
        own = [*self._own_qs, *self._uncompressed]
        for target, tensor in zip(_split(out, self._second_shapes), own, strict=True):
            target.copy_(tensor)

    @torch.no_grad()
    def finish(self, summed: Tensor) -> list[Tensor]:
        """Compute what all members apply: the sum of their gradients, as far as it was sent; float32, on the device.

        Args:
            summed: what `second` gave, added up over all members; float32 [second_elements], on the CPU.

        Raises:
            ValueError: there was no `second`, or a shape or a dtype is wrong.
            NotFiniteError: the sum has an element that is infinite or no number.
        """
        if self._bases is None:
            raise ValueError("the step has no second vector yet")
        _check_sum(summed, self.second_elements)
        result = [torch.empty(0)] * len(self._shapes)
        pieces = _split(summed, self._second_shapes)
        for matrix, basis, q in zip(self._matrices, self._bases, pieces, strict=False):
            result[matrix.number] = _product(basis, q).view(self._shapes[matrix.number])
        for number, piece in zip(self._others, pieces[len(self._matrices) :], strict=True):
            result[number] = piece.to(self._device, copy=True)
        self._next_q = summed[: self._q.numel()].clone()
        return result

    @torch.no_grad()
    def commit(self) -> None:
        """Take over Q and the errors of the step, which all members apply.

        Raises:
            ValueError: no step came to its end.
        """
        if self._whole is None or self._bases is None or self._next_q is None:
            raise ValueError("nothing is under way: no step came to its end")
        self._errors = [
            own.sub_(basis @ q.T)
            for own, basis, q in zip(self._whole, self._bases, self._own_qs, strict=True)
        ]
        self._q = self._next_q
        self.drop()

    def drop(self) -> None:
        """Forget the step that is under way: Q and errors are what they were before it."""
        self._whole = self._bases = self._next_q = None
        self._uncompressed, self._own_qs = [], []

    def state_vectors(self) -> list[Tensor]:
        """State that all members share, as the live buffer: Q of all matrices in order. A newcomer's error is 0."""
        return [self._q]

    def load(self, vectors: Sequence[Tensor]) -> None:
        """Takes over the shared state of another member; the errors are what they were.

        Raises:
            ValueError: number, shape or dtype of the vectors is wrong. Nothing was taken over.
            NotFiniteError: an element is infinite or no number. Nothing was taken over.
        """
        load_vectors(self.state_vectors(), vectors)

    def own_vectors(self) -> list[Tensor]:
        """State of this member alone, as live buffers: its errors, flat. For its own checkpoint."""
        return [error.view(-1) for error in self._errors]

    def load_own(self, vectors: Sequence[Tensor]) -> None:
        """Takes over what `own_vectors` gave, as `load` does."""
        load_vectors(self.own_vectors(), vectors)


def _split(vector: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    pieces = vector.split([math.prod(shape) for shape in shapes]) if shapes else ()
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def _check_sum(summed: Tensor, num_elements: int) -> None:
    check_vector("the sum", summed, num_elements)
    check_finite("the sum", summed)


def _orthonormal(p: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of the columns of `p`, and what each has beside those before: float64, [m, r] and [r]."""
    basis: Tensor
    basis, upper = torch.linalg.qr(p.double())
    # Libraries differ in signs: here the diagonal of R is not negative.
    lengths = upper.diagonal()
    return basis.mul_(torch.where(lengths < 0, -1.0, 1.0)), lengths.abs()


def _directions(p: Tensor) -> Tensor:
    """The orthonormal directions that the columns of `p` have, 0 where one has none of its own: float32 [m, r]."""
    basis, lengths = _orthonormal(p)
    # In float64, and rounded: members whose libraries add up in another order come to the same, but for ties.
    return basis.mul_(lengths > LEAST_DIRECTION * p.double().norm(dim=0)).float()


def _product(basis: Tensor, q: Tensor) -> Tensor:
    """P Q^T in float64, rounded: float32 [m, n], where the basis is."""
    device = basis.device
    basis = basis.cpu()  # some accelerators have no float64
    right = q.cpu().double().T
    result = torch.empty(len(basis), right.shape[1], device=device)
    num_rows = max(1, MAX_PRODUCT // right.shape[1])
    for rows, target in zip(basis.split(num_rows), result.split(num_rows), strict=True):
        target.copy_(rows.double() @ right)
    return result
