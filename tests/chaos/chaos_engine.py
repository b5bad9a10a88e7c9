"""The scheduler process of a node: vLLM's own scheduler and block pool, and the connector's
scheduler side. Only the model runner is ours (chaos_rank.py).

Imported once by the fork server, since vLLM takes ten seconds to import; nodes are forks of it.
"""

import faulthandler
import os
import signal
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection, wait

from chaos_model import BLOCK_TOKENS, LAYER_NAMES, PAGE_BYTES, next_token
from chaos_patches import apply_patches, noted, take_noted
from chaos_spec import ENVIRONMENT, NodeSpec

os.environ.update(ENVIRONMENT)

import torch
from chaos_releases import ENGINE_OPTIONS, cache_tensors
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpp_connect.seam import quirks
from kvpp_connect.seam.older_vllm import has_sync_loads

STEP_S = 0.01  # pace of a busy engine, so that requests live for a while


def vllm_config(spec: NodeSpec) -> VllmConfig:
    """vLLM's configuration of a node."""
    config = EngineArgs(
        model=str(spec.model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=1 << 24,
        async_scheduling=False,
        skip_tokenizer_init=True,
        **ENGINE_OPTIONS,
        tensor_parallel_size=spec.ranks,
        kv_transfer_config={
            **transfer_config(spec),
            "kv_load_failure_policy": spec.policy,
            "engine_id": spec.name,
        },
    ).create_engine_config()
    # The CPU platform turns both off for MLA.
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.max_num_batched_tokens = 512
    config.cache_config.enable_prefix_caching = spec.prefix_caching
    config.cache_config.num_gpu_blocks = spec.num_blocks
    config.cache_config.block_size = BLOCK_TOKENS  # the NPU's platform takes its own
    return config


def transfer_config(spec: NodeSpec) -> dict:
    """The node's connector, or two of them in vLLM's MultiConnector."""
    port = {"control_port": spec.control_port} if spec.control_port else {}
    own = connector_config(spec.connector, spec.role, {**port, **spec.settings})
    if not spec.pool:
        return own
    stores = {"consumer_is_to_put": True} if spec.role == "kv_consumer" else {}
    pool = connector_config("AscendStoreConnector", spec.role, {**stores, **spec.pool})
    children = [pool, own] if spec.pool_first else [own, pool]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": spec.role,
        "kv_connector_extra_config": {"connectors": children},
    }


def connector_config(name: str, role: str, settings: dict) -> dict:
    """One of our connectors on this machine."""
    return {
        "kv_connector": name,
        "kv_connector_module_path": "kvpp_connect.connectors",
        "kv_role": role,
        "kv_connector_extra_config": {"host": "127.0.0.1", **settings},
    }


def cache_config(spec: NodeSpec) -> KVCacheConfig:
    """vLLM's description of the caches of a node."""
    kv = MLAAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.float32
    )
    return KVCacheConfig(
        num_blocks=spec.num_blocks,
        kv_cache_tensors=cache_tensors(LAYER_NAMES, spec.num_blocks, PAGE_BYTES),
        kv_cache_groups=[KVCacheGroupSpec(list(LAYER_NAMES), kv)],
    )


