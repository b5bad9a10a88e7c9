"""The engine on devices that run late and in any order: right bytes, no event too few or too many.

``--schedules`` says how many programs are tried in each of six ways, each in one schedule of its
seed. ``--first-schedule`` is the first seed; with ``--schedules 1`` it repeats one that failed.
"""

import gc
from random import Random

import pytest
from simulated_machine import DeadlockError
from simulated_programs import BLOCKS, MODES, WrongBytesError, random_program
from simulated_ranks import Group, run
from simulated_shadow import RaceError
from simulated_wire import Manners

EACH_MODE = pytest.mark.parametrize("mode", MODES)

# What orders the streams, seen from one rank, and why nothing else does.
ENGINE_EDGES = {
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
# What orders a pool's copies, which are made on a stream of their own by threads of their own.
POOL_EDGES = {
    "marked": "the forward that wrote the blocks comes before they are copied for a put",
    "stored": "that copy comes before the store reads it, and before the blocks are let go",
    "loaded": "the copy into the cache comes before anybody hears that it is there",
    "gate": "a step's layer is loaded before its owner sends it and reads it",
    "received": "blocks that came in the background are there before the forward that reads them",
    "freed": "the forwards that used a load's blocks come before it",
    "held": "a put's copy comes before its blocks are written again, or loaded",
}


@pytest.fixture(autouse=True, scope="module")
def _few_objects_for_the_garbage_collector():
    gc.freeze()
    yield
    gc.unfreeze()


def try_all(seeds, run_one):
    """Run one schedule for each seed; a failure says which it was."""
    for seed in seeds:
        try:
            run_one(seed)
        except AssertionError as error:
            error.add_note(f"--first-schedule {seed} --schedules 1 repeats it")
            raise


@EACH_MODE
@pytest.mark.parametrize("host_blocking", [False, True], ids=["streams", "host-blocking"])
@pytest.mark.timeout(0)
def test_every_layer_reads_the_right_bytes_on_every_rank(request, mode, host_blocking):
    first, count = (request.config.getoption(f"--{o}") for o in ("first-schedule", "schedules"))
    try_all(
        range(first, first + count),
        lambda seed: run(random_program(seed, mode), seed, host_blocking=host_blocking),
    )


@pytest.mark.parametrize(("mode", "number"), [("full", 9), ("compact", 17)])
def test_one_program_survives_many_schedules(mode, number):
    program = random_program(number, mode, pool=True)
    assert len(program.layout.owners) >= 4
    assert program.layout.group_size >= 3
    assert {load.in_step for load in program.loads} == {True, False}
    assert program.puts
    try_all(range(40), lambda seed: run(program, seed))


@EACH_MODE
def test_no_host_waits_for_a_device_without_a_pool(mode):
    try_all(
        range(20), lambda seed: run(random_program(seed, mode, pool=False), seed, hosts_first=True)
    )


@EACH_MODE
@pytest.mark.parametrize("edge", ENGINE_EDGES | POOL_EDGES)
def test_without_any_one_edge_somebody_reads_wrong_bytes(mode, edge):
    for seed in range(400):
        program = random_program(seed, mode, pool=edge in POOL_EDGES)
        try:
            run(program, seed, without=edge, find_races=False)
        except WrongBytesError:
            break
    else:
        pytest.fail(f"nobody misses the edge {edge!r}")
    with pytest.raises((RaceError, WrongBytesError)):
        run(program, seed, without=edge)


@EACH_MODE
def test_the_list_of_edges_is_complete(mode):
    seen = set()
    for seed in range(20):
        seen |= run(random_program(seed, mode), seed, find_races=False).machine.edges
    assert seen == ENGINE_EDGES.keys() | POOL_EDGES.keys()


def test_events_are_reserved_at_start_and_none_are_made_in_a_forward():
    for seed in range(10):
        group = run(random_program(seed, "full"), seed)
        slots = min(len(group.program.layout.owners), 2)
        assert {rank.device.events for rank in group.ranks} == {2 + slots}


@EACH_MODE
def test_collectives_that_spin_alone_on_a_device_stop_all_ranks_unless_hosts_order_them(mode):
    """NCCL's broadcast beside the model's all-reduce: NCCL_LAUNCH_ORDER_IMPLICIT orders them."""
    alone, ordered = (Manners(meets=True, alone=True, in_order=o) for o in (False, True))
    stopped = 0
    for seed in range(20):
        program = random_program(seed, mode)
        run(program, seed, manners=ordered)
        try:
            run(program, seed, manners=alone)
        except DeadlockError:
            stopped += 1
    assert stopped


@EACH_MODE
@pytest.mark.parametrize("host_blocking", [False, True], ids=["streams", "host-blocking"])
def test_a_forward_that_fails_in_the_middle_leaves_no_wrong_bytes_behind(mode, host_blocking):
    def run_one(seed):
        program = random_program(seed, mode)
        dying = Random(seed).randrange(program.layout.group_size)
        group = Group(program, seed, host_blocking=host_blocking, dying_rank=dying)
        group.run_to_its_death()

    try_all(range(40), run_one)


@EACH_MODE
def test_the_programs_cover_what_they_should(mode):
    programs = [random_program(seed, mode) for seed in range(100)]
    layouts = [program.layout for program in programs]
    assert {layout.group_size for layout in layouts} == {2, 3, 4}
    assert {len(layout.owners) for layout in layouts} == set(range(1, 8))
    owned = [[layout.owners.count(r) for r in range(layout.group_size)] for layout in layouts]
    assert any(0 in counts for counts in owned)
    assert any(max(counts) > min(counts) > 0 for counts in owned)
    components = {len(b.components) for layout in layouts for b in layout.stage.targets}
    assert components == ({1, 2} if mode == "compact" else {1, 2, 3})
    assert {bool(layout.stage.drafts) for layout in layouts} == {True, False}
    forwards = [f for program in programs for f in program.forwards]
    assert {f.history for f in forwards if f.number} == {True, False}
    assert {len(f.active) for f in forwards} == set(range(1, 1 + BLOCKS if mode == "full" else 5))
    loads = [load for program in programs for load in program.loads]
    assert {load.use - load.begin for load in loads} == {0, 1, 2}
    assert any(program.puts for program in programs)
    assert any(not program.puts and not program.loads for program in programs)
