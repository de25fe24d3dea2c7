"""PowerSGD: gradients of matrices at a low rank, in two averages, with error feedback.

M = gradient + error. P = M Q is averaged and made orthonormal; Q = M^T P is averaged, together with all that is not
compressed; the mean gradient is P Q^T. What a member's own P and Q do not show of M is its error, which the next round
has in it. Q is the start of the next round. (Vogels et al., "PowerSGD: Practical low-rank gradient compression for
distributed optimization", 2019.)

Shared by all members: Q, which a newcomer fetches. A member's own: the error, taken over at the commit alone.

The mean is computed by each member from the same P and Q, by products and QR of its own libraries: the same bits on
machines that are alike, and within rounding on others. Members of several kinds compare digests of their weights.

    r  rank      [m, n]  a matrix: the first dimension, and all others
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neurogrid.training.optimizers.vectors import check_finite, check_vector, load_vectors

__all__ = ["Average", "PowerSgd", "drive"]

# Elements of the first Q, at most. Only their directions count.
FIRST_Q = 1 << 20

# A flat float32 vector of this member in, the mean over all members out.
Average = Callable[[Tensor], Tensor]


def drive(exchange: Generator[Tensor, Tensor, list[Tensor]], average: Average) -> list[Tensor]:
    """Runs an exchange to its end, with `average` for each vector that it wants the mean of."""
    vector = next(exchange)
    while True:
        try:
            vector = exchange.send(average(vector))
        except StopIteration as end:
            result: list[Tensor] = end.value
            return result


@dataclass(frozen=True)
class _Matrix:
    """A tensor that is compressed: its number among all, its sides, and its rank."""

    number: int
    rows: int
    columns: int
    rank: int


class PowerSgd:
    """Averages gradients of fixed shapes at a low rank.

    Args:
        shapes: of the gradients.
        rank: at most; a matrix has no greater one than its smaller side, and with that its mean is exact.
        seed: of the first Q, the same with all members.
        least_saving: a tensor with two dimensions or more is compressed where 1 - r (m + n) / (m n) is at least this.
            Minus infinity compresses all.

    Raises:
        ValueError: the rank is not at least 1.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        *,
        rank: int,
        seed: int = 0,
        least_saving: float = 0.5,
    ) -> None:
        if rank < 1:
            raise ValueError(f"the rank must be at least 1, not {rank}")
        self._shapes = [tuple(shape) for shape in shapes]
        self._matrices = []
        for number, shape in enumerate(self._shapes):
            if len(shape) < 2 or 0 in shape:
                continue
            rows, columns = shape[0], math.prod(shape[1:])
            own = min(rank, rows, columns)
            if 1 - own * (rows + columns) / (rows * columns) >= least_saving:
                self._matrices.append(_Matrix(number, rows, columns, own))
        compressed = {matrix.number for matrix in self._matrices}
        self._others = [i for i in range(len(self._shapes)) if i not in compressed]
        num_elements = sum(m.columns * m.rank for m in self._matrices)
        generator = torch.Generator().manual_seed(seed)
        # Whole numbers: torch's normal ones have other last bits on other processors.
        whole = torch.randint(-FIRST_Q, FIRST_Q + 1, (num_elements,), generator=generator)
        self._q = whole.float()
        self._errors = [torch.zeros(m.rows, m.columns) for m in self._matrices]
        self._pending: tuple[Tensor, list[Tensor]] | None = None

    @property
    def compressed(self) -> tuple[int, ...]:
        """The numbers of the tensors that are compressed."""
        return tuple(matrix.number for matrix in self._matrices)

    @property
    def is_pending(self) -> bool:
        """Whether an exchange came to its end that was neither committed nor rolled back."""
        return self._pending is not None

    @torch.no_grad()
    def exchange(self, gradients: Sequence[Tensor]) -> Generator[Tensor, Tensor, list[Tensor]]:
        """Gives two flat float32 vectors in turn, is sent the mean of each, and returns the mean gradients.

        Where nothing is compressed, the first of the two is left out.

        Nothing is kept of it before `commit`. An exchange that is begun again, or left, costs nothing but itself.

        Args:
            gradients: float32, of the shapes, on the CPU; left as they are.

        Raises:
            ValueError: a shape or a dtype is wrong, or the step before was neither committed nor rolled back.
            NotFiniteError: a gradient or a mean has an element that is infinite or no number.
        """
        if self._pending is not None:
            raise ValueError("the step before is to be committed or rolled back first")
        if [tuple(gradient.shape) for gradient in gradients] != self._shapes:
            raise ValueError("the gradients have other shapes than this was made for")
        for number, gradient in enumerate(gradients):
            check_vector(f"gradient {number}, flattened,", gradient.reshape(-1), gradient.numel())
            check_finite(f"gradient {number}", gradient.reshape(-1))
        matrices = self._matrices
        means = [torch.empty(0)] * len(self._shapes)
        whole = [
            gradients[m.number].reshape(m.rows, m.columns) + error
            for m, error in zip(matrices, self._errors, strict=True)
        ]
        # Orthonormal, too: the span is the same, but where the step before left fewer directions than the rank, others
        # take their places, and a full rank stays one.
        old_qs = [
            _orthonormal(q).float()
            for q in self._split(self._q, [(m.columns, m.rank) for m in matrices])
        ]

        ps = _flat([own @ q for own, q in zip(whole, old_qs, strict=True)])
        mean = (yield ps) if matrices else ps
        _check_mean(mean, ps)
        # In float64, and rounded: members whose libraries add up in another order come to the same, but for ties.
        bases = [
            _orthonormal(p).float() for p in self._split(mean, [(m.rows, m.rank) for m in matrices])
        ]

        own_qs = [own.T @ basis for own, basis in zip(whole, bases, strict=True)]
        second = _flat([*own_qs, *(gradients[i] for i in self._others)])
        mean = yield second
        _check_mean(mean, second)
        shapes = [(m.columns, m.rank) for m in matrices] + [self._shapes[i] for i in self._others]
        pieces = self._split(mean, shapes)
        for matrix, basis, q in zip(matrices, bases, pieces, strict=False):
            found = (basis.double() @ q.double().T).float()
            means[matrix.number] = found.view(self._shapes[matrix.number])
        for number, piece in zip(self._others, pieces[len(matrices) :], strict=True):
            means[number] = piece.clone()
        # By its own Q, not by the mean: what is left of a member that leaves is then only what nobody was told.
        errors = [own.sub_(basis @ q.T) for own, basis, q in zip(whole, bases, own_qs, strict=True)]
        self._pending = mean[: self._q.numel()].clone(), errors
        return means

    def commit(self) -> None:
        """Takes over Q and errors of the exchange, whose means all members apply.

        Raises:
            ValueError: no exchange came to its end.
        """
        if self._pending is None:
            raise ValueError("nothing is under way: no exchange came to its end")
        self._q, self._errors = self._pending
        self._pending = None

    def roll_back(self) -> None:
        """Forgets an exchange that is not applied: Q and errors are what they were."""
        self._pending = None

    def state_vectors(self) -> list[Tensor]:
        """What all members share, as the live buffer: Q of all matrices in order. A newcomer's error is 0."""
        return [self._q]

    def load(self, vectors: Sequence[Tensor]) -> None:
        """Takes over the shared state of another member; the errors are what they were.

        Raises:
            ValueError: number, shape or dtype of the vectors is wrong. Nothing was taken over.
            NotFiniteError: an element is infinite or no number. Nothing was taken over.
        """
        load_vectors(self.state_vectors(), vectors)

    def own_vectors(self) -> list[Tensor]:
        """What is this member's alone, as live buffers: its errors, flat. For its own checkpoint."""
        return [error.view(-1) for error in self._errors]

    def load_own(self, vectors: Sequence[Tensor]) -> None:
        """Takes over what `own_vectors` gave, as `load` does."""
        load_vectors(self.own_vectors(), vectors)

    @staticmethod
    def _split(vector: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        pieces = vector.split([math.prod(shape) for shape in shapes])
        return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0), *(tensor.reshape(-1) for tensor in tensors)])


def _check_mean(mean: Tensor, vector: Tensor) -> None:
    check_vector("the mean", mean, vector.numel())
    check_finite("the mean", mean)


def _orthonormal(p: Tensor) -> Tensor:
    """An orthonormal basis of the columns of `p`: float64 of its shape."""
    basis: Tensor
    basis, upper = torch.linalg.qr(p.double())
    # Libraries differ in signs: here the diagonal of R is not negative.
    return basis.mul_(torch.where(upper.diagonal() < 0, -1.0, 1.0))
