"""The whole demo on fake servers, as a process of its own."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvpp_connect.demo.ports import LOOPBACK, check_ports_free
from kvpp_connect.errors import ConfigError

pytest.importorskip("safetensors", reason="needs safetensors")
pytest.importorskip("transformers", reason="needs transformers")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

FAKE_DEMO = Path(__file__).with_name("fake_demo.py")


def base_of_free_ports(count):
    """First of `count` neighbouring free ports, below those that the system gives to clients."""
    while True:
        base = random.randrange(20_000, 32_000)
        with contextlib.suppress(ConfigError):
            check_ports_free(("demo", base + n) for n in range(count))
            return base


@pytest.fixture
def command(tmp_path):
    """Command line of the demo on fake servers, with logs in tmp_path / "logs"."""

    def build(*changes, **options):
        options = {"log_dir": str(tmp_path / "logs"), "timeout_s": 60, **options}
        return [sys.executable, str(FAKE_DEMO), json.dumps(options), *changes]

    return build


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory):
    """Current directory of the demos, so that they share the generated model."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def demo(command, work_dir, clean_env):
    """Runs the demo to its end."""

    def run(*changes, **options):
        return subprocess.run(
            command(*changes, **options),
            cwd=work_dir,
            env=clean_env,
            capture_output=True,
            text=True,
            timeout=80,
            check=False,
        )

    return run


def test_a_good_run_prints_one_table_and_exits_with_0(demo, work_dir, tmp_path):
    result = demo()
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("identical (12 of 12)") == 3
    assert "1.20 (1.20)" in result.stdout
    assert "71.6 / 71.6 MB = 1.00" in result.stdout
    assert "all checks hold" in result.stdout
    assert "prefill" in result.stderr
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == [
        f"{name}.log" for name in ("decode", "kvpp", "plain", "prefill", "router")
    ]
    assert len(list((work_dir / ".cache/kvpp").iterdir())) == 1


def test_json_is_the_only_thing_on_stdout(demo):
    result = demo(as_json=True)
    assert result.returncode == 0, result.stderr
    value = json.loads(result.stdout)
    assert value["ok"] is True
    assert value["failures"] == []
    assert [row["identical"] for row in value["rows"]] == [12, 12, 12]
    assert value["rows"][2]["pulled_bytes"] == value["rows"][2]["logical_bytes"] > 0


def test_other_tokens_exit_with_1_and_are_named(demo):
    result = demo("kvpp:salt=x")
    assert result.returncode == 1
    assert "DIFFERENT (0 of 12)" in result.stdout
    assert "check failed: kvpp: 12 of 12 answers differ from plain vLLM" in result.stderr


def test_a_decode_server_that_pulls_nothing_exits_with_1(demo):
    result = demo("decode:pull=0")
    assert result.returncode == 1
    assert "check failed: pd: the decode server pulled nothing" in result.stderr


def test_another_capacity_than_the_formula_exits_with_1(demo):
    result = demo("kvpp:kv_tokens=10000")
    assert result.returncode == 1
    assert "check failed: kvpp: KV cache is 1.000 x plain vLLM" in result.stderr


def test_a_failing_server_is_named_with_its_cause_and_its_log(demo):
    result = demo("decode:mode=crash", as_json=True)
    assert result.returncode == 1
    assert "failed: decode: ended with exit code 7: RuntimeError: no such layout" in result.stderr
    assert "WorkerProc initialization failed" in result.stderr
    assert "Traceback" not in result.stderr
    value = json.loads(result.stdout)
    assert value["ok"] is False
    assert value["error"].startswith("decode: ended with exit code 7")
    assert [row["name"] for row in value["rows"]] == ["plain", "kvpp"]


def test_a_server_that_dies_during_the_requests_is_named(demo):
    result = demo("kvpp:die_after=5")
    assert result.returncode == 1
    assert "failed: kvpp: ended with exit code 3" in result.stderr


def test_the_time_limit_is_for_everything(demo):
    result = demo("plain:mode=silent", timeout_s=2)
    assert result.returncode == 1
    # What is left of it when the server is started, in whole seconds.
    assert re.search("failed: plain: was not ready after [12] s", result.stderr)


def test_a_busy_port_of_the_last_row_is_refused_before_the_first_starts(demo, tmp_path):
    base_port = base_of_free_ports(6)
    port = base_port + 3  # plain, kvpp, prefill, decode
    with socket.create_server((LOOPBACK, port)):
        result = demo(base_port=base_port)
    assert result.returncode == 1
    assert f"port {port} on 127.0.0.1, wanted by decode" in result.stderr
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("stage", ["start", "requests"])
def test_a_signal_leaves_no_process_and_no_port(
    command, work_dir, clean_env, tmp_path, read_pids, wait_until_dead, number, exit_code, stage
):
    base_port = base_of_free_ports(6)
    pids_file = tmp_path / "pids"
    slow = "mode=silent" if stage == "start" else "delay_s=30"
    words = [f"plain:pids={pids_file}", f"plain:{slow}", "plain:child=1"]
    with subprocess.Popen(
        command(*words, base_port=base_port),
        cwd=work_dir,
        env=clean_env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        pids = read_pids(pids_file, 2)
        if stage == "requests":
            read_pids(Path(f"{pids_file}.requests"), 1)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == exit_code, err
    assert out == ""
    assert f"stopped by {number.name}; no server is left" in err
    assert "Traceback" not in err
    assert wait_until_dead(pids, 0) == []
    check_ports_free(("demo", base_port + n) for n in range(6))


def test_a_demo_that_is_killed_takes_its_servers_with_it(
    command, work_dir, clean_env, tmp_path, read_pids, wait_until_dead
):
    pids_file = tmp_path / "pids"
    with subprocess.Popen(
        command(f"plain:pids={pids_file}", "plain:mode=silent"),
        cwd=work_dir,
        env=clean_env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        pids = read_pids(pids_file, 1)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert wait_until_dead(pids) == []


def test_logs_of_a_good_run_are_kept_on_request_only(demo, tmp_path, monkeypatch, clean_env):
    monkeypatch.setitem(clean_env, "TMPDIR", str(tmp_path))
    assert demo(log_dir=None).returncode == 0
    assert list(tmp_path.glob("kvpp-demo-*")) == []
    assert demo(log_dir=None, keep_logs=True).returncode == 0
    (kept,) = tmp_path.glob("kvpp-demo-*")
    assert (kept / "decode.log").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_no_obstacle(demo, work_dir):
    work_dir.chmod(0o500)
    try:
        assert demo().returncode == 0
    finally:
        work_dir.chmod(0o700)
