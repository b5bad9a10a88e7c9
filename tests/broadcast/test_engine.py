"""The engine against a hand-written transport that notes every start and wait."""

import pytest
import torch
from builders import bundle_stage, equal_stage

from kvpp_connect.broadcast.engine import BroadcastError, PrefetchEngine
from kvpp_connect.broadcast.payload import FullPayload
from kvpp_connect.errors import LayoutError, PeerError
from kvpp_connect.layout import place_rank, plan_group

BLOCKS = 4


class NotingTransport:
    """Notes starts and waits in order; fails the wait of broadcast number ``fail_at``."""

    def __init__(self):
        self.log = []
        self.fail_at = None

    def start(self, data, source_rank):
        number = sum(entry[0] == "start" for entry in self.log)
        self.log.append(("start", number, source_rank, data.numel()))
        return _Pending(self, number)


class _Pending:
    def __init__(self, transport, number):
        self.transport = transport
        self.number = number

    def wait(self):
        if self.transport.fail_at == self.number:
            raise PeerError("peer gone")
        self.transport.log.append(("wait", self.number))


def build(rank=1, stage=None, group_size=2):
    layout = plan_group(stage or equal_stage(3, 10), group_size)
    placement = place_rank(layout, rank, BLOCKS)
    memory = torch.zeros(placement.total_bytes, dtype=torch.uint8)
    transport = NotingTransport()
    return (
        PrefetchEngine(placement, FullPayload(placement, memory), transport),
        transport,
        placement,
    )


def test_a_forward_is_one_layer_ahead_and_never_two():
    engine, transport, placement = build()
    engine.arm()
    assert [entry[:2] for entry in transport.log] == [("start", 0)]
    for ordinal in range(3):
        engine.acquire(ordinal)
    engine.finish()
    assert [entry[:2] for entry in transport.log] == [
        ("start", 0), ("wait", 0), ("start", 1), ("wait", 1), ("start", 2), ("wait", 2),
    ]  # fmt: skip
    assert [e[2] for e in transport.log if e[0] == "start"] == [b.owner for b in placement.bundles]


def test_each_broadcast_is_exactly_one_bundle():
    stage = bundle_stage([[5, 3], [5], [5, 3]])
    engine, transport, placement = build(stage=stage)
    engine.arm()
    for ordinal in range(3):
        engine.acquire(ordinal)
    engine.finish()
    assert [e[3] for e in transport.log if e[0] == "start"] == [
        b.page_bytes * BLOCKS for b in stage.targets
    ]
    sent = sum(b.size for b in placement.bundles if b.owner == placement.rank)
    received = sum(b.size for b in placement.bundles if b.owner != placement.rank)
    assert (engine.counters.sent_bytes, engine.counters.received_bytes) == (sent, received)


def test_a_layer_out_of_turn_is_named_and_kills_the_engine():
    engine, _, _ = build()
    engine.arm()
    with pytest.raises(BroadcastError, match=r"rank 1: layer model\.layers\.1.*due is model"):
        engine.acquire(1)
    with pytest.raises(BroadcastError, match=r"stopped earlier: layer model\.layers\.1"):
        engine.arm()


def test_a_layer_without_a_forward_is_an_error():
    engine, _, _ = build()
    with pytest.raises(BroadcastError, match="no forward is under way"):
        engine.acquire(0)


def test_a_forward_that_was_not_finished_is_an_error():
    engine, _, _ = build()
    engine.arm()
    engine.acquire(0)
    with pytest.raises(BroadcastError, match=r"ended while layer model\.layers\.1"):
        engine.finish()


def test_a_second_forward_cannot_begin_before_the_first_ends():
    engine, _, _ = build()
    engine.arm()
    with pytest.raises(BroadcastError, match=r"a forward began while layer model\.layers\.0"):
        engine.arm()


def test_a_failed_broadcast_names_the_layer_and_the_engine_stays_dead():
    engine, transport, _ = build()
    transport.fail_at = 1
    engine.arm()
    engine.acquire(0)
    with pytest.raises(BroadcastError, match=r"layer model\.layers\.1.*peer gone"):
        engine.acquire(1)
    with pytest.raises(BroadcastError, match="stopped earlier"):
        engine.arm()


def test_an_abandoned_forward_leaves_the_engine_dead():
    engine, _, _ = build()
    engine.arm()
    engine.abandon("the forward failed: boom")
    with pytest.raises(BroadcastError, match="boom"):
        engine.acquire(0)


def test_many_forwards_run_one_after_the_other():
    engine, transport, _ = build()
    for _ in range(5):
        engine.arm()
        for ordinal in range(3):
            engine.acquire(ordinal)
        engine.finish()
        assert not engine.armed
    assert engine.counters.forwards == 5
    assert sum(entry[0] == "start" for entry in transport.log) == 15


def test_memory_that_does_not_hold_the_placement_is_refused():
    layout = plan_group(equal_stage(3, 10), 2)
    placement = place_rank(layout, 0, BLOCKS)
    short = torch.zeros(placement.total_bytes - 1, dtype=torch.uint8)
    with pytest.raises(LayoutError, match=f"needs {placement.total_bytes}"):
        FullPayload(placement, short)
    with pytest.raises(LayoutError, match="bytes"):
        FullPayload(placement, torch.zeros(999))
