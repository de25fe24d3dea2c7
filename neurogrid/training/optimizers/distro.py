"""DisTrO: members exchange the few greatest frequencies of their momentum, and take a signed step.

A member's momentum is cut into chunks, each goes through a discrete cosine transform (DCT), and of each the k greatest
coefficients are sent, whole or as signs. What was sent leaves the momentum. All take the mean of what all sent, go back
through the transform, and step by the learning rate in the direction of its signs. (Peng et al., "DeMo: Decoupled
momentum optimization", 2024; the decay and the lookahead are those of DisTrO.)

Shared by all members: theta. A member's own: the momentum. Until the mean is there a member may compute on a lookahead,
theta after a step in the direction of what it sent itself. The lookahead is a copy: undone by subtraction it would
leave other last bits with each member.

    n  elements of all tensors      c  chunks      k  coefficients that are kept of a chunk
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from neurogrid.training.optimizers.vectors import check_finite, check_vector, load_vectors

__all__ = ["ChunkedDct", "Coefficients", "Distro"]

# Below this, times the greatest coefficient, a direction counts as zero. Signs that cancel exactly, as they often do in
# one bit, would otherwise be what the rounding of a machine makes of them: 1e-16, in float64.
ZERO = 1e-9


@dataclass(frozen=True)
class Coefficients:
    """Coefficients that a member sends: some of all n, chunk by chunk, k of each (all of a chunk that has fewer).

    Attributes:
        positions: int64 [m], places among all coefficients.
        values: float32 [m]; in one bit, 1 or -1, or all 0 in a chunk of which nothing is sent.
    """

    positions: Tensor
    values: Tensor


class ChunkedDct:
    """The orthonormal DCT-II of a tensor in chunks: of rows and columns for matrices, else of elements.

    A side of a chunk is the greatest divisor of the tensor's side up to `max_side`. Dimensions before the last two are
    rows, too.

    Args:
        shape: of the tensor.
        max_side: elements.

    Attributes:
        num_chunks: of the tensor.
        chunk_size: coefficients of a chunk.
    """

    def __init__(self, shape: Sequence[int], max_side: int) -> None:
        columns = shape[-1] if shape else 1
        rows = math.prod(shape[:-1])
        self._shape = tuple(shape)
        self._sides = _side(rows, max_side), _side(columns, max_side)
        self._blocks = rows // self._sides[0], columns // self._sides[1]
        self._bases = _basis(self._sides[0]), _basis(self._sides[1])
        self.num_chunks = self._blocks[0] * self._blocks[1]
        self.chunk_size = self._sides[0] * self._sides[1]

    def encode(self, tensor: Tensor) -> Tensor:
        """The coefficients of `tensor`: [chunks, chunk_size] in its dtype."""
        (rows, columns), (down, across) = self._bases, self._blocks
        blocks = tensor.reshape(down, self._sides[0], across, self._sides[1]).transpose(1, 2)
        found = rows.to(tensor) @ blocks @ columns.to(tensor).T
        return found.reshape(self.num_chunks, self.chunk_size)

    def decode(self, coefficients: Tensor) -> Tensor:
        """The tensor with these coefficients [chunks, chunk_size], in their dtype."""
        (rows, columns), (down, across) = self._bases, self._blocks
        blocks = coefficients.reshape(down, across, *self._sides)
        found = rows.to(coefficients).T @ blocks @ columns.to(coefficients)
        return found.transpose(1, 2).reshape(self._shape)


class Distro:
    """A member's momentum, and the weights that all members share.

    A step is `encode`, the exchange of coefficients (elsewhere), `mean` and `commit`; or `roll_back` where the exchange
    failed.

    Args:
        theta: float32 [n], copied.
        shapes: of the tensors in it, in their order.
        top_k: coefficients that are sent of a chunk.
        max_side: of a chunk.
        decay: of the momentum at each step.
        one_bit: send signs in place of values.

    Attributes:
        theta: float32 [n], the weights at the last commit. Not to be written to.

    Raises:
        ValueError: a setting is out of its range, or shapes and theta do not fit.
    """

    def __init__(
        self,
        theta: Tensor,
        shapes: Sequence[Sequence[int]],
        *,
        top_k: int,
        max_side: int = 64,
        decay: float = 0.999,
        one_bit: bool = False,
    ) -> None:
        check_vector("theta", theta, sum(math.prod(shape) for shape in shapes))
        if top_k < 1 or max_side < 1:
            raise ValueError(f"top_k and max_side must be at least 1, not {top_k} and {max_side}")
        if not 0 <= decay <= 1:
            raise ValueError(f"the decay must be in [0, 1], not {decay}")
        self.theta = theta.detach().clone()
        self._momentum = torch.zeros_like(self.theta)
        self._transforms = [ChunkedDct(shape, max_side) for shape in shapes]
        self._sizes = [math.prod(shape) for shape in shapes]
        self._top_k = top_k
        self._decay = decay
        self._one_bit = one_bit
        self._sent: tuple[Coefficients, Coefficients, float] | None = None

    @torch.no_grad()
    def encode(self, gradient: Tensor, lr: float) -> Coefficients:
        """Adds a gradient to the momentum, and chooses what to send of it.

        Args:
            gradient: float32 [n].
            lr: of this step, above 0, the same with all members.

        Raises:
            ValueError: the step before was neither committed nor rolled back, or an argument is wrong.
            NotFiniteError: an element of the gradient is infinite or no number. Nothing was changed.
        """
        if self._sent is not None:
            raise ValueError("the step before is to be committed or rolled back first")
        if not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"the learning rate must be finite and above 0, not {lr}")
        check_vector("the gradient", gradient, self.theta.numel())
        check_finite("the gradient", gradient)
        self._momentum.mul_(self._decay).add_(gradient, alpha=lr)
        positions, values, signs, start = [], [], [], 0
        for transform, piece in zip(
            self._transforms, self._momentum.split(self._sizes), strict=True
        ):
            coefficients_CS = transform.encode(piece)
            k = min(self._top_k, transform.chunk_size)
            places_CK = coefficients_CS.abs().topk(k, dim=1).indices.sort(dim=1).values
            # Of zeros none is the greatest: on all machines it is the first that are named, and nothing that is sent.
            is_empty_C1 = ~coefficients_CS.any(dim=1, keepdim=True)
            places_CK = torch.where(is_empty_C1, torch.arange(k, device=piece.device), places_CK)
            first = torch.arange(transform.num_chunks, device=piece.device) * transform.chunk_size
            positions.append((places_CK + first.unsqueeze(1) + start).flatten())
            values_CK = coefficients_CS.gather(1, places_CK)
            values.append(values_CK.flatten())
            signs.append(
                torch.where(values_CK < 0, -1.0, 1.0).masked_fill_(is_empty_C1, 0.0).flatten()
            )
            start += piece.numel()
        whole = Coefficients(torch.cat(positions), torch.cat(values))
        sent = whole
        if self._one_bit:
            sent = Coefficients(whole.positions, torch.cat(signs))
        self._sent = whole, sent, lr
        return sent

    @torch.no_grad()
    def look_ahead(self, out: Tensor) -> None:
        """Writes theta after a step in the direction of what this member sent itself into `out`, float32 [n].

        Raises:
            ValueError: nothing is under way, or `out` has another shape or dtype.
        """
        _, sent, lr = self._under_way()
        check_vector("the buffer of the lookahead", out, self.theta.numel())
        torch.add(self.theta, self._direction(self._dense([sent])), alpha=-lr, out=out)

    @torch.no_grad()
    def remaining(self) -> Tensor:
        """The momentum as `commit` will leave it: float32 [n], new, with the same bits.

        Raises:
            ValueError: nothing is under way.
        """
        whole, _, _ = self._under_way()
        return self._momentum - self._decoded(self._dense([whole]))

    def mean(self, members: Sequence[Coefficients]) -> Tensor:
        """The mean over what the members sent, added up in their order: float32 [n], of all coefficients, and finite.

        Raises:
            ValueError: nobody, or coefficients that this configuration does not send.
            NotFiniteError: a value is infinite or no number.
        """
        if not members:
            raise ValueError("a mean over nobody")
        for coefficients in members:
            self.check(coefficients)
        mean = self._dense(members).div_(len(members))
        if bool(torch.isfinite(mean).all()):
            return mean
        # Two members suffice for a sum that float32 has not: what nobody could apply, would be the end of all.
        return self._dense(members, torch.float64).div_(len(members)).float()

    @torch.no_grad()
    def commit(self, mean: Tensor) -> None:
        """Applies the mean that all members agreed on, and takes what this member sent out of its momentum.

        Args:
            mean: float32 [n], as `mean` gives it.

        Raises:
            ValueError: nothing is under way, or a shape or a dtype is wrong. Nothing was changed.
            NotFiniteError: an element is infinite or no number. Nothing was changed.
        """
        whole, _, lr = self._under_way()
        check_vector("the mean", mean, self.theta.numel())
        check_finite("the mean", mean)
        self._momentum.sub_(self._decoded(self._dense([whole])))
        self.theta.add_(self._direction(mean), alpha=-lr)
        self._sent = None

    @torch.no_grad()
    def apply(self, mean: Tensor, lr: float) -> None:
        """Applies a mean that nothing of this member is in; the momentum is what it was.

        Args:
            mean: float32 [n], as `mean` gives it.
            lr: of the step that the others made, above 0.

        Raises:
            ValueError: a step of this member is under way, or an argument is wrong. Nothing was changed.
            NotFiniteError: an element is infinite or no number. Nothing was changed.
        """
        if self._sent is not None:
            raise ValueError("the step before is to be committed or rolled back first")
        if not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"the learning rate must be finite and above 0, not {lr}")
        check_vector("the mean", mean, self.theta.numel())
        check_finite("the mean", mean)
        self.theta.add_(self._direction(mean), alpha=-lr)

    @torch.no_grad()
    def take_back(
        self, applied: Sequence[Coefficients], left: Sequence[Coefficients], lr: float
    ) -> None:
        """Takes the step of all that were in a mean out of the weights, and makes that of the ones that stay.

        On all machines the same bits come of it, for the difference of two signs times the rate is exact.

        Args:
            applied: what a step was made of.
            left: what of that stays; may be nothing.
            lr: of that step.

        Raises:
            ValueError: nobody, or coefficients that this configuration does not send.
        """
        change = self._direction(self.mean(applied))
        if left:
            change -= self._direction(self.mean(left))
        self.theta.add_(change, alpha=lr)

    def roll_back(self) -> None:
        """Forgets what was sent: all of it stays in the momentum, the step's gradient too, and nothing is applied."""
        self._under_way()
        self._sent = None

    def check(self, coefficients: Coefficients) -> None:
        """Refuses what `encode` of this configuration cannot have given.

        Raises:
            ValueError: number, order or places of the coefficients are wrong, or there is more than a sign in one bit.
            NotFiniteError: a value is infinite or no number.
        """
        num = sum(t.num_chunks * min(self._top_k, t.chunk_size) for t in self._transforms)
        check_vector("the values of coefficients", coefficients.values, num)
        check_finite("the values of coefficients", coefficients.values)
        positions = coefficients.positions
        if positions.dtype != torch.int64 or tuple(positions.shape) != (num,):
            raise ValueError(f"positions must be int64 [{num}], not {positions.dtype}")
        start = taken = 0
        for transform in self._transforms:
            k, chunks = min(self._top_k, transform.chunk_size), transform.num_chunks
            own_CK = positions[taken : taken + chunks * k].view(chunks, k)
            first = torch.arange(chunks, device=own_CK.device) * transform.chunk_size + start
            places_CK = own_CK - first.unsqueeze(1)
            if bool(((places_CK < 0) | (places_CK >= transform.chunk_size)).any()):
                raise ValueError("a coefficient lies outside its chunk")
            if bool((places_CK.diff(dim=1) <= 0).any()):
                raise ValueError("the coefficients of a chunk must ascend, each once")
            if self._one_bit:
                values_CK = coefficients.values[taken : taken + chunks * k].view(chunks, k)
                is_empty_C = ~values_CK.any(dim=1)
                if bool((values_CK[~is_empty_C].abs() != 1).any()):
                    raise ValueError("a coefficient in one bit is neither 1 nor -1")
                if bool((places_CK[is_empty_C] != torch.arange(k, device=places_CK.device)).any()):
                    raise ValueError("a chunk of which nothing is sent names others than its first")
            start += chunks * transform.chunk_size
            taken += chunks * k

    @property
    def chunks(self) -> tuple[tuple[int, int, int], ...]:
        """Numbers of chunks, of coefficients in a chunk, and of those that are sent of it, for each tensor."""
        return tuple(
            (each.num_chunks, each.chunk_size, min(self._top_k, each.chunk_size))
            for each in self._transforms
        )

    def state_vectors(self) -> list[Tensor]:
        """State that all members share, as the live buffer: theta."""
        return [self.theta]

    def load(self, vectors: Sequence[Tensor]) -> None:
        """Takes over the shared state of another member; the momentum is what it was.

        Raises:
            ValueError: number, shape or dtype of the vectors is wrong. Nothing was taken over.
            NotFiniteError: an element is infinite or no number. Nothing was taken over.
        """
        load_vectors(self.state_vectors(), vectors)

    def own_vectors(self) -> list[Tensor]:
        """State of this member alone, as the live buffer: the momentum. For its own checkpoint."""
        return [self._momentum]

    def load_own(self, vectors: Sequence[Tensor]) -> None:
        """Takes over what `own_vectors` gave, as `load` does."""
        load_vectors(self.own_vectors(), vectors)

    def _under_way(self) -> tuple[Coefficients, Coefficients, float]:
        if self._sent is None:
            raise ValueError("nothing is under way: encode a gradient first")
        return self._sent

    def _dense(self, members: Sequence[Coefficients], dtype: torch.dtype = torch.float32) -> Tensor:
        """The sum over members, of all coefficients: [n]."""
        total = torch.zeros_like(self.theta, dtype=dtype)
        for coefficients in members:
            # Each position once a member, so the order of additions is that of the members.
            total[coefficients.positions] += coefficients.values.to(dtype)
        return total

    def _decoded(self, dense: Tensor) -> Tensor:
        pieces = zip(self._transforms, dense.split(self._sizes), strict=True)
        return torch.cat([transform.decode(piece).flatten() for transform, piece in pieces])

    def _direction(self, dense: Tensor) -> Tensor:
        """The signs of the tensor with these coefficients: float32 [n] of -1, 0 and 1, alike on all machines."""
        signs = []
        for transform, piece in zip(self._transforms, dense.split(self._sizes), strict=True):
            exact = transform.decode(piece.double()).flatten()
            is_zero = exact.abs() <= ZERO * piece.abs().max()
            signs.append(exact.sign().masked_fill_(is_zero, 0.0).float())
        return torch.cat(signs)


def _side(length: int, max_side: int) -> int:
    """The greatest divisor of `length` up to `max_side`."""
    return next(side for side in range(min(length, max_side), 0, -1) if length % side == 0)


@cache
def _basis(size: int) -> Tensor:
    """The orthonormal DCT-II as a matrix: float64 [frequencies, elements]. Not to be written to."""
    element = torch.arange(size, dtype=torch.float64)
    frequency = element.unsqueeze(1)
    basis = torch.cos(math.pi / size * (element + 0.5) * frequency) * math.sqrt(2 / size)
    basis[0] = math.sqrt(1 / size)
    return basis
