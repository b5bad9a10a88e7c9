"""A vLLM plugin for tests, found through PYTHONPATH and switched by environment variables.

``KVPP_TEST_CHUNKED=1``        keep chunked prefill and prefix caching for MLA on CPU, which vLLM
                               forces off there, so that forwards with long history happen.
``KVPP_TEST_SPARSE=1``         sparse MLA on CPU (:mod:`kvpp_sparse_cpu`), with what CHUNKED keeps
                               and the blocks of 64 tokens that vLLM's indexer needs.
``KVPP_TEST_ASYNC=1``          with one of those: keep asynchronous scheduling, off there as well.
``KVPP_TEST_FORK=1``           fork processes, which vLLM spawns on CPU for its thread pools: two
                               ranks start in a third of the time.
``KVPP_TEST_WARM_UP=1``        warm model runner V2 up as vLLM does on accelerators only.
``KVPP_TEST_LATE=1``           every broadcast starts when its layer waits for it, so that what a
                               layer does too early is always wrong, not only now and then.
``KVPP_TEST_NO_BROADCAST=1``   negative control: every broadcast is dropped.
``KVPP_TEST_NO_INDEX_KEYS=1``  negative control for compact mode: only main caches are broadcast.
``KVPP_TEST_WRONG_OWNER=1``    negative control: each rank publishes, as the caches that it owns,
                               those of the next rank of its group.
"""

import os
from typing import Any


def register() -> None:
    sparse = os.environ.get("KVPP_TEST_SPARSE") == "1"
    if sparse or os.environ.get("KVPP_TEST_CHUNKED") == "1":
        _keep_chunked_prefill(block_tokens=64 if sparse else None)
    elif os.environ.get("KVPP_TEST_FORK") == "1":
        _fork_processes()
    if os.environ.get("KVPP_TEST_ASYNC") == "1":
        _stand_in_for_streams()
    if sparse:
        import kvpp_sparse_cpu

        kvpp_sparse_cpu.install()
    if os.environ.get("KVPP_TEST_WARM_UP") == "1":
        _warm_up()
    if os.environ.get("KVPP_TEST_LATE") == "1":
        _broadcast_late()
    if os.environ.get("KVPP_TEST_NO_BROADCAST") == "1":
        _drop_broadcasts()
    if os.environ.get("KVPP_TEST_NO_INDEX_KEYS") == "1":
        _leave_index_keys_behind()
    if os.environ.get("KVPP_TEST_WRONG_OWNER") == "1":
        _shift_owners()


def _keep_chunked_prefill(block_tokens: int | None) -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    if hasattr(original, "kvpp_test"):
        return

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = scheduler.max_num_batched_tokens
        original(cls, vllm_config)
        if os.environ.get("KVPP_TEST_FORK") == "1":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        scheduler.async_scheduling = os.environ.get("KVPP_TEST_ASYNC") == "1"
        scheduler.enable_chunked_prefill = True
        cache.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = kept
        cache.block_size = block_tokens or cache.block_size

    check_and_update_config.kvpp_test = True
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _fork_processes() -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    if hasattr(original, "kvpp_test"):
        return

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    check_and_update_config.kvpp_test = True
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _stand_in_for_streams() -> None:
    """What asynchronous output asks of torch.cuda, where all work is done in order anyway."""
    from contextlib import nullcontext

    import torch

    class Nothing:
        def __init__(self, **_: Any) -> None: ...
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def wait_stream(self, stream: Any) -> None: ...

    torch.cuda.Event = torch.cuda.Stream = torch.cuda.current_stream = Nothing
    torch.cuda.stream = lambda stream: nullcontext()


def _warm_up() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    original = CPUWorker.compile_or_warm_up_model

    def compile_or_warm_up_model(self: Any) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.worker.gpu import warmup

        times = original(self)
        # Triton's interpreter runs neither the kernels of top-k and top-p nor those of grammars.
        greedy = SamplingParams(temperature=0, max_tokens=9)
        SamplingParams.for_sampler_warmup = staticmethod(lambda: greedy)
        run = (self.model_runner, self.execute_model, lambda grammar: self.sample_tokens(None))
        warmup.warmup_kernels(*run)
        assert warmup.run_mixed_prefill_decode_warmup(*run, num_tokens=100)
        print("KVPP_TEST_WARM_UP done", flush=True)
        return times

    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model


def _wrap_transport(wrap: Any) -> None:
    from kvpp_connect.broadcast.engine import PrefetchEngine

    original = PrefetchEngine.__init__
    PrefetchEngine.__init__ = lambda self, placement, payload, transport, device, gate: original(
        self, placement, payload, wrap(transport), device, gate
    )


def _broadcast_late() -> None:
    class Late:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        def start(self, data: Any, source_rank: int, gather: Any) -> "Late":
            self._due = data, source_rank, gather
            return self

        def wait(self) -> None:
            self._transport.start(*self._due).wait()

    _wrap_transport(Late)


def _drop_broadcasts() -> None:
    class Nothing:
        def start(self, data: Any, source_rank: int, gather: Any) -> "Nothing":
            return self

        def wait(self) -> None:
            return

    _wrap_transport(lambda transport: Nothing())


def _leave_index_keys_behind() -> None:
    from dataclasses import replace

    from kvpp_connect.broadcast.payload import CompactPayload

    pieces = CompactPayload.pieces

    def main_pieces(self: Any, ordinal: int) -> Any:
        main = self._placement.bundles[ordinal].scratch[0]
        (both,) = pieces(self, ordinal)
        gather = both.gather and replace(both.gather, caches=both.gather.caches[:1])
        return (
            replace(both, data=both.data[: main.used_range(len(self._active))[1]], gather=gather),
        )

    CompactPayload.pieces = main_pieces


def _shift_owners() -> None:
    from dataclasses import replace

    from kvpp_connect.layout import RankPlacement
    from kvpp_connect.seam import host_plan

    def shifted() -> RankPlacement | None:
        placement = real()
        if placement is None:
            return None
        size = placement.layout.group_size
        owners = {b.ordinal: b.owner for b in placement.bundles}
        stage = placement.layout.stage.targets
        ordinal_of = {c.layer_name: i for i, b in enumerate(stage) for c in b.components}
        return replace(
            placement,
            components=tuple(
                replace(
                    c,
                    persistent=(owners[ordinal_of[c.component.layer_name]] + 1) % size
                    == placement.rank,
                )
                for c in placement.components
            ),
        )

    real = host_plan.active_placement
    host_plan.active_placement = shifted
