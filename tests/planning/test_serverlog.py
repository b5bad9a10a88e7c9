import pytest
from planning_tools import EXAMPLES

from kvpp_connect.planning.serverlog import read_capacity, strip_colours

V032 = (
    "(EngineCore pid=6812) INFO 11-30 03:41:13 [kv_cache_utils.py:2327] CPU KV cache size: "
    "14,464 tokens, Maximum concurrency for 2,048 tokens per request: 7.06x"
)
TWO_LINES = """\
(EngineCore_DP0 pid=5552) INFO 12-18 09:44:57 [kv_cache_utils.py:864] GPU KV cache size: 78,800 \
tokens
(EngineCore_DP0 pid=5552) INFO 12-18 09:44:57 [kv_cache_utils.py:868] Maximum concurrency for \
8,192 tokens per request: 9.62x
"""
# Once per rank, and a rank of a worker's own prefix; colours that lost their escape character.
RANKS = """\
[1;36m(VllmWorker rank=1 pid=219)[0;0m INFO 08-31 14:45:44 [gpu_worker.py:232] Available KV cache \
memory: 10.04 GiB
INFO 08-31 14:45:45 [kv_cache_utils.py:716] GPU KV cache size: 375,984 tokens
INFO 08-31 14:45:45 [kv_cache_utils.py:720] Maximum concurrency for 8,192 tokens per request: 45.9x
INFO 08-31 14:45:45 [kv_cache_utils.py:716] GPU KV cache size: 375,968 tokens
INFO 08-31 14:45:45 [kv_cache_utils.py:720] Maximum concurrency for 8,192 tokens per request: 45.89x
"""
BEFORE_V1 = """\
INFO 02-11 08:00:01 executor_base.py:110] # CUDA blocks: 27896, # CPU blocks: 2048
INFO 02-11 08:00:01 executor_base.py:115] Maximum concurrency for 32768 tokens per request: 13.62x
"""


def only(text):
    (engine,) = read_capacity(text).engines
    return engine


def test_todays_line():
    engine = only(f"before\n{V032}\nafter")
    assert (engine.tokens, engine.request_tokens, engine.concurrency) == (14464, 2048, 7.06)
    assert engine.text == V032.partition("] ")[2]
    assert engine.engine == "EngineCore"


def test_the_logs_of_real_servers():
    plain, kvpp = (only((EXAMPLES / name).read_text()) for name in ("plain.log", "kvpp.log"))
    assert (plain.tokens, plain.request_tokens, plain.concurrency) == (4336, 1024, 4.23)
    assert (kvpp.tokens, kvpp.request_tokens, kvpp.concurrency) == (7440, 1024, 7.27)


def test_two_lines_of_older_releases_belong_together():
    engine = only(TWO_LINES)
    assert (engine.tokens, engine.request_tokens, engine.concurrency) == (78800, 8192, 9.62)


def test_the_smallest_of_several_ranks_counts():
    engine = only(RANKS)
    assert (engine.tokens, engine.concurrency) == (375_968, 45.89)


def test_releases_before_v1_state_blocks_and_a_rounded_concurrency():
    found = read_capacity(BEFORE_V1)
    assert found.engines[0].blocks == 27896
    assert found.is_rounded
    assert found.tokens == round(13.62 * 32768)


def test_engines_add_up():
    second = V032.replace("EngineCore pid=6812", "EngineCore_DP1 pid=1").replace("7.06", "7.00")
    first = V032.replace("EngineCore pid=6812", "EngineCore_DP0 pid=2")
    found = read_capacity(f"{first}\n{second}")
    assert len(found.engines) == 2
    assert found.tokens == 2 * 14464
    assert found.concurrency == pytest.approx(14.06)
    assert found.request_tokens == 2048


def test_concurrencies_of_different_lengths_do_not_add_up():
    other = V032.replace("EngineCore pid", "EngineCore_DP1 pid").replace("2,048", "1,024")
    found = read_capacity(f"{V032}\n{other}")
    assert found.request_tokens is None
    assert found.concurrency is None


@pytest.mark.parametrize(
    "between",
    [
        "",
        "(EngineCore pid=6812) INFO [core.py:134] Initializing a V1 LLM engine (v0.32.0) with",
    ],
)
def test_the_last_start_counts(between):
    """Of another process, or of the same number in a container that was started again."""
    second = V032.replace("14,464", "17,360")
    if not between:
        second = second.replace("pid=6812", "pid=7000")
    assert read_capacity(f"{V032}\n{between}\n{second}").tokens == 17360


def test_the_last_start_counts_where_processes_have_no_names():
    log = f"{RANKS}INFO [llm_engine.py:1] Initializing an LLM engine (v0.7.0) with\n"
    log += "INFO [x.py:1] GPU KV cache size: 400,000 tokens\n"
    assert read_capacity(log).tokens == 400_000


def test_a_start_that_states_nothing_does_not_hide_the_one_before():
    log = f"{V032}\n(EngineCore pid=9) INFO [core.py:134] Initializing a V1 LLM engine (v0.32.0)"
    assert read_capacity(log).tokens == 14464


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("INFO 01-01 00:00:00 [x.py:1] NPU KV cache size: 5200 tokens", 5200),
        ("\x1b[0;36m(EngineCore pid=1)\x1b[0m GPU + host KV cache size: 43.392 tokens", 43392),
        ("KV cache size: 1_024 tokens", 1024),
        ("vllm-1  | INFO XPU KV cache size: 1\u00a0234\u00a0567 tokens", 1_234_567),
        ("Spyre KV cache size: 7 tokens", 7),
    ],
)
def test_any_device_and_any_separator(line, tokens):
    assert read_capacity(line).tokens == tokens


@pytest.mark.parametrize(
    ("times", "value"), [("1,024.50", 1024.5), ("7,06", 7.06), ("12", 12.0), ("1.50", 1.5)]
)
def test_concurrencies_are_decimal_numbers(times, value):
    engine = only(f"Maximum concurrency for 1 tokens per request: {times}x")
    assert engine.concurrency == value


def test_a_log_without_a_capacity_says_so():
    for text in ("", "KV cache size: unknown tokens", "KV cache sizes must match", "\x00" * 50):
        assert read_capacity(text) is None


def test_a_long_line_costs_no_time():
    assert read_capacity("word " * 200_000) is None


def test_colours_go_and_brackets_stay():
    assert strip_colours("\x1b[32mready\x1b[0m [1;36mx[0;0m [memory] [m]") == "ready x [memory] [m]"
