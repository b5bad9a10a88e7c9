"""``kvpp demo pool`` on fake servers and a real pool, as a process of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mooncake", reason="needs mooncake")
pytest.importorskip("safetensors", reason="needs safetensors")
pytest.importorskip("transformers", reason="needs transformers")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

FAKE_DEMO = Path(__file__).with_name("fake_pool_demo.py")


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory):
    """Current directory of the demos, so that they share the generated model."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def start(tmp_path, work_dir, clean_env):
    def run(*changes, **options):
        options = {"log_dir": str(tmp_path / "logs"), "timeout_s": 60, **options}
        return subprocess.Popen(
            [sys.executable, str(FAKE_DEMO), json.dumps(options), *changes],
            cwd=work_dir,
            env=clean_env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


@pytest.fixture
def demo(start):
    """Runs the demo to its end; answers exit code, stdout and stderr."""

    def run(*changes, **options):
        with start(*changes, **options) as process:
            out, err = process.communicate(timeout=80)
        return process.returncode, out, err

    return run


def test_a_good_run_prints_one_table_and_exits_with_0(demo, tmp_path):
    code, out, err = demo()
    assert code == 0, err
    assert out.count("identical (12 of 12)") == 2
    assert "all checks hold" in out
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == [
        f"{name}.log" for name in ("fill", "plain", "pool-master", "pool-node")
    ]


def test_json_is_the_only_thing_on_stdout(demo):
    code, out, err = demo(as_json=True)
    assert code == 0, err
    value = json.loads(out)
    assert value["ok"] is True
    assert [row["computed_tokens"] for row in value["rows"]] == [5179, 5179]


def test_other_tokens_exit_with_1_and_are_named(demo):
    code, out, err = demo("fill:salt=x")
    assert code == 1
    assert "DIFFERENT (0 of 12)" in out
    assert "check failed: fill: 12 of 12 answers differ from plain vLLM" in err


def test_a_server_that_leaves_the_pool_empty_exits_with_1(demo, tmp_path):
    code, _, err = demo("fill:cut=tp2")
    assert code == 1
    assert "the pool has 0 objects" in err


def test_a_failing_server_is_named_and_rows_before_it_are_kept(demo):
    code, out, err = demo("fill:mode=crash", as_json=True)
    assert code == 1
    assert "failed: fill: ended with exit code 7: RuntimeError: no such layout" in err
    value = json.loads(out)
    assert [row["name"] for row in value["rows"]] == ["plain"]


def children(pid):
    """Programs below a process, by name."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and entry != str(pid):
            try:
                words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            found[int(entry)] = (int(parent), words[0].decode(errors="replace"))
    below, grown = {pid}, True
    while grown:
        more = {child for child, (parent, _) in found.items() if parent in below} - below
        below |= more
        grown = bool(more)
    return {child: found[child][1] for child in below if child in found}


def test_a_signal_leaves_neither_server_nor_pool(start, tmp_path, read_pids, wait_until_dead):
    pids_file = tmp_path / "pids"
    with start(f"plain:pids={pids_file}", "plain:delay_s=60") as process:
        read_pids(Path(f"{pids_file}.requests"), 1)
        running = children(process.pid)
        assert {Path(name).name for name in running.values()} >= {
            "mooncake_master",
            "mooncake_client",
        }
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped by SIGINT; no server is left" in err
    assert wait_until_dead(list(running)) == []


def test_a_pool_that_dies_is_named(start, tmp_path, read_pids):
    pids_file = tmp_path / "pids"
    with start(f"plain:pids={pids_file}", "plain:delay_s=1") as process:
        read_pids(Path(f"{pids_file}.requests"), 1)
        [master] = [
            pid
            for pid, name in children(process.pid).items()
            if Path(name).name == "mooncake_master"
        ]
        os.kill(master, signal.SIGKILL)
        _, err = process.communicate(timeout=80)
    assert process.returncode == 1
    assert "failed: pool-master: was killed by signal 9" in err
