"""The engine's states, against a hand-written transport and device that note every call."""

from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from builders import bundle_stage, equal_stage

from kvpp_connect.broadcast.collective import StreamOrdered
from kvpp_connect.broadcast.engine import BroadcastError, PrefetchEngine
from kvpp_connect.broadcast.payload import FullPayload
from kvpp_connect.errors import LayoutError, PeerError
from kvpp_connect.layout import place_rank, plan_group
from kvpp_connect.platforms.cpu import CpuDevice

BLOCKS = 4


class NotingTransport:
    """Notes starts and waits in order; fails what it is told to."""

    def __init__(self, log):
        self.log = log
        self.started = 0
        self.fail_start = self.fail_wait = None

    def start(self, data, source_rank, gather=None):
        assert gather is None, "whole bundles lie where they are sent from"
        number, self.started = self.started, self.started + 1
        if self.fail_start == number:
            raise PeerError("cannot start")
        self.log.append(("start", number, source_rank, data.numel()))
        return _Pending(self, number)


class _Pending:
    def __init__(self, transport, number):
        self.transport = transport
        self.number = number

    def wait(self):
        if self.transport.fail_wait == self.number:
            raise PeerError("peer gone")
        self.transport.log.append(("wait", self.number))


class NotingDevice:
    """Notes records and waits of events as (call, event, stream); events are numbered."""

    def __init__(self, log):
        self.log = log
        self.stream = "compute"
        self.events = 0

    def event(self):
        self.events += 1
        return _Event(self, self.events - 1)

    @contextmanager
    def transfers(self):
        self.stream = "transfer"
        yield
        self.stream = "compute"


class _Event:
    def __init__(self, device, number):
        self.device = device
        self.number = number

    def record(self):
        self.device.log.append(("record", self.number, self.device.stream))

    def wait(self):
        self.device.log.append(("await", self.number, self.device.stream))


def build(rank=1, stage=None, group_size=2, device=None):
    layout = plan_group(stage or equal_stage(3, 10), group_size)
    placement = place_rank(layout, rank, BLOCKS)
    memory = torch.zeros(placement.total_bytes, dtype=torch.uint8)
    transport = NotingTransport([])
    payload = FullPayload(placement, memory)
    return (
        PrefetchEngine(placement, payload, transport, device or CpuDevice()),
        transport,
        placement,
    )


def run_forward(engine, layers=3):
    engine.arm()
    for ordinal in range(layers):
        engine.acquire(ordinal)
        engine.release(ordinal)
    engine.finish()


def test_a_forward_is_one_layer_ahead_and_never_two():
    engine, transport, placement = build()
    run_forward(engine)
    assert [entry[:2] for entry in transport.log] == [
        ("start", 0), ("wait", 0), ("start", 1), ("wait", 1), ("start", 2), ("wait", 2),
    ]  # fmt: skip
    assert [e[2] for e in transport.log if e[0] == "start"] == [b.owner for b in placement.bundles]


def test_each_broadcast_is_exactly_one_bundle():
    stage = bundle_stage([[5, 3], [5], [5, 3]])
    engine, transport, placement = build(stage=stage)
    run_forward(engine)
    assert [e[3] for e in transport.log if e[0] == "start"] == [
        b.page_bytes * BLOCKS for b in stage.targets
    ]
    sent = sum(b.size for b in placement.bundles if b.owner == placement.rank)
    received = sum(b.size for b in placement.bundles if b.owner != placement.rank)
    assert (engine.counters.sent_bytes, engine.counters.received_bytes) == (sent, received)


def test_many_forwards_run_one_after_the_other():
    engine, transport, _ = build()
    for _ in range(5):
        run_forward(engine)
        assert not engine.armed
    assert engine.counters.forwards == 5
    assert transport.started == 15


def test_a_stage_without_target_layers_has_an_empty_forward():
    engine, transport, _ = build(stage=bundle_stage([], drafts=[10]))
    run_forward(engine, layers=0)
    assert transport.started == 0


def test_the_engine_says_which_layer_holds_its_cache():
    engine, _, _ = build()
    assert engine.held is None
    engine.arm()
    assert engine.held is None
    engine.acquire(0)
    assert engine.held == 0
    engine.release(0)
    assert engine.held is None


LAYER = r"model\.layers\.{}\.self_attn\.c0"
ASKED, RETURNED = LAYER + " asked for its cache", LAYER + " gave its cache back"


