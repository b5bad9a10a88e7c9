import pytest
from builders import bundle_stage, equal_stage

from kvpp_connect.layout import plan_group
from kvpp_connect.planning.broadcasts import Step, hide, step_traffic


def traffic(mode, layouts, all_blocks=1000, active_blocks=50):
    return step_traffic(mode, layouts, all_blocks=all_blocks, active_blocks=active_blocks)


def test_a_step_holds_whole_blocks_of_each_request():
    assert Step(requests=3, context_tokens=65).active_blocks(64) == 6
    assert Step(requests=3, context_tokens=64).active_blocks(64) == 3


def test_full_mode_sends_all_blocks_and_compact_the_active_ones():
    layouts = (plan_group(equal_stage(6, 100), 2),)
    full, compact = traffic("full", layouts), traffic("compact", layouts)
    assert (full.blocks, full.layer_bytes, full.step_bytes) == (1000, 100_000, 600_000)
    assert (compact.blocks, compact.layer_bytes, compact.step_bytes) == (50, 5_000, 30_000)


def test_more_active_blocks_than_there_are_cannot_travel():
    layouts = (plan_group(equal_stage(6, 100), 2),)
    assert traffic("compact", layouts, all_blocks=10).blocks == 10


def test_the_busiest_stage_counts():
    layouts = (plan_group(equal_stage(3, 100), 2), plan_group(equal_stage(5, 100), 2))
    assert traffic("full", layouts).step_bytes == 500_000


def test_the_first_broadcast_has_nothing_to_hide_behind():
    layouts = (plan_group(equal_stage(4, 100), 2),)
    found = hide(layouts, traffic("compact", layouts), link_bytes_per_s=1e7, layer_s=1e-3)
    assert found.broadcast_s == pytest.approx(5e-4)
    assert found.hidden
    assert found.exposed_s == pytest.approx(5e-4)


def test_what_does_not_fit_behind_a_layer_is_waited_for():
    """Four layers of 1 ms, broadcasts of 1.5 ms: 1.5 + 3 x 0.5 ms."""
    layouts = (plan_group(equal_stage(4, 300), 2),)
    found = hide(layouts, traffic("compact", layouts), link_bytes_per_s=1e7, layer_s=1e-3)
    assert not found.hidden
    assert found.exposed_s == pytest.approx(3e-3)


def test_the_slowest_link_that_hides_just_hides():
    layouts = (plan_group(bundle_stage([[900], [100, 200], [100]]), 2),)
    sent = traffic("compact", layouts)
    needed = hide(layouts, sent, link_bytes_per_s=1, layer_s=1e-3).needed_bytes_per_s
    assert needed == pytest.approx(50 * 300 / 1e-3)
    assert hide(layouts, sent, link_bytes_per_s=needed, layer_s=1e-3).hidden
    assert not hide(layouts, sent, link_bytes_per_s=needed * 0.99, layer_s=1e-3).hidden
