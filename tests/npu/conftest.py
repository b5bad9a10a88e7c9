"""Tests that need NPUs skip without, and say why."""

from importlib.util import find_spec

import pytest


def _count():
    """How many NPUs torch_npu sees, and why it is none."""
    if find_spec("torch_npu") is None:
        return 0, "torch_npu is not installed"
    import torch
    import torch_npu

    count = torch_npu.npu.device_count() if torch_npu.npu.is_available() else 0
    return count, f"torch {torch.__version__} sees {count} NPU(s)"


def pytest_collection_modifyitems(items):
    marked = [(item, item.get_closest_marker("npu")) for item in items]
    if not any(mark for _, mark in marked):
        return
    count, why = _count()
    for item, mark in marked:
        needed = mark.kwargs.get("devices", 1) if mark else 0
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NPU(s): {why}"))


@pytest.fixture
def start_ranks(spawn):
    """Starts ``function(pipe, *arguments, rank)`` once for each rank; what each of them sends."""

    def start(function, ranks, *arguments):
        children = [spawn(function, *arguments, rank) for rank in range(ranks)]
        return [child.get(300) for child in children]

    return start