@pytest.mark.parametrize(
    ("calls", "what", "situation"),
    [
        ("a0", ASKED.format(0), "no forward is under way"),
        ("r0", RETURNED.format(0), "no forward is under way"),
        ("f", "the forward ended", "no forward is under way"),
        ("A A", "a forward began", f"layer {LAYER.format(0)} is due"),
        ("A a0 A", "a forward began", f"layer {LAYER.format(0)} holds its cache"),
        ("A a1", ASKED.format(1), f"layer {LAYER.format(0)} is due"),
        ("A a0 a0", ASKED.format(0), f"layer {LAYER.format(0)} holds its cache"),
        ("A a0 a1", ASKED.format(1), f"layer {LAYER.format(0)} holds its cache"),
        ("A r0", RETURNED.format(0), f"layer {LAYER.format(0)} is due"),
        ("A a0 r1", RETURNED.format(1), f"layer {LAYER.format(0)} holds its cache"),
        ("A a0 r0 r0", RETURNED.format(0), f"layer {LAYER.format(1)} is due"),
        ("A a0 r0 a0", ASKED.format(0), f"layer {LAYER.format(1)} is due"),
        ("A a0 r0 f", "the forward ended", f"layer {LAYER.format(1)} is due"),
        ("A a0 r0 a1 r1 a2 f", "the forward ended", f"layer {LAYER.format(2)} holds its cache"),
        ("A a0 r0 a1 r1 a2 r2 A", "a forward began", "all layers are done"),
        ("A a0 r0 a1 r1 a2 r2 a2", ASKED.format(2), "all layers are done"),
        ("A a0 r0 a1 r1 a2 r2 f f", "the forward ended", "no forward is under way"),
    ],
)
def test_a_call_out_of_order_names_rank_and_layer_and_kills_the_engine(calls, what, situation):
    engine, _, _ = build()
    verbs = {"A": engine.arm, "a": engine.acquire, "r": engine.release, "f": engine.finish}
    *good, bad = [(verbs[call[0]], [int(i) for i in call[1:]]) for call in calls.split()]
    for verb, arguments in good:
        verb(*arguments)
    with pytest.raises(BroadcastError, match=rf"^KVPP rank 1: (layer )?{what}, but {situation}$"):
        bad[0](*bad[1])
    for verb in (engine.arm, lambda: engine.acquire(0), lambda: engine.release(0), engine.finish):
        with pytest.raises(BroadcastError, match=rf"rank 1: .*stopped earlier: (layer )?{what}"):
            verb()
    assert engine.armed
    assert engine.held is None


def test_a_failed_broadcast_names_the_layer_and_the_engine_stays_dead():
    engine, transport, _ = build()
    transport.fail_wait = 1
    engine.arm()
    engine.acquire(0)
    engine.release(0)
    with pytest.raises(BroadcastError, match=r"rank 1: layer model\.layers\.1.*peer gone"):
        engine.acquire(1)
    with pytest.raises(BroadcastError, match="stopped earlier"):
        engine.arm()


@pytest.mark.parametrize("number", [0, 1])
def test_a_broadcast_that_cannot_start_names_its_own_layer(number):
    engine, transport, _ = build()
    transport.fail_start = number
    with pytest.raises(BroadcastError, match=rf"layer model\.layers\.{number}\..*cannot start"):
        run_forward(engine)
    with pytest.raises(BroadcastError, match="stopped earlier"):
        engine.finish()


def test_an_abandoned_forward_leaves_the_engine_dead_for_the_first_reason():
    engine, _, _ = build()
    engine.arm()
    engine.abandon("the forward failed: boom")
    engine.abandon("and then something else")
    with pytest.raises(BroadcastError, match="stopped earlier: the forward failed: boom"):
        engine.acquire(0)


def test_events_are_reserved_at_start_and_used_as_documented():
    log = []
    device = NotingDevice(log)
    engine, transport, placement = build(stage=equal_stage(4, 10), device=device)
    transport.log = log
    ready, arrived, drained = 0, 1, 2
    assert [b.owner for b in placement.bundles] == [0, 0, 1, 1]
    assert (device.events, log) == (4, [])
    for _ in range(2):
        run_forward(engine, layers=4)
        transport.started = 0
    assert device.events == 4
    assert [entry[:3] for entry in log] == 2 * [
        ("record", ready, "compute"), ("await", ready, "transfer"),
        ("start", 0, 0), ("record", arrived, "transfer"),
        ("wait", 0), ("await", arrived, "compute"),
        ("start", 1, 0), ("record", arrived, "transfer"),
        ("record", drained, "compute"),
        ("wait", 1), ("await", arrived, "compute"),
        ("await", drained, "transfer"), ("start", 2, 1), ("record", arrived, "transfer"),
        ("record", drained + 1, "compute"),
        ("wait", 2), ("await", arrived, "compute"),
        ("await", drained + 1, "transfer"), ("start", 3, 1), ("record", arrived, "transfer"),
        ("wait", 3), ("await", arrived, "compute"),
    ]  # fmt: skip


