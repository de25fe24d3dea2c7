"""A ticket is all that is typed: on a machine behind a NAT, in a network namespace of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.coordinator_process import start_coordinator, ticket_of
from tests.e2e.namespaces.netns import Machine, Network, network
from tests.e2e.preloaded import COORDINATOR, WORKER, run
from tests.e2e.support import start_worker
from tests.e2e.test_nat_namespaces import home, why_no_nat


@pytest.fixture
def net() -> Iterator[Network]:
    if reason := why_no_nat():
        pytest.skip(reason)
    with network() as made:
        yield made


def more_tickets(machine: Machine, cluster: Path) -> list[str]:
    """By what to join, as `--ticket` prints it while a coordinator runs."""
    ended = run(machine.command([*COORDINATOR, "--cluster", str(cluster), "--ticket"]))
    assert ended.returncode == 0, ended.stderr
    given, *command = ended.stdout.split()
    assert command == ["neurogrid", "join"]
    return ["--join", given.removeprefix("NEUROGRID_TICKET=")]


def generates(coordinator_of: Machine, *args: str, typed: Sequence[str] = ()) -> str:
    """Run a coordinator to its end, which has to be a good one; what it wrote."""
    command = coordinator_of.command(COORDINATOR)
    with start_coordinator(*args, "--min-peers", "1", command=command, where=typed) as coordinator:
        status, text = coordinator.wait_end()
        assert (status, bool(text.strip())) == (0, True), coordinator.lines
        return text


def test_a_worker_behind_a_nat_joins_by_ticket_and_comes_back_without(
    net: Network, tmp_path: Path
) -> None:
    internet = net.lan(1)
    (public,) = internet.machines
    at_home = home(net, internet, 1)
    cluster, member = tmp_path / "cluster", tmp_path / "member"
    new = ("--new-cluster", str(cluster), "--min-peers", "1")
    with start_coordinator(*new, command=public.command(COORDINATOR), where=()) as coordinator:
        ticket_of(coordinator)
        typed = more_tickets(public, cluster)
        keeps = ("--cluster", str(member))
        with start_worker(tmp_path, *typed, *keeps, command=at_home.command(WORKER)) as worker:
            status, text = coordinator.wait_end()
            assert (status, bool(text.strip())) == (0, True), coordinator.lines
            joined = f"{worker.peer_id} has joined as worker, by a ticket"
            assert any(joined in line for line in coordinator.lines)
    # It is a member now, and knows where to go.
    with start_worker(tmp_path, *keeps, command=at_home.command(WORKER)) as again:
        assert again.peer_id == worker.peer_id
        assert generates(public, "--cluster", str(cluster)) == text


def test_a_coordinator_behind_a_nat_is_joined_through_its_relay(
    net: Network, tmp_path: Path
) -> None:
    internet = net.lan(1)
    (public,) = internet.machines
    homes = [home(net, internet, number) for number in (1, 2)]
    relays = ("--insecure", "--relay-service", "--port", "4001")
    with start_worker(tmp_path, *relays, command=public.command(WORKER)) as relay:
        address = f"/ip4/{public.address}/tcp/4001/p2p/{relay.peer_id}"
        new = ("--new-cluster", str(tmp_path / "cluster"), "--min-peers", "1", "--relay", address)
        with start_coordinator(
            *new, command=homes[0].command(COORDINATOR), where=()
        ) as coordinator:
            join = ("--join", ticket_of(coordinator))
            with start_worker(tmp_path, *join, command=homes[1].command(WORKER)) as worker:
                status, text = coordinator.wait_end()
                assert (status, bool(text.strip())) == (0, True), (coordinator.lines, worker.log)


def test_workers_that_dialled_the_coordinator_reach_each_other(
    net: Network, tmp_path: Path
) -> None:
    """They listen on every interface; what they say of themselves has to be of use on another machine."""
    here, *others = net.lan(3).machines
    new = ("--new-cluster", str(tmp_path / "cluster"), "--min-peers", "2", "--stages", "2")
    quiet = ("--disable-mdns",)
    with ExitStack() as stack:
        coordinator = stack.enter_context(
            start_coordinator(*new, *quiet, command=here.command(COORDINATOR), where=())
        )
        join = ("--join", ticket_of(coordinator), *quiet)
        for machine in others:
            stack.enter_context(start_worker(tmp_path, *join, command=machine.command(WORKER)))
        status, text = coordinator.wait_end()
        assert (status, bool(text.strip())) == (0, True), coordinator.lines
        assert not [line for line in coordinator.lines if "cannot reach" in line]
