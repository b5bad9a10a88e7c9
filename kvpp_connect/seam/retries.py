"""Lets a request load KV a second time after its first load failed as a whole.

vLLM admits a background load only if it leaves room for what prefills under way still need. A
request whose load failed has given its blocks back, but still counts as such a prefill, so a second
load of it (from the pool, say, after the prefill node died) waits for room for itself twice: for
ever, where the request is larger than half of the cache.
"""

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_MARK = "_kvpp_connect_retries"


def allow_second_loads() -> None:
    """Change vLLM's scheduler class, once per process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original: Any = Scheduler._update_waiting_for_remote_kv  # noqa: SLF001 - in the ledger
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def _update_waiting_for_remote_kv(self: "Scheduler", request: "Request") -> None:
        original(self, request)
        if request.num_computed_tokens == 0:
            self._inflight_prefills.discard(request)

    setattr(_update_waiting_for_remote_kv, _MARK, True)
    Scheduler._update_waiting_for_remote_kv = (  # noqa: SLF001
        _update_waiting_for_remote_kv
    )
