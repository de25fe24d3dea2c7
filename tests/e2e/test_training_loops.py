"""Loops of one's own that train together: members in threads of this process, over TCP on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import pytest
import torch
from torch import Tensor, nn

from neurogrid.errors import ConfigurationError, PeerRefusedError
from neurogrid.training.averaging.codecs import parse_codec
from neurogrid.training.averaging.groups import GroupError
from neurogrid.training.loops import Run, join_run, open_run
from neurogrid.training.wire import GroupSettings

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
TIMEOUT = 60.0
LR = 0.1


def model() -> nn.Module:
    """The same weights each time; torch's own seed is one for all threads."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return net


def batch(member: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * member + step)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 2, generator=generator)


def loss_of(net: nn.Module, member: int, step: int) -> Tensor:
    inputs, wanted = batch(member, step)
    return nn.functional.mse_loss(net(inputs), wanted)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def train(run: Run, net: nn.Module, member: int, steps: range) -> Tensor:
    for step in steps:
        loss_of(net, member, step).backward()
        run.step(samples=5)
    return flat(net)


def results(futures: Sequence[Future[Tensor]]) -> list[Tensor]:
    """What all members have in the end; the first error of any, before the others' time for it is over."""
    for future in as_completed(futures, TIMEOUT):
        future.result()
    return [future.result() for future in futures]


class Members:
    """Members, each with a thread of its own; the first founds the run."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.invitation: Future[str] = Future()

    def found(
        self,
        number: int,
        work: Callable[[Run, nn.Module], Tensor],
        *,
        codec: str = "f32",
        **rules: object,
    ) -> Future[Tensor]:
        def run_it() -> Tensor:
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            settings = GroupSettings(min_members=number, grace=2.0, codec=codec)
            with open_run(
                net,
                optimizer,
                settings=settings,
                listen=LISTEN,
                timeout=TIMEOUT,
                **rules,  # type: ignore[arg-type]
            ) as run:
                self.invitation.set_result(run.invitation)
                return work(run, net)

        return self._pool.submit(run_it)

    def join(self, work: Callable[[Run, nn.Module], Tensor]) -> Future[Tensor]:
        def run_it() -> Tensor:
            net = model()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.zero_()  # those of the run take their place
            optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            with join_run(self.invitation.result(TIMEOUT), net, optimizer, timeout=TIMEOUT) as run:
                return work(run, net)

        return self._pool.submit(run_it)


def simulate(
    members: int,
    num_steps: int,
    every: int,
    lr: float,
    momentum: float,
    codec: str,
    feedback: float,
) -> Tensor:
    """The same in one process: DiLoCo, with torch's own SGD as the outer step."""
    theta0, form = flat(model()), parse_codec(codec)
    errors = [torch.zeros_like(theta0) for _ in range(members)]
    outer = torch.optim.SGD([theta0], lr=lr, momentum=momentum, nesterov=momentum > 0)
    nets = [model() for _ in range(members)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=LR) for net in nets]
    for start in range(0, num_steps, every):
        differences = []
        for number, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            nn.utils.vector_to_parameters(theta0.clone(), net.parameters())
            for step in range(start, start + every):
                loss_of(net, number, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            due = flat(net) - theta0 + errors[number]
            differences.append(form.decode(form.encode(due), len(due)))
            errors[number] = feedback * (due - differences[-1])
        theta0.grad = -sum(differences) / members  # type: ignore[assignment]
        outer.step()
    return theta0


@pytest.mark.parametrize(
    ("every", "lr", "momentum", "codec", "feedback"),
    [
        pytest.param(1, 1.0, 0.0, "f32", 0.0, id="data parallel"),
        pytest.param(4, 0.7, 0.9, "f32", 0.0, id="diloco"),
        pytest.param(2, 1.0, 0.0, "topk:16", 0.95, id="sparseloco"),
    ],
)
def test_it_is_what_one_process_computes(
    every: int, lr: float, momentum: float, codec: str, feedback: float
) -> None:
    num_steps = 12
    with ThreadPoolExecutor(3) as pool:
        members = Members(pool)

        def work(number: int) -> Callable[[Run, nn.Module], Tensor]:
            return lambda run, net: train(run, net, number, range(num_steps))

        first = members.found(
            3,
            work(0),
            codec=codec,
            every=every,
            outer_lr=lr,
            outer_momentum=momentum,
            feedback=feedback,
        )
        others = [members.join(work(number)) for number in (1, 2)]
        weights = results([first, *others])
    for other in weights[1:]:
        assert torch.equal(weights[0], other)
    expected = simulate(3, num_steps, every, lr, momentum, codec, feedback)
    torch.testing.assert_close(weights[0], expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(weights[0], flat(model()), atol=1e-3)


def test_a_newcomer_goes_on_where_the_others_are() -> None:
    both_began = threading.Barrier(3)
    joined = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        members = Members(pool)

        def from_the_start(number: int) -> Callable[[Run, nn.Module], Tensor]:
            def work(run: Run, net: nn.Module) -> Tensor:
                both_began.wait(TIMEOUT)
                train(run, net, number, range(6))
                assert run.round == 3
                assert joined.wait(TIMEOUT)
                return train(run, net, number, range(6, 10))

            return work

        def later(run: Run, net: nn.Module) -> Tensor:
            assert run.rules.every == 2
            assert run.round == 3
            assert run.num_samples == 60
            joined.set()
            return train(run, net, 2, range(6, 10))

        first = members.found(2, from_the_start(0), every=2)
        second = members.join(from_the_start(1))
        both_began.wait(
            TIMEOUT
        )  # the group is founded by the two, and by no third that came before
        third = pool.submit(_when, members, later, first, second)
        weights = results([first, second, third])
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def _when(
    members: Members, work: Callable[[Run, nn.Module], Tensor], *running: Future[Tensor]
) -> Tensor:
    """Join when three rounds are over; who comes before that goes, and comes again."""
    net = model()
    invitation = members.invitation.result(TIMEOUT)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    while True:
        with join_run(invitation, net, optimizer, timeout=TIMEOUT) as run:
            if run.round == 3:
                return work(run, net)
        assert not any(future.done() for future in running)


def test_another_model_is_refused_by_name() -> None:
    with open_run(model(), listen=LISTEN) as run:
        other = nn.Linear(3, 3)
        with (
            pytest.raises(PeerRefusedError, match="names, shapes or their order differ"),
            join_run(run.invitation, other, timeout=TIMEOUT),
        ):
            pass


def test_what_leads_nowhere_is_said() -> None:
    with (
        pytest.raises(ConfigurationError, match="a ticket leads to another machine"),
        join_run("/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWA", model()),
    ):
        pass
    with (
        pytest.raises(ConfigurationError, match="ticket"),
        join_run("no ticket", model()),
    ):
        pass
    with open_run(model(), listen=LISTEN) as run:
        gone = run.invitation
    with (
        pytest.raises(GroupError, match="no group was joined within 1 s"),
        join_run(gone, model(), timeout=1.0),
    ):
        pass
