"""A rank of a node: real memory, registered with real Mooncake, behind the real connector.

The model runner is ours: it writes a token's rows when the scheduler computes the token, and before
that compares everything the request's cache should hold. Wrong bytes are reported, whoever wrote
them and whenever, since a request's whole history is compared in each of its steps.
"""

import json
import os
import socket
import stat
import tempfile
import threading
from multiprocessing.connection import Connection

import numpy as np
import torch
from chaos_engine import cache_config, redirect_output, vllm_config
from chaos_model import BLOCK_TOKENS, LAYER_NAMES, ROW_WORDS, STAGE, poison, prefixes, rows
from chaos_patches import apply_patches, take_noted
from chaos_releases import transfer_results
from chaos_spec import NodeSpec
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import (
    get_tp_group,
    init_distributed_environment,
    initialize_model_parallel,
)

from kvpp_connect.connectors.ascend_store import connector as pool_connector
from kvpp_connect.layout import place_rank, plan_group
from kvpp_connect.seam import host_plan, quirks
from kvpp_connect.seam.groups import gather_in_group

_GARBAGE = np.uint64(0x5A5A_5A5A_5A5A_5A5A)


class _Places:
    """Where a request's tokens lie, and what they depend on."""

    def __init__(self, request_id, block_ids, tokens, computed, weights):
        self.request_id = request_id
        self._words = prefixes(tokens, weights)
        places = np.arange(len(tokens))
        self._blocks = np.asarray(block_ids)[places // BLOCK_TOKENS]
        self._slots = places % BLOCK_TOKENS
        self._old, self._new = slice(0, computed), slice(computed, len(tokens))

    def compare(self, cache, layer):
        """The first wrong block among those that were computed before, and a text; or None."""
        blocks, slots, words = (x[self._old] for x in (self._blocks, self._slots, self._words))
        bad = np.flatnonzero((cache[blocks, slots] != rows(words, layer)).any(axis=1))
        if not bad.size:
            return None
        first = int(bad[0])
        return first // BLOCK_TOKENS, (
            f"request {self.request_id}, layer {layer}: {bad.size} of {len(words)} cached tokens "
            f"are wrong, the first is {first} in block {blocks[first]}"
        )

    def write(self, cache, layer):
        """What the model computes in this step."""
        blocks, slots, words = (x[self._new] for x in (self._blocks, self._slots, self._words))
        cache[blocks, slots] = rows(words, layer)

    def spoil(self, cache):
        """The same, computed from garbage."""
        cache[self._blocks[self._new], self._slots[self._new]] ^= _GARBAGE


