"""The simulated machine itself: what it lets run when, and what it notices."""

import pytest
import torch
from simulated_device import SimulatedDevice
from simulated_machine import DeadlockError, Machine
from simulated_shadow import RaceError


def make(seed=0, **how):
    machine = Machine(seed)
    return machine, SimulatedDevice(machine, "rank 0", machine.stream("compute"), **how)


def record(machine, event, doing="arm"):
    machine.running.doing = doing
    event.record()


def test_work_waits_for_the_mark_that_an_event_had_when_the_wait_was_called():
    for seed in range(30):
        machine, device = make(seed)
        done = []
        event = device.event()
        device.queue("first", lambda done=done: done.append("first"))
        record(machine, event)
        with device.transfers():
            event.wait()
            device.queue("second", lambda done=done: done.append("second"))
            event.record()  # later waits see this, the one above does not
        device.queue("third", lambda done=done: done.append("third"))
        machine.run()
        assert done.index("first") < done.index("second")


def test_streams_and_hosts_come_in_every_order_that_is_left():
    orders = set()
    for seed in range(200):
        machine, device = make(seed)
        done = []

        def steps(machine=machine, done=done):
            done.append("host")
            yield lambda: "b" in done
            done.append("host again")

        machine.host("host", steps())
        device.queue("a", lambda done=done: done.append("a"))
        with device.transfers():
            device.queue("b", lambda done=done: done.append("b"))
        machine.run()
        orders.add(" ".join(done))
    assert orders == {
        "host a b host again", "host b a host again", "host b host again a",
        "a host b host again", "a b host host again",
        "b host a host again", "b host host again a", "b a host host again",
    }  # fmt: skip


def test_torch_writes_on_the_transfer_stream_are_late_and_new_tensors_are_refused():
    machine, device = make()
    source, target = torch.arange(4), torch.zeros(2, dtype=torch.int64)
    with device.transfers():
        torch.index_select(source, 0, torch.tensor([3, 1]), out=target)
        with pytest.raises(NotImplementedError, match="new tensor on the transfer stream"):
            source.clone()
    assert target.tolist() == [0, 0]
    machine.run()
    assert target.tolist() == [3, 1]


def test_new_tensors_where_they_are_allowed_are_filled_late_too():
    machine, device = make(makes_tensors=True)
    source, target = torch.arange(4), torch.zeros(2, dtype=torch.int64)
    with device.transfers():
        target.copy_(source.index_select(0, torch.tensor([3, 1])))
    source[3] = 7
    assert target.tolist() == [0, 0]
    machine.run()
    assert target.tolist() == [7, 1]


@pytest.mark.parametrize(("row", "race"), [(2, True), (1, False)])
def test_accesses_in_no_order_are_found_whatever_the_schedule(row, race):
    for seed in range(10):
        machine, device = make(seed)
        cache, target = torch.zeros((4, 2)), torch.zeros((2, 2))
        device.queue("writes", lambda c=cache, r=row: c[r].fill_(1), writes=[cache[row]])
        with device.transfers():
            torch.index_select(cache, 0, torch.tensor([0, 2]), out=target)
        if race:
            with pytest.raises(RaceError, match="in no order"):
                machine.run()
        else:
            machine.run()


def test_an_order_that_only_the_hardware_keeps_is_no_order():
    machine, device = make()
    row = torch.zeros(4)
    first = device.queue("writes", lambda: row.fill_(1), writes=[row])
    with device.transfers():
        device.queue("reads", lambda: None, reads=[row]).meets.append(first)
    with pytest.raises(RaceError, match=r"writes wrote what .* reads in no order"):
        machine.run()


def test_a_host_that_has_waited_orders_what_it_queues_later():
    for seed in range(10):
        machine, device = make(seed)
        row = torch.zeros(4)
        first = device.queue("writes", lambda row=row: row.fill_(1), writes=[row])

        def steps(machine=machine, device=device, row=row, first=first):
            machine.wait_for(first)
            with device.transfers():
                device.queue("reads", lambda: None, reads=[row])
            yield

        machine.host("host", steps())
        machine.run()


def test_work_that_can_never_run_is_a_deadlock():
    machine, device = make()
    device.order("a send", device.compute, machine.operation("that nobody started"))
    device.queue("work", lambda: None)
    with pytest.raises(DeadlockError, match=r"deadlock.*that nobody started"):
        machine.run()
