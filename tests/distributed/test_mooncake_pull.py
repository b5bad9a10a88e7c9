"""Pulls between real processes over real Mooncake, without a model.

Two producer ranks own different layers; a reader's puller fetches them through the real control
channel. After each trouble the reader either has the right bytes or reports a failure.
"""

import itertools
import time

import pytest
import torch
from builders import layer_name

from kvpp_connect.connectors.mooncake_engine import MooncakeEngine
from kvpp_connect.connectors.mooncake_v2.counters import PullStats
from kvpp_connect.connectors.mooncake_v2.metadata import PullRequest, parse_remote_prefill
from kvpp_connect.connectors.mooncake_v2.producer import Producer
from kvpp_connect.connectors.mooncake_v2.puller import Puller
from kvpp_connect.connectors.mooncake_v2.registration import (
    BlockShape,
    describe_caches,
    register_storage,
)
from kvpp_connect.errors import PeerError
from kvpp_connect.layout import RankManifest

pytestmark = pytest.mark.distributed

SHAPE = BlockShape(num_blocks=8, block_tokens=16)
LAYERS = [layer_name(i) for i in range(4)]
PROMPT = list(range(40))  # two and a half blocks
P_BLOCKS, D_BLOCKS = [5, 6, 2], [1, 3, 4]


def fill(layer, block):
    return float(100 * (layer + 1) + block)


def make_caches(layers, value):
    """Caches of one allocation, shape (blocks, 1, tokens, 576)."""
    backing = torch.empty(len(layers), SHAPE.num_blocks, 1, SHAPE.block_tokens, 576)
    for i, layer in enumerate(layers):
        for block in range(SHAPE.num_blocks):
            backing[i, block] = value(layer, block)
    return {LAYERS[layer]: backing[i] for i, layer in enumerate(layers)}


def producer_rank(pipe, rank, layers):
    kv = make_caches(layers, fill)
    engine = MooncakeEngine("127.0.0.1", "tcp")
    register_storage(engine, kv)
    caches = describe_caches(kv, SHAPE, None)
    pipe.send(
        RankManifest(
            pp_rank=0, rank_in_group=rank, session=engine.session, components=caches.components
        )
    )
    pipe.recv()


class Decode:
    """The reader: caches that hold -1, and a puller."""

    def __init__(self, wrap=lambda engine: engine):
        self.kv = make_caches(range(4), lambda layer, block: -1.0)
        engine = wrap(MooncakeEngine("127.0.0.1", "tcp"))
        register_storage(engine, self.kv)
        self.stats = PullStats(counts_tokens=True)
        self.puller = Puller(
            engine=engine,
            caches=describe_caches(self.kv, SHAPE, None),
            reader_rank=0,
            control_timeout_s=2,
            failed_read_hold_s=0.5,
            stats=self.stats,
        )
        self.numbers = itertools.count()

    def pull(self, params, first_token=0, timeout_s=60):
        """Pull the prompt; answer whether it succeeded."""
        return self.pull_result(params, first_token, timeout_s).succeeded

    def pull_result(self, params, first_token=0, timeout_s=60):
        """Pull the prompt; answer how it ended."""
        request_id = f"d{next(self.numbers)}"
        self.puller.submit(
            PullRequest(
                request_id=request_id,
                remote=parse_remote_prefill(params),
                local_block_ids=tuple(D_BLOCKS),
                first_token=first_token,
                end_token=len(PROMPT),
            )
        )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for result in self.puller.take_results():
                assert result.request_id == request_id
                return result
            time.sleep(0.01)
        raise TimeoutError(request_id)

    def assert_pulled(self, first_token=0):
        for i, name in enumerate(LAYERS):
            for block in range(SHAPE.num_blocks):
                got = self.kv[name][block, 0]
                if block not in D_BLOCKS:
                    assert (got == -1).all(), (name, block)
                    continue
                index = D_BLOCKS.index(block)
                begin = index * SHAPE.block_tokens
                for token in range(SHAPE.block_tokens):
                    wanted = first_token <= begin + token < len(PROMPT)
                    value = fill(i, P_BLOCKS[index]) if wanted else -1
                    assert (got[token] == value).all(), (name, block, token)


@pytest.fixture
def decode():
    side = Decode()
    yield side
    side.puller.close()