@pytest.mark.parametrize(("rank", "waiting"), [(0, [4, 5]), (1, [2, 3]), (2, [2, 3, 4, 5])])
def test_a_start_waits_for_scratch_that_was_read_since_its_last_refill_and_no_more(rank, waiting):
    log = []
    engine, transport, placement = build(rank, equal_stage(6, 10), 3, NotingDevice(log))
    transport.log = log
    assert [b.owner for b in placement.bundles] == [0, 0, 1, 1, 2, 2]
    for _ in range(2):
        run_forward(engine, layers=6)
    drained = {("await", 2, "transfer"), ("await", 3, "transfer")}
    after = [after for before, after in pairwise(log) if before in drained]
    assert [entry[1] % 6 for entry in after if entry[0] == "start"] == 2 * waiting
    assert len(after) == 2 * len(waiting)


def test_a_stream_ordered_transport_waits_where_the_broadcast_starts():
    transport = NotingTransport([])
    pending = StreamOrdered(transport).start(torch.zeros(4, dtype=torch.uint8), 1)
    assert transport.log == [("start", 0, 1, 4), ("wait", 0)]
    pending.wait()
    assert len(transport.log) == 2


def test_memory_that_does_not_hold_the_placement_is_refused():
    layout = plan_group(equal_stage(3, 10), 2)
    placement = place_rank(layout, 0, BLOCKS)
    short = torch.zeros(placement.total_bytes - 1, dtype=torch.uint8)
    with pytest.raises(LayoutError, match=f"needs {placement.total_bytes}"):
        FullPayload(placement, short)
    with pytest.raises(LayoutError, match="bytes"):
        FullPayload(placement, torch.zeros(999))


class Gate:
    """Opens layers one by one; notes who waits."""

    def __init__(self, log, open_layers=()):
        self.log = log
        self.open_layers = set(open_layers)

    def is_open(self, ordinal):
        return ordinal in self.open_layers

    def wait(self, ordinal):
        self.log.append(("gate", ordinal))
        self.open_layers.add(ordinal)


def with_gate(rank, open_layers=()):
    engine, transport, placement = build(rank)
    gated = PrefetchEngine(
        placement,
        engine._payload,  # noqa: SLF001 - the same bytes
        transport,
        CpuDevice(),
        Gate(transport.log, open_layers),
    )
    return gated, transport


def calls(transport):
    return [entry[:2] for entry in transport.log]


def test_an_owner_sends_a_layer_that_is_not_loaded_yet_when_the_layer_asks_for_it():
    """Rank 0 owns layers 0 and 1 of three."""
    engine, transport = with_gate(rank=0, open_layers=[0])
    run_forward(engine)
    assert calls(transport) == [
        ("start", 0), ("wait", 0),
        ("gate", 1), ("start", 1), ("wait", 1), ("start", 2), ("wait", 2),
    ]  # fmt: skip


def test_nobody_waits_for_what_others_load():
    engine, transport = with_gate(rank=1, open_layers=[2])
    run_forward(engine)
    assert ("gate", 0) not in calls(transport)
    assert ("gate", 1) not in calls(transport)


def test_an_open_gate_changes_nothing():
    engine, transport = with_gate(rank=0, open_layers=[0, 1, 2])
    run_forward(engine)
    plain, plain_transport, _ = build(rank=0)
    run_forward(plain)
    assert calls(transport) == calls(plain_transport)


def test_a_forward_that_reads_what_is_loaded_for_it_starts_with_its_first_layer():
    engine, transport, _ = build()
    engine.arm(start=False)
    assert transport.log == []
    engine.acquire(0)
    assert calls(transport) == [("start", 0), ("wait", 0), ("start", 1)]


@pytest.mark.parametrize(("gate", "ahead"), [(Gate([], {0, 1, 2}), 0), (None, 1)])
def test_with_a_gate_on_streams_no_bundle_of_a_forward_that_loads_starts_ahead(gate, ahead):
    """Else an owner that still loads would start it after collectives that come later elsewhere."""
    engine, transport, placement = build()
    on_streams = PrefetchEngine(
        placement,
        engine._payload,  # noqa: SLF001 - the same bytes
        StreamOrdered(transport),
        CpuDevice(),
        gate,
    )
    on_streams.arm(start=False)
    assert transport.started == 0
    for ordinal in range(3):
        on_streams.acquire(ordinal)
        assert transport.started == min(ordinal + 1 + ahead, 3)
        on_streams.release(ordinal)
    on_streams.finish()
    on_streams.arm()
    on_streams.acquire(0)
    assert transport.started == 3 + 2, "forwards that load nothing start ahead as before"