class Engine:
    """vLLM's engine loop with ranks behind pipes."""

    def __init__(self, spec: NodeSpec, ranks: list[Connection]) -> None:
        config = vllm_config(spec)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._ranks = ranks
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache_config(spec),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
        )
        self._connector = self._scheduler.connector
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._aggregator = KVOutputAggregator.from_connector(self._connector, spec.ranks)
        self._in_use: set[int] = set()
        self._poisoned: set[int] = set()
        self._weights = 0
        self._abort_loading: set[str] = set()
        self._sums: Counter[str] = Counter()
        self._tap_stats()
        handshake = {(0, rank): pipe.recv() for rank, pipe in enumerate(ranks)}
        if all(handshake.values()):
            self._connector.set_xfer_handshake_metadata_pp_aware(handshake)

    def add(self, request_id, prompt, max_tokens, params):
        """Take a request; answer whether its id was free."""
        if request_id in self._scheduler.requests:
            return False
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        request = Request(request_id, list(prompt), sampling, None, block_hasher=self._hasher)
        self._scheduler.add_request(request)
        return True

    def abort(self, request_id):
        """The client went away."""
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            return
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            noted.append(("fault", "abort while loading"))
        mine = self._block_ids(request_id)
        self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        if not self._held_blocks().isdisjoint(mine):
            noted.append(("fault", "abort while blocks are held"))

    def abort_loading(self, request_id):
        """The client will go away when the request's KV is being loaded."""
        self._abort_loading.add(request_id)

    def _abort_those_that_load(self):
        self._abort_loading &= self._scheduler.requests.keys()
        for request_id in sorted(self._abort_loading):
            request = self._scheduler.requests[request_id]
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.abort(request_id)
                self._abort_loading.discard(request_id)
                yield "tokens", request_id, [], "abort", None

    def reset(self, *, preempt):
        """New weights, where vLLM and the connector let go of all that the old ones computed.

        Args:
            preempt: begin all running requests anew; else there must be none.
        """
        try:
            is_reset = self._scheduler.reset_prefix_cache(preempt, reset_connector=True)
        except RuntimeError:  # vLLM's answer where somebody holds blocks
            is_reset = False
        self._weights += is_reset
        noted.append(("fault", "reset") if is_reset else ("seen", "reset refused"))

    def free_blocks(self):
        """Blocks that nobody refers to."""
        return self._pool.get_num_free_blocks()

    def has_work(self):
        """Whether vLLM would step."""
        return self._scheduler.has_requests()

    def step(self):
        """One step of vLLM's engine core; answers events for the harness."""
        running = {r.request_id: self._block_ids(r.request_id) for r in self._scheduler.running}
        output = self._scheduler.schedule()
        self._note_preemptions(running, output.preempted_req_ids or ())
        work = [self._work(request_id, n) for request_id, n in output.num_scheduled_tokens.items()]
        how = self._weights, has_sync_loads(output)
        for pipe in self._ranks:
            pipe.send(("step", output.kv_connector_metadata, output.finished_req_ids, work, *how))
        ids = [item[0] for item in work]
        sampled = [self._sample(request_id, output) for request_id in ids]
        events, results, wrong = [], [], []
        for rank, pipe in enumerate(self._ranks):
            kv_output, found, happened = pipe.recv()
            wrong += [(rank, *bad) for bad in found]
            events += happened
            results.append(
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                    sampled_token_ids=sampled,
                    kv_connector_output=kv_output,
                )
            )
        result = self._aggregator.aggregate(results)
        self._add_up(result.kv_connector_output.kv_connector_stats)
        events += self._unforgiven(wrong, work, output, result.kv_connector_output)
        for outputs in self._scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                reason = str(one.finish_reason) if one.finish_reason is not None else None
                params = one.kv_transfer_params
                events.append(("tokens", one.request_id, one.new_token_ids, reason, params))
        self._poison_freed({block for item in work for block in item[1]})
        return [*events, *self._abort_those_that_load(), *take_noted()]

    def take_sums(self):
        """The connector's counters since the last call."""
        sums, self._sums = self._sums, Counter()
        return dict(sums)

    def check_free_blocks(self):
        """Compare blocks that nobody refers to with what was left in them."""
        free = [b.block_id for b in self._pool.blocks if self._is_garbage(b)]
        wrong = []
        for rank, pipe in enumerate(self._ranks):
            pipe.send(("check_poison", [b for b in free if b in self._poisoned]))
            wrong += [("wrong", rank, text) for text in pipe.recv()]
        return wrong

    def close(self):
        """As vLLM at its orderly end."""
        self._scheduler.shutdown()
        for pipe in self._ranks:
            pipe.send(("close",))

    def _work(self, request_id, scheduled):
        """What the ranks compute for a request: (id, block ids, tokens, computed before)."""
        request = self._scheduler.requests[request_id]
        # The scheduler has already counted what it has just scheduled.
        end = request.num_computed_tokens
        return (
            request_id,
            self._block_ids(request_id),
            list(request.all_token_ids[:end]),
            end - scheduled,
        )

    def _block_ids(self, request_id):
        (block_ids,) = self._scheduler.kv_cache_manager.get_block_ids(request_id)
        return block_ids

    def _held_blocks(self):
        """Blocks that belong to no request, and are not free."""
        used = {b.block_id for b in self._pool.blocks if b.ref_cnt > 0 and not b.is_null}
        return used.difference(*map(self._block_ids, self._scheduler.requests))

    def _note_preemptions(self, running, preempted):
        """Args: running: blocks of the requests that ran before."""
        held = self._held_blocks() if preempted else set()
        for request_id in preempted:
            storing = not held.isdisjoint(running.get(request_id, ()))
            noted.append(("fault", "preempted while storing") if storing else ("seen", "preempted"))

    @staticmethod
    def _unforgiven(wrong, work, output, kv_output):
        """Wrong bytes as events, but for those that a step has read and the connector has named:
        what was computed from them is dropped."""
        invalid = kv_output.invalid_block_ids if has_sync_loads(output) else set()
        blocks = {request_id: block_ids for request_id, block_ids, _, _ in work}
        for rank, request_id, place, text in wrong:
            if invalid.isdisjoint(blocks[request_id][: place + 1]):
                yield "wrong", rank, text

    def _tap_stats(self):
        """Note what the scheduler side counts when vLLM takes it."""
        take = self._connector.get_kv_connector_stats

        def tap():
            stats = take()
            self._add_up(stats)
            return stats

        self._connector.get_kv_connector_stats = tap

    def _add_up(self, stats):
        for name, amount in (stats.data if stats is not None else {}).items():
            if isinstance(amount, KVConnectorStats):  # of a child
                self._add_up(amount)
            elif isinstance(amount, int | float):
                self._sums[name] += amount

    def _sample(self, request_id, output):
        request = self._scheduler.requests[request_id]
        if request.num_computed_tokens < request.num_tokens:
            return []
        return [next_token(list(request.all_token_ids))]

    def _poison_freed(self, used):
        """Overwrite what was let go in this step, unless vLLM keeps it as prefix cache.

        ``used``: blocks of the step's requests, some of which it has both taken and let go.
        """
        in_use = {b.block_id for b in self._pool.blocks if b.ref_cnt > 0}
        let_go = (self._in_use | used) - in_use
        freed = [i for i in let_go if self._is_garbage(self._pool.blocks[i])]
        self._in_use = in_use
        self._poisoned = self._poisoned - in_use - used | set(freed)
        if freed:
            for pipe in self._ranks:
                pipe.send(("poison", freed))

    @staticmethod
    def _is_garbage(block):
        return block.ref_cnt == 0 and block.block_hash is None and not block.is_null


