from dataclasses import replace

import pytest
from builders import address, equal_stage, manifest, rank_manifest

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import ComponentAddress, layout_digest, plan_group


def test_holders_are_listed_by_layer_in_rank_order():
    document = manifest(
        rank_manifest(1, address("shared", 0), address("b", 0)),
        rank_manifest(0, address("shared", 0), address("a", 0)),
    )
    found = {name: [r.rank_in_group for r in ranks] for name, ranks in document.holders().items()}
    assert found == {"shared": [0, 1], "a": [0], "b": [1]}


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
        ComponentAddress(
            layer_name="layer-x", address=0, page_bytes=9, block_stride_bytes=8, token_bytes=0
        )