class Rank:
    """Memory, model runner and worker side."""

    def __init__(self, spec: NodeSpec, rank: int) -> None:
        placement = None
        if spec.kvpp:
            placement = place_rank(plan_group(STAGE, spec.ranks), rank, spec.num_blocks)
        # What KVPP's runtime answers in a worker.
        host_plan.active_placement = lambda: placement
        pool_connector.make_device = lambda _: None  # memory is the host's, whatever the platform
        self._poison = poison(spec.name)
        caches = _make_caches(placement, spec.num_blocks, self._poison)
        kept = set(placement.persistent_layers) if placement else set(LAYER_NAMES)
        self._layers = {i: caches[n] for i, n in enumerate(LAYER_NAMES) if n in kept}
        self._connector = KVConnectorFactory.create_connector(
            config=vllm_config(spec),
            role=KVConnectorRole.WORKER,
            kv_cache_config=cache_config(spec),
        )
        shape = (spec.num_blocks, 1, BLOCK_TOKENS, 2 * ROW_WORDS)
        self._connector.register_kv_caches(
            {
                name: torch.from_numpy(cache.view(np.float32)).view(shape)
                for name, cache in caches.items()
            }
        )

    @property
    def handshake(self):
        """What the scheduler side is told."""
        return self._connector.get_handshake_metadata()

    def step(self, metadata, finished_ids, work, weights, loads_in_step):
        """As the model runner: a forward, and the connector's part of the step around it.

        Args:
            weights: what the model computes depends on them.
            loads_in_step: the forward reads what is loaded in this step.
        """
        connector = self._connector
        connector.bind_connector_metadata(metadata)
        if loads_in_step:
            connector.start_load_kv(None)
        wrong = self._forward(work, weights)
        if loads_in_step:
            self._spoil(work, weights, wrong)
        else:
            connector.start_load_kv(None)
        connector.wait_for_save()
        output = transfer_results(connector, finished_ids)
        connector.clear_connector_metadata()
        return output, wrong, take_noted()

    def poison(self, block_ids):
        """Overwrite blocks that nobody refers to."""
        for cache in self._layers.values():
            cache[block_ids] = self._poison

    def check_poison(self, block_ids):
        """Say which of the overwritten blocks were written since."""
        return [
            f"free block {block}, layer {layer}: written after it was let go"
            for layer, cache in self._layers.items()
            for block in block_ids
            if (cache[block] != self._poison).any()
        ]

    def close(self):
        """Stop the worker side."""
        self._connector.shutdown()

    def _forward(self, work, weights):
        """Layer by layer, compare what is computed and write what is new; answers what is wrong.

        That is the request, the place of its first wrong block in a layer, and a text.
        """
        batch = [_Places(*item, weights) for item in work]
        wrong = []
        for layer, name in enumerate(LAYER_NAMES):
            self._connector.wait_for_layer_load(name)
            if (cache := self._layers.get(layer)) is None:
                continue
            for places in batch:
                if bad := places.compare(cache, layer):
                    wrong.append((places.request_id, *bad))
                places.write(cache, layer)
        return wrong

    def _spoil(self, work, weights, wrong):
        """What a model computes from garbage is garbage, whichever rank has read it."""
        mine = json.dumps([request_id for request_id, _, _ in wrong]).encode()
        garbled = {request_id for row in gather_in_group(mine) for request_id in json.loads(row)}
        spoilt: set[int] = set()
        for item in work:
            request_id, block_ids, _, computed = item
            read = block_ids[: -(-computed // BLOCK_TOKENS)]
            if request_id in garbled or not spoilt.isdisjoint(read):
                for cache in self._layers.values():
                    _Places(*item, weights).spoil(cache)
                spoilt.update(block_ids[computed // BLOCK_TOKENS :])


def _make_caches(placement, num_blocks, content):
    """Views by layer, shape (blocks, tokens, words), of one allocation."""
    shape = (num_blocks, BLOCK_TOKENS, ROW_WORDS)
    words = num_blocks * BLOCK_TOKENS * ROW_WORDS
    if placement is None:
        memory = np.full(words * len(LAYER_NAMES), content)
        starts = {name: i * words for i, name in enumerate(LAYER_NAMES)}
    else:
        memory = np.full(placement.total_bytes // 8, content)
        starts = {p.component.layer_name: p.offset // 8 for p in placement.components}
    return {name: memory[at : at + words].reshape(shape) for name, at in starts.items()}


def run_rank(spec: NodeSpec, rank: int, meeting: str, scheduler: Connection, harness: Connection):
    """Body of a rank's process; ends when its scheduler is gone.

    Args:
        meeting: a file by which the ranks of the node find each other.
        harness: a word from it cuts the connections of the data path.
    """
    redirect_output(spec)
    quirks.apply()
    apply_patches(spec, f"rank {rank}")
    torch.set_num_threads(1)
    threading.Thread(target=_cut_when_told, args=(harness,), daemon=True).start()
    config = vllm_config(spec)
    with set_current_vllm_config(config):
        init_distributed_environment(
            world_size=spec.ranks,
            rank=rank,
            distributed_init_method=f"file://{meeting}",
            local_rank=rank,
            backend="gloo",
        )
        initialize_model_parallel(tensor_model_parallel_size=spec.ranks)
        # Named shared memory that a killed process would leave behind, unused here.
        get_tp_group().mq_broadcaster = None
        worker = Rank(spec, rank)
    scheduler.send(worker.handshake)
    try:
        while True:
            match scheduler.recv():
                case ("step", *step):
                    scheduler.send(worker.step(*step))
                case ("poison", block_ids):
                    worker.poison(block_ids)
                case ("check_poison", block_ids):
                    scheduler.send(worker.check_poison(block_ids))
                case ("close",):
                    worker.close()
                    break
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    os._exit(0)


def _cut_when_told(harness: Connection) -> None:
    """Break the TCP connections of this process, as a middlebox or a bad link does."""
    while True:
        try:
            harness.recv()
        except EOFError:
            return
        cut = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family == socket.AF_INET and copy.getpeername():
                        copy.shutdown(socket.SHUT_RDWR)
                        cut += 1
            except OSError:
                continue
        harness.send(cut)


def meeting_file() -> str:
    """A name for a file that does not exist, in the tests' own folder."""
    return tempfile.mktemp(prefix="meeting-", dir=os.environ["VLLM_RPC_BASE_PATH"])