def run_scheduler(spec: NodeSpec, harness: Connection, ranks: list[Connection]) -> None:
    """Body of the scheduler process; ends when told, or when a rank is gone."""
    redirect_output(spec)
    quirks.apply()
    apply_patches(spec, "scheduler")
    try:
        engine = Engine(spec, ranks)
        harness.send([("ready", engine.free_blocks())])
        while _obey(engine, harness):
            if engine.has_work():
                started = time.monotonic()
                if events := engine.step():
                    harness.send(events)
                harness.poll(max(0.0, STEP_S - (time.monotonic() - started)))
            else:
                _check_ranks(wait([harness, *ranks], 0.05), ranks)
        engine.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(3)


def _check_ranks(readable: list, ranks: list[Connection]) -> None:
    """A dead worker ends vLLM's engine, idle or not."""
    if any(pipe in ranks for pipe in readable):
        raise EOFError


def _obey(engine: Engine, harness: Connection) -> bool:
    """Carry out what the harness asks; answers whether to go on."""
    while harness.poll():
        match harness.recv():
            case ("add", request_id, prompt, max_tokens, params):
                if not engine.add(request_id, prompt, max_tokens, params):
                    harness.send([("tokens", request_id, [], "rejected", None)])
            case ("abort", request_id):
                engine.abort(request_id)
                harness.send([("tokens", request_id, [], "abort", None)])
            case ("abort_loading", request_id):
                engine.abort_loading(request_id)
            case ("reset", preempt):
                engine.reset(preempt=preempt)
            case ("sums",):
                harness.send([("sums", engine.take_sums())])
            case ("count",):
                # An idle engine lets held blocks go in its next step, whatever that is for.
                events = [] if engine.has_work() else [*engine.step(), *engine.check_free_blocks()]
                harness.send([*events, ("count", engine.free_blocks(), engine.has_work())])
            case ("close",):
                return False
    return True


def redirect_output(spec: NodeSpec) -> None:
    """Send what the process says to the node's log."""
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)
    # The harness asks for it where a process seems to hang.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
