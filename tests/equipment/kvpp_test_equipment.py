"""A vLLM plugin for tests, found through PYTHONPATH and switched by environment variables.

``KVPP_TEST_CHUNKED=1``        keep chunked prefill and prefix caching for MLA on CPU, which vLLM
                               forces off there, so that forwards with long history happen.
``KVPP_TEST_NO_BROADCAST=1``   negative control: every broadcast is dropped.
``KVPP_TEST_WRONG_OWNER=1``    negative control: each rank publishes, as the caches that it owns,
                               those of the next rank of its group.
"""

import os
from typing import Any


def register() -> None:
    if os.environ.get("KVPP_TEST_CHUNKED") == "1":
        _keep_chunked_prefill()
    if os.environ.get("KVPP_TEST_NO_BROADCAST") == "1":
        _drop_broadcasts()
    if os.environ.get("KVPP_TEST_WRONG_OWNER") == "1":
        _shift_owners()


def _keep_chunked_prefill() -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    if hasattr(original, "kvpp_test"):
        return

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = scheduler.max_num_batched_tokens
        original(cls, vllm_config)
        scheduler.enable_chunked_prefill = True
        cache.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = kept

    check_and_update_config.kvpp_test = True
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _drop_broadcasts() -> None:
    from kvpp_connect.broadcast import collective

    class Nothing:
        def wait(self) -> None:
            return

    collective.TorchBroadcast.start = lambda self, data, source_rank: Nothing()


def _shift_owners() -> None:
    from dataclasses import replace

    from kvpp_connect.connectors.mooncake_v2 import worker_side
    from kvpp_connect.layout import RankPlacement

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

    real = worker_side.active_placement
    worker_side.active_placement = shifted
