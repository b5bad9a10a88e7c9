"""What the rows of ``kvpp demo pool`` must find in the pool, and which servers they are."""

from pathlib import Path

from kvpp_connect.demo.pool_rows import ExpectedPool, plan_pool_rows
from kvpp_connect.demo.pool_servers import PoolServers

POOL = PoolServers(ports=(1, 2, 3, 4))


def test_an_empty_pool_has_nothing():
    assert ExpectedPool().hit_tokens("tp2", "A" * 100) == 0


def test_whole_blocks_of_a_common_prefix_are_hit():
    pool = ExpectedPool()
    pool.add("tp2", "A" * 40 + "B" * 20)
    assert pool.hit_tokens("tp2", "A" * 40 + "C" * 60) == 32
    assert pool.count("tp2") == 3


def test_a_block_in_the_middle_is_no_hit_without_those_before_it():
    pool = ExpectedPool()
    pool.add("tp2", "A" * 32)
    assert pool.hit_tokens("tp2", "B" * 16 + "A" * 32) == 0


def test_the_last_token_of_a_prompt_is_never_hit():
    pool = ExpectedPool()
    pool.add("tp2", "A" * 64)
    assert pool.hit_tokens("tp2", "A" * 32) == 16
    assert pool.hit_tokens("tp2", "A" * 33) == 32


def test_another_cut_has_nothing():
    pool = ExpectedPool()
    pool.add("tp2", "A" * 64)
    assert pool.hit_tokens("tp1", "A" * 64) == 0
    assert pool.count("tp1") == 0


def test_a_block_that_is_computed_twice_is_there_once():
    pool = ExpectedPool()
    pool.add("tp2", "A" * 64)
    pool.add("tp2", "A" * 64)
    assert pool.count("tp2") == 4


def test_what_fills_the_pool_is_gone_before_others_hit_it():
    first, second = plan_pool_rows(Path("/model"), (5, 6, 7), POOL, kv_cache_bytes=1000)
    assert [row.name for row in first] == ["plain", "fill", "tp1"]
    assert [row.name for row in second] == ["hit", "off"]
    rows = (*first, *second)
    assert [row.cut for row in rows] == ["", "tp2", "tp1", "tp2", "tp2"]
    assert [row.shards for row in rows] == [0, 2, 1, 2, 2]
    assert [row.server.launch().port for row in rows] == [5, 6, 7, 5, 6]
    words = [row.server.launch().argv for row in rows]
    assert ["--kv-transfer-config" in argv for argv in words] == [False, True, True, True, True]
    assert ["--additional-config" in argv for argv in words] == [False, True, False, True, False]
    ranks = [argv[argv.index("--tensor-parallel-size") + 1] for argv in words]
    assert ranks == ["2", "2", "1", "2", "2"]


def test_engines_lend_no_memory_so_that_the_pool_outlives_them():
    extra = POOL.kv_transfer_config()["kv_connector_extra_config"]
    assert extra["global_segment_size"] == 0
    assert extra["master_server_address"] == "127.0.0.1:1"
