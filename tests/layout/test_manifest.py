from dataclasses import replace

import pytest
from builders import address, equal_stage, manifest, rank_manifest

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import TokenShard, layout_digest, plan_group


def test_a_block_id_of_a_request_stands_for_the_tokens_of_all_shards():
    shards = [TokenShard(index=i, count=3, interleave_tokens=4) for i in range(3)]
    ranks = [rank_manifest(i, address("a", 0), shard=shard) for i, shard in enumerate(shards)]
    assert manifest(*ranks, block_tokens=16).request_block_tokens == 48
    assert manifest(rank_manifest(0), block_tokens=16).request_block_tokens == 16


@pytest.mark.parametrize("fields", [{"index": 2, "count": 2}, {"interleave_tokens": 0}])
def test_a_shard_that_cannot_be_is_refused(fields):
    with pytest.raises(LayoutError, match="token shard"):
        TokenShard(**fields)


def test_the_digest_is_stable_and_sees_every_part_of_the_plan():
    layout = plan_group(equal_stage(6), 2)
    assert layout_digest(layout) == layout_digest(plan_group(equal_stage(6), 2))
    others = [
        plan_group(equal_stage(5), 2),
        plan_group(equal_stage(6), 3),
        plan_group(equal_stage(6, page_bytes=101), 2),
        plan_group(equal_stage(6), 2, alignment_bytes=64),
        replace(layout, owners=(0, 0, 0, 0, 1, 1)),
    ]
    digests = {layout_digest(other) for other in [layout, *others]}
    assert len(digests) == len(others) + 1


def test_a_page_larger_than_its_stride_is_refused():
    with pytest.raises(LayoutError, match="layer-x"):
        address("layer-x", 0, page_bytes=9, stride=8)
