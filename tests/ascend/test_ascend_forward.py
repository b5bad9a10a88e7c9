"""Layers wait for their caches whatever the batch, and before anything touches them."""

import ascend_forward
import pytest
from ascend_forward import BATCHES, LAYERS, history

pytestmark = pytest.mark.distributed

PARTS = {"mla": 2, "sfa": 3}
STEPS = {
    "first prefill": ["write", "prefill attention"],
    "prefill": ["write", "prefill attention"],
    "decode": ["write", "decode attention"],
    "short tail": ["write", "decode attention"],
}


@pytest.fixture(scope="module", params=["mla", "sfa"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(kind, run_ranks):
    return run_ranks(ascend_forward.forwards, kind, layers=LAYERS)


def values(kind, layer, new=False):
    return [history(layer, part) + 100 * new for part in range(PARTS[kind])]


@pytest.mark.parametrize("batch", ["prefill", "decode", "short tail"])
def test_every_rank_finds_the_owners_history_before_its_first_access(kind, ranks, batch):
    for rank in ranks:
        steps = STEPS[batch] if kind == "mla" else ["first access"]
        assert rank["seen"][batch] == [
            (layer, step, values(kind, layer)) for layer in range(LAYERS) for step in steps
        ]


def test_without_history_nothing_is_broadcast(kind, ranks):
    """In the first batch strangers find in scratch what was there: nothing of the owner's."""
    with_history = len(BATCHES) - 1
    for number, rank in enumerate(ranks):
        assert rank["broadcasts"] == with_history * LAYERS
        for layer, _, found in rank["seen"]["first prefill"]:
            is_owner = layer // (LAYERS // 2) == number
            assert (found == values(kind, layer)) == is_owner


def test_what_a_forward_writes_stays_with_the_owner(kind, ranks):
    held = {layer: blocks for rank in ranks for layer, blocks in rank["held"].items()}
    assert held == {
        layer: [values(kind, layer), values(kind, layer, new=True)] for layer in range(LAYERS)
    }
