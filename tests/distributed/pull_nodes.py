"""A prefill node of real processes and decode ranks of this process, over real Mooncake."""

import gc
import itertools
import time

import torch
from builders import layer_name

from kvpp_connect.connectors.caches import (
    BlockShape,
    describe_caches,
    register_storage,
)
from kvpp_connect.connectors.mooncake_engine import MooncakeEngine
from kvpp_connect.connectors.mooncake_v2.counters import PullStats
from kvpp_connect.connectors.mooncake_v2.exchange import ShareExchange
from kvpp_connect.connectors.mooncake_v2.metadata import PullRequest, parse_remote_prefill
from kvpp_connect.connectors.mooncake_v2.puller import Puller, PullOptions
from kvpp_connect.layout import GroupManifest, RankManifest

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
    pipe.send(describe_rank(kv, rank, engine))
    pipe.recv()


def describe_rank(kv, rank, engine):
    return RankManifest(
        pp_rank=0,
        rank_in_group=rank,
        session=engine.session,
        components=describe_caches(kv, SHAPE, None),
    )


def describe_group(*ranks, num_blocks=SHAPE.num_blocks):
    return GroupManifest(num_blocks=num_blocks, block_tokens=SHAPE.block_tokens, ranks=ranks)


class DecodeGroup:
    """Ranks of one decode node in this process; they hold all layers unless told which."""

    def __init__(self, held, *, wrap=lambda engine: engine, mode="shared"):
        self.kv = [make_caches(layers, lambda layer, block: -1.0) for layers in held]
        engines = [wrap(MooncakeEngine("127.0.0.1", "tcp")) for _ in held]
        for engine, kv in zip(engines, self.kv, strict=True):
            register_storage(engine, kv)
        group = describe_group(
            *(describe_rank(self.kv[i], i, engine) for i, engine in enumerate(engines))
        )
        self.exchanges = [ShareExchange(i, "127.0.0.1") for i in range(len(held))]
        self.stats = [PullStats(counts_tokens=i == 0) for i in range(len(held))]
        self.pullers = []
        for i, engine in enumerate(engines):
            others = {j: e.address for j, e in enumerate(self.exchanges) if j != i}
            self.exchanges[i].connect(others)
            self.pullers.append(
                Puller(
                    engine=engine,
                    group=group,
                    rank=i,
                    exchange=self.exchanges[i],
                    options=PullOptions(mode=mode, control_timeout_s=5, failed_read_hold_s=0.5),
                    stats=self.stats[i],
                )
            )
        self.numbers = itertools.count()

    def close(self):
        for exchange, puller in zip(self.exchanges, self.pullers, strict=True):
            exchange.close()
            puller.close()
        # The end of an engine stops all threads for most of a second. Left to a later collection
        # the engines of several groups would end at once, in the middle of some other test.
        self.pullers.clear()
        gc.collect()

    def submit(self, params, first_token=0, ranks=None):
        """Begin a pull of the prompt on every rank, or on some; answer its request id."""
        request_id = f"d{next(self.numbers)}"
        order = PullRequest(
            request_id=request_id,
            remote=parse_remote_prefill(params),
            local_block_ids=tuple(D_BLOCKS),
            first_token=first_token,
            end_token=len(PROMPT),
        )
        for i, puller in enumerate(self.pullers):
            if ranks is None or i in ranks:
                puller.submit(order)
        return request_id

    def results(self, ranks=None, timeout_s=60):
        """The next result of every rank."""
        return [found for (found,) in self.many_results(1, ranks, timeout_s)]

    def many_results(self, number, ranks=None, timeout_s=60):
        """The next results of every rank, as many as are wanted."""
        deadline = time.monotonic() + timeout_s
        found = {i: [] for i in (ranks or range(len(self.pullers)))}
        while missing := [i for i, results in found.items() if len(results) < number]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {missing} have not answered")
            for i in missing:
                found[i] += self.pullers[i].take_results()
            time.sleep(0.01)
        return list(found.values())

    def pull(self, params, first_token=0, timeout_s=60):
        """Pull the prompt on all ranks; answer whether it succeeded on all."""
        request_id = self.submit(params, first_token)
        results = self.results(timeout_s=timeout_s)
        assert {result.request_id for result in results} == {request_id}
        return all(result.succeeded for result in results)

    def untouched(self):
        return not any((cache != -1).any() for kv in self.kv for cache in kv.values())

    def assert_pulled(self, first_token=0):
        for kv in self.kv:
            for name, cache in kv.items():
                assert_blocks(LAYERS.index(name), cache, first_token)


def assert_blocks(layer, cache, first_token):
    for block in range(SHAPE.num_blocks):
        got = cache[block, 0]
        if block not in D_BLOCKS:
            assert (got == -1).all(), (layer, block)
            continue
        index = D_BLOCKS.index(block)
        begin = index * SHAPE.block_tokens
        for token in range(SHAPE.block_tokens):
            wanted = first_token <= begin + token < len(PROMPT)
            value = fill(layer, P_BLOCKS[index]) if wanted else -1
            assert (got[token] == value).all(), (layer, block, token)
