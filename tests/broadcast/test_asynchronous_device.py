"""The engine on devices that run late and in any order: right bytes, and no event too many."""

import pytest
import torch
from simulated_device import Machine, RaceError, SimulatedDevice
from simulated_ranks import WrongBytesError, random_scenario, run

SEEDS = 30
# Compact with one block table for all components of a layer is the last one.
MODES = ["full", "compact", "one numbering"]

# What orders the streams, seen from one rank, and why nothing else does.
EDGES = {
    "ready": "sources, indices and the last forward's readers come before its transfers",
    "drained, receiver": "the slot's last reader comes before the bundle that is received",
    "drained, owner": "the slot's last reader comes before the gather, and before later bundles",
    "joined, receiver": "the transfer stream's waits come before the transport's receive",
    "joined, owner": "the gather and the waits come before the transport's send",
    "landed, receiver": "the receive comes before the arrival is recorded",
    "landed, owner": "the send comes before the arrival is recorded, and before a slot's next use",
    "arrived, receiver": "the bundle comes before its reader",
    "arrived, owner": "the gather or send of the source comes before the layer's writes",
}


def scenarios(mode, seeds):
    return [(seed, random_scenario(seed, mode)) for seed in range(seeds)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host_blocking", [False, True], ids=["streams", "host-blocking"])
def test_every_layer_reads_the_right_bytes_on_every_rank(mode, host_blocking):
    for seed, scenario in scenarios(mode, SEEDS):
        try:
            run(scenario, seed, host_blocking=host_blocking)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("mode", MODES)
def test_one_program_survives_many_schedules(mode):
    scenario = random_scenario(15, mode)
    assert len(scenario.layout.owners) >= 5
    for seed in range(15):
        run(scenario, seed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edge", EDGES)
def test_without_any_one_edge_a_layer_reads_wrong_bytes(mode, edge):
    for seed, scenario in scenarios(mode, 6 * SEEDS):
        try:
            run(scenario, seed, without=edge, find_races=False)
        except WrongBytesError:
            break
    else:
        pytest.fail(f"nobody misses the edge {edge!r}")
    with pytest.raises((RaceError, WrongBytesError)):
        run(scenario, seed, without=edge)


@pytest.mark.parametrize("mode", MODES)
def test_the_list_of_edges_is_complete(mode):
    seen = set()
    for seed, scenario in scenarios(mode, 20):
        for rank in run(scenario, seed, find_races=False):
            seen |= rank.device.edges
    assert seen == set(EDGES)


def test_events_are_reserved_at_start_and_none_are_made_in_a_forward():
    for seed, scenario in scenarios("full", 10):
        slots = min(len(scenario.layout.owners), 2)
        assert {r.device.events for r in run(scenario, seed)} == {2 + slots}


@pytest.mark.parametrize("mode", MODES)
def test_the_scenarios_cover_what_they_should(mode):
    layouts = [scenario.layout for _, scenario in scenarios(mode, SEEDS)]
    assert {layout.group_size for layout in layouts} == {2, 3, 4}
    assert {len(layout.owners) for layout in layouts} == set(range(1, 8))
    owned = [[layout.owners.count(r) for r in range(layout.group_size)] for layout in layouts]
    assert any(0 in counts for counts in owned)
    assert any(max(counts) > min(counts) > 0 for counts in owned)
    components = {len(b.components) for layout in layouts for b in layout.stage.targets}
    assert components == ({1, 2, 3, 4} if mode == "one numbering" else {1, 2})


def test_work_waits_for_the_mark_that_an_event_had_when_the_wait_was_called():
    for seed in range(30):
        machine, done = Machine(seed), []
        device = SimulatedDevice(machine, 0)
        device.roles = {"compute": "", "transfer": ""}
        event = device.event()
        device.queue("first", lambda done=done: done.append("first"))
        event.record()
        with device.transfers():
            event.wait()
            device.queue("second", lambda done=done: done.append("second"))
            event.record()  # later waits see this, the one above does not
        device.queue("third", lambda done=done: done.append("third"))
        machine.run_all()
        assert done.index("first") < done.index("second")


def test_torch_writes_on_the_transfer_stream_are_late_and_new_tensors_are_refused():
    machine = Machine(0)
    device = SimulatedDevice(machine, 0)
    source, target = torch.arange(4), torch.zeros(2, dtype=torch.int64)
    with device.transfers():
        torch.index_select(source, 0, torch.tensor([3, 1]), out=target)
        with pytest.raises(NotImplementedError, match="new tensor on the transfer stream"):
            source.clone()
    assert target.tolist() == [0, 0]
    machine.run_all()
    assert target.tolist() == [3, 1]


def test_accesses_in_no_order_are_found_whatever_the_schedule():
    for seed in range(10):
        machine = Machine(seed)
        device = SimulatedDevice(machine, 0)
        row = torch.zeros(4)
        device.queue("writes", lambda row=row: row.fill_(1), writes=[row])
        with device.transfers():
            device.queue("reads", lambda: None, reads=[row[2:]])
        with pytest.raises(RaceError, match="in no order"):
            machine.run_all()


def test_work_that_can_never_run_is_a_deadlock():
    machine = Machine(0)
    device = SimulatedDevice(machine, 0)
    device.roles = {"compute": ""}
    device.order("a send", device.compute, machine.operation("that nobody started"))
    with pytest.raises(AssertionError, match=r"deadlock.*that nobody started"):
        machine.run_all()
