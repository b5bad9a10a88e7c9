"""One engine stores over real Mooncake, others load: byte by byte, without a model."""

import pytest
from pool_equipment import mooncake_master
from pool_ranks import HASHES, LAYERS, PAGE_BYTES, Engine, scope_of, storing_rank
from processes import Child

from kvpp_connect.connectors.ascend_store.backends.create import create_store
from kvpp_connect.connectors.ascend_store.backends.settings import parse_store_settings
from kvpp_connect.connectors.ascend_store.lookups import count_complete

pytestmark = pytest.mark.distributed
pytest.importorskip("mooncake", reason="needs mooncake")


@pytest.fixture(scope="module")
def master():
    with mooncake_master() as server:
        yield server


@pytest.fixture(scope="module")
def filled(master):
    """Two ranks, processes of their own, have stored the prompt: scope, reports, counters."""
    children = [Child(storing_rank, master.address, rank, 2) for rank in range(2)]
    rows = [child.get() for child in children]
    for child in children:
        child.put(rows)
    [stage] = [stage for child in children for stage in child.get()]
    for child in children:
        child.put(scope_of(stage))
    yield scope_of(stage), [child.get() for child in children]
    for child in children:
        child.kill()


@pytest.fixture
def look_up(master):
    """Asks, as a scheduler side does, how many of the prompt's blocks an engine finds."""
    settings = {"master_server_address": master.address}
    store = create_store(
        parse_store_settings("mooncake", settings, {}), host="127.0.0.1", segment=False
    )

    def ask(scope, stage):
        return count_complete(store, scope, [shard.name for shard in stage.shards], HASHES)

    yield ask
    store.close()


@pytest.fixture
def engine(master, filled):
    """Makes engines on the pool that was filled."""
    made = []

    def make(ranks, *, kvpp):
        made.append(Engine(master.address, ranks, kvpp=kvpp))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_each_layer_is_stored_once(filled):
    _, ranks = filled
    assert [report.failed for report, _ in ranks] == [set(), set()]
    assert sum(counts["pool_put_objects"] for _, counts in ranks) == 2 * len(HASHES)
    stored_bytes = [counts["pool_put_bytes"] for _, counts in ranks]
    assert sum(stored_bytes) == LAYERS * PAGE_BYTES * len(HASHES)
    assert all(stored_bytes)


@pytest.mark.parametrize("kvpp", [True, False])
def test_an_engine_of_the_same_cut_loads_every_byte(filled, engine, look_up, kvpp):
    other = engine(2, kvpp=kvpp)
    assert other.scope == filled[0]
    assert look_up(other.scope, other.stage) == len(HASHES)
    for rank in other.ranks:
        assert rank.load(other.scope) == set()
        rank.assert_loaded()


def test_an_engine_of_one_rank_hits_nothing_of_two(filled, engine, look_up):
    other = engine(1, kvpp=False)
    assert other.scope != filled[0]
    assert look_up(other.scope, other.stage) == 0
    # What it stores itself stands beside the others' objects.
    report, _ = other.ranks[0].store(other.scope)
    assert report.failed == set()
    assert look_up(other.scope, other.stage) == len(HASHES)