@pytest.fixture
def ranks(spawn):
    children = [spawn(producer_rank, rank, layers) for rank, layers in enumerate([[0, 1], [2, 3]])]
    return children, [child.get() for child in children]


@pytest.fixture
def make_producer(ranks):
    made = []

    def make(lease_s=60.0, port=0, num_blocks=SHAPE.num_blocks):
        producer = Producer(engine_id="p", host="127.0.0.1", port=port, lease_s=lease_s)
        producer.publish(
            ranks=ranks[1],
            block_tokens=SHAPE.block_tokens,
            num_blocks=num_blocks,
            dtype="torch.float32",
        )
        made.append(producer)
        return producer

    yield make
    for producer in made:
        producer.close()


def test_each_layer_comes_from_its_owner_and_nothing_else_is_written(make_producer, decode):
    assert decode.pull(make_producer().hand_over("r", PROMPT, P_BLOCKS))
    decode.assert_pulled()
    sums = decode.stats.take()
    assert sums["pull_bytes"] == len(PROMPT) * 576 * 4 * len(LAYERS)
    assert sums["pull_tokens"] == len(PROMPT)
    assert sums["pull_pieces"] == 2 * len(LAYERS) + len(LAYERS)  # blocks 5,6 -> 1,3 do not merge


def test_a_locally_cached_prefix_is_not_pulled(make_producer, decode):
    assert decode.pull(make_producer().hand_over("r", PROMPT, P_BLOCKS), first_token=16)
    decode.assert_pulled(first_token=16)


def test_a_lease_that_ran_out_before_the_confirmation_is_a_failure(make_producer, decode):
    producer = make_producer(lease_s=0.05)
    params = producer.hand_over("r", PROMPT, P_BLOCKS)
    time.sleep(0.1)
    assert producer.take_ended() == {"r"}
    assert not decode.pull(params)
    assert decode.stats.take() == {"pull_failures/other": 1}


def test_a_restarted_producer_is_recognised(make_producer, decode):
    first = make_producer()
    params = first.hand_over("r", PROMPT, P_BLOCKS)
    first.close()
    make_producer(port=params["remote_port"])
    assert not decode.pull(params)
    assert not any((cache != -1).any() for cache in decode.kv.values())


def test_a_producer_that_is_not_there_is_a_failure_in_time(make_producer, decode):
    producer = make_producer()
    params = producer.hand_over("r", PROMPT, P_BLOCKS)
    producer.close()
    assert not decode.pull(params, timeout_s=20)


def test_blocks_that_the_producer_does_not_have_are_a_failure(make_producer, decode):
    params = make_producer(num_blocks=6).hand_over("r", PROMPT, [5, 6, 2])
    assert not decode.pull(params)
    assert not any((cache != -1).any() for cache in decode.kv.values())


def test_a_dead_owner_is_a_failure_and_other_requests_go_on(make_producer, ranks, decode, spawn):
    params = make_producer().hand_over("r", PROMPT, P_BLOCKS)
    ranks[0][1].kill()
    started = time.monotonic()
    assert not decode.pull(params, timeout_s=100)
    # The destination may be written late, so the failure is reported after the hold only.
    assert time.monotonic() - started >= 0.5


class FailingOnce:
    """A transfer engine whose first read of each session fails."""

    def __init__(self, engine):
        self.engine = engine
        self.failed = set()

    @property
    def session(self):
        return self.engine.session

    def register(self, address, length_bytes):
        self.engine.register(address, length_bytes)

    def read(self, session, *lists):
        if session not in self.failed:
            self.failed.add(session)
            raise PeerError("no progress")
        self.engine.read(session, *lists)


def test_a_read_that_fails_is_repeated_once(make_producer):
    decode = Decode(FailingOnce)
    started = time.monotonic()
    result = decode.pull_result(make_producer().hand_over("r", PROMPT, P_BLOCKS))
    assert result.succeeded
    # The failed attempt may still write for the hold, counted from now on.
    assert result.written_until >= started + 0.5
    decode.assert_pulled()
    assert decode.stats.take()["pulls"] == 1
    decode.puller.close()


def test_many_requests_one_after_the_other(make_producer, decode):
    producer = make_producer()
    for number in range(20):
        assert decode.pull(producer.hand_over(f"r{number}", PROMPT, P_BLOCKS))
    decode.assert_pulled()
