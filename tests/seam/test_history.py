from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvpp_connect.seam.runtime import has_history


def step(new=(), cached=(), tokens=1):
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=n) for n in new],
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=list(cached)),
    )


@pytest.mark.parametrize(
    ("scheduled", "expected"),
    [
        (step(), False),
        (step(new=[0, 0]), False),
        (step(new=[0, 16]), True),  # a prefix hit, or a pulled prompt
        (step(cached=[5]), True),  # decode, or a later chunk
        (step(cached=[0]), False),  # preempted and resumed from nothing
        (step(new=[16], cached=[5], tokens=0), False),
    ],
)
def test_only_forwards_with_computed_tokens_have_history(scheduled, expected):
    assert has_history(scheduled) is expected
