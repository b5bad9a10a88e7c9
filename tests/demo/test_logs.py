import pytest

from kvpp_connect.demo.logs import kv_cache_size, read_log, root_cause, tail

PREFIX = "(EngineCore pid=6812) INFO 11-30 03:41:13 [kv_cache_utils.py:2327] "

CPU_LINE = "CPU KV cache size: 14,464 tokens, Maximum concurrency for 2,048 tokens per request: 7x"


@pytest.mark.parametrize(
    ("line", "tokens", "text"),
    [
        (PREFIX + CPU_LINE, 14464, CPU_LINE),
        (PREFIX + "GPU KV cache size: 1,234,567 tokens", 1234567, None),
        ("INFO 01-01 00:00:00 [x.py:1] NPU KV cache size: 5200 tokens", 5200, None),
        (PREFIX + "GPU + host KV cache size: 43.392 tokens", 43392, "GPU + host KV cache size"),
        ("KV cache size: 1_024 tokens", 1024, "KV cache size: 1_024 tokens"),
        ("XPU KV cache size: 7 tokens", 7, None),
    ],
)
def test_the_kv_cache_size_is_read_whatever_the_device_and_the_separator(line, tokens, text):
    found = kv_cache_size(f"before\n{line}\nafter")
    assert found is not None
    assert found.tokens == tokens
    assert "INFO" not in found.text
    assert found.text.startswith(text or line.split("] ")[-1])


def test_the_last_start_counts():
    lines = [
        f"(EngineCore pid={pid}) CPU KV cache size: {tokens} tokens"
        for pid, tokens in ((7, 100), (8, 200))
    ]
    found = kv_cache_size("\n".join(lines))
    assert found is not None
    assert found.tokens == 200


def test_a_log_without_a_kv_cache_size_says_so():
    assert kv_cache_size("KV cache sizes must match\nKV cache size: unknown tokens") is None


VLLM_FAILURE = """\
(Worker_TP0 pid=1) ERROR 11-30 03:37:17 [multiproc_executor.py:953] Traceback (most recent call \
last):
(Worker_TP0 pid=1) ERROR 11-30 03:37:17 [multiproc_executor.py:953]   File "x.py", line 3, in f
(Worker_TP0 pid=1) ERROR 11-30 03:37:17 [multiproc_executor.py:953] RuntimeError: expect weight \
to be bfloat16.
(EngineCore pid=2) ERROR 11-30 03:37:19 [core.py:1510] Exception: WorkerProc initialization \
failed due to an exception in a background process. See stack trace for root cause.
Process EngineCore:
Traceback (most recent call last):
Exception: WorkerProc initialization failed due to an exception in a background process.
(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above.
resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 2 leaked objects
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (VLLM_FAILURE, "RuntimeError: expect weight to be bfloat16."),
        (
            "pydantic.ValidationError: 1 validation error for VllmConfig\n  Value error, DCP\n",
            "pydantic.ValidationError: 1 validation error for VllmConfig Value error, DCP",
        ),
        (
            "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --foo\n",
            "api_server.py: error: unrecognized arguments: --foo",
        ),
        (
            "OSError: [Errno 98] Address already in use\n",
            "OSError: [Errno 98] Address already in use",
        ),
        (
            "(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause.\n",
            "RuntimeError: Engine core initialization failed. See root cause.",
        ),
        (
            "(Worker pid=3) ERROR 11-30 03:37:17 [x.py:1] something went wrong\nbye\n",
            "something went wrong",
        ),
        ("all is well\n", None),
        ("", None),
    ],
)
def test_the_root_cause_is_found_below_the_tracebacks_of_those_who_only_noticed(log, cause):
    assert root_cause(log) == cause


def test_the_tail_holds_the_last_lines_and_cuts_long_ones():
    text = "\n".join(f"line {n} " + "x" * 1000 for n in range(100)) + "\n\n"
    lines = tail(text).splitlines()
    assert len(lines) == 30
    assert lines[-1].startswith("line 99 ")
    assert max(map(len, lines)) == 300


def test_logs_lose_colours_and_may_be_absent_or_not_utf8(tmp_path):
    path = tmp_path / "x.log"
    assert read_log(path) == ""
    path.write_bytes(b"\x1b[32mready\x1b[0m \xff")
    assert read_log(path) == "ready \N{REPLACEMENT CHARACTER}"
