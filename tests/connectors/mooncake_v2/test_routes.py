from dataclasses import replace

import pytest
from builders import address, manifest, rank_manifest

from kvpp_connect.connectors.mooncake_v2.routes import check_compatible, plan_routes
from kvpp_connect.errors import PeerError
from kvpp_connect.layout import TokenShard

LAYERS = [f"model.{i}" for i in range(6)]


def ranks(held, **fields):
    """Rank manifests that hold the given layers."""
    return [
        rank_manifest(rank, *(address(LAYERS[i], 1000 * i, **fields) for i in layers))
        for rank, layers in enumerate(held)
    ]


def sessions(fetches):
    return {fetch.local.layer_name: fetch.source.session for fetch in fetches}


def test_each_layer_is_read_from_the_rank_that_owns_it():
    owners = manifest(*ranks([[0, 1, 2], [3, 4, 5]]))
    route = plan_routes(owners, manifest(*ranks([range(6)])), "shared")[0]
    assert sessions(route.from_producer) == {
        name: f"127.0.0.1:{1000 + i // 3}" for i, name in enumerate(LAYERS)
    }
    assert (route.from_peers, route.for_peers) == ({}, ())


def test_ranks_that_need_the_same_layers_share_the_reading_evenly():
    owners = manifest(*ranks([[0, 1, 2], [3, 4, 5]]))
    routes = plan_routes(owners, manifest(*ranks([range(6)] * 3)), "shared")
    assert [len(route.from_producer) for route in routes.values()] == [2, 2, 2]
    for number, route in routes.items():
        assert sorted(route.from_peers) == sorted(route.for_peers) == sorted({0, 1, 2} - {number})
        own = {fetch.local.layer_name for fetch in route.from_producer}
        others = {f.local.layer_name for fs in route.from_peers.values() for f in fs}
        assert own | others == set(LAYERS)
        assert not own & others


def test_each_rank_of_a_decode_node_with_kvpp_reads_its_own_layers_and_a_share_of_the_draft():
    owners = manifest(*ranks([[0, 1, 5], [2, 3, 4, 5]]))
    group = manifest(*ranks([[0, 1, 2, 5], [3, 4, 5]]))
    routes = plan_routes(owners, group, "shared")
    assert [len(r.from_producer) for r in routes.values()] == [3, 3]
    assert routes[0].for_peers == ()
    assert routes[0].from_peers.keys() == {1}


def test_draft_caches_are_read_from_the_producer_rank_with_the_least_to_send():
    owners = manifest(*ranks([[0, 1, 2, 3, 5], [4, 5]]))
    route = plan_routes(owners, manifest(*ranks([range(6)])), "direct")[0]
    assert sessions(route.from_producer)["model.5"] == "127.0.0.1:1001"


def test_a_missing_shard_of_the_tokens_is_refused():
    half = TokenShard(index=1, count=2, interleave_tokens=4)
    owners = manifest(rank_manifest(0, address("model.0", 0), shard=half))
    with pytest.raises(PeerError, match=r"shard 0 of the tokens of 'model\.0'"):
        plan_routes(owners, manifest(*ranks([[0]])), "shared")


def test_different_layouts_are_refused_with_both_values():
    document, ours = manifest(*ranks([range(6)])), manifest(*ranks([range(6)]))
    check_compatible(document, ours)
    check_compatible(document, manifest(*ranks([range(6)], page_bytes=256), block_tokens=64))
    with pytest.raises(PeerError, match="schema 99, this engine knows 2"):
        check_compatible(replace(document, schema=99), ours)
    with pytest.raises(PeerError, match="blocks of 16 tokens, this engine of 24"):
        check_compatible(document, manifest(*ranks([range(6)], page_bytes=96), block_tokens=24))
    with pytest.raises(PeerError, match=r"'model\.0' as float32, this engine as bfloat16"):
        check_compatible(document, manifest(*ranks([range(6)], dtype="bfloat16")))
    with pytest.raises(PeerError, match=r"no layer 'model\.1' \(1 layers known\)"):
        check_compatible(manifest(*ranks([[0]])), ours)
    with pytest.raises(PeerError, match=r"64 bytes in a block of 16 tokens of 'model\.0', this"):
        check_compatible(document, manifest(*ranks([range(6)], page_bytes=128, token_bytes=8)))


def test_blocks_that_are_not_rows_of_tokens_need_the_same_blocks_on_both_sides():
    document = manifest(*ranks([[0]], token_bytes=0))
    check_compatible(document, manifest(*ranks([[0]])))
    with pytest.raises(PeerError, match="whole blocks only"):
        check_compatible(document, manifest(*ranks([[0]], page_bytes=128), block_tokens=32))
    half = TokenShard(count=2)
    sharded = rank_manifest(0, address("model.0", 0), shard=half)
    with pytest.raises(PeerError, match="without DCP"):
        check_compatible(document, manifest(sharded))
