"""Tests that need CUDA devices skip without, and say why."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark is None:
            continue
        needed = mark.kwargs.get("devices", 1)
        if count < needed:
            reason = f"needs {needed} CUDA device(s), torch {torch.__version__} sees {count}"
            item.add_marker(pytest.mark.skip(reason=reason))
