"""Calls that a breakable CUDA graph repeats at each replay, instead of capturing them.

A vLLM without breakable graphs captures none.
"""

from collections.abc import Callable
from typing import Any

from vllm.forward_context import get_forward_context

try:
    from vllm.compilation.breakable_cudagraph import (
        BreakableCUDAGraphCapture,
        eager_break_during_capture,
    )
except ImportError:
    _capture: Any = None
else:
    _capture = BreakableCUDAGraphCapture


def capturing() -> bool:
    """Whether this thread captures a breakable graph."""
    return _capture is not None and _capture.is_active()


def at_replay(call: Callable[[], None]) -> Callable[[], None]:
    """What to call while a graph is captured, so that ``call`` is made at each of its replays.

    Not in dummy runs, which have no metadata. Outside of a capture it makes the call itself.
    """

    def in_a_forward() -> None:
        if get_forward_context().attn_metadata is not None:
            call()

    return eager_break_during_capture(in_a_forward) if _capture is not None else in_a_forward
