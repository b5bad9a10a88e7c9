import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvpp_connect.demo.guard import group_members
from kvpp_connect.demo.process import ServerError, ServerProcess

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]


@pytest.fixture
def start(fake, tmp_path):
    """Starts a fake server; all are stopped after the test."""
    started = []

    def run(**options):
        launch = fake(pids=tmp_path / "pids", **options)
        process = ServerProcess(launch, log_path=tmp_path / "server.log")
        started.append(process)
        process.start()
        return process

    yield run
    for process in started:
        process.stop(grace_s=0.1)


def test_stop_ends_an_obedient_server_and_may_be_repeated(
    start, tmp_path, read_pids, wait_until_dead
):
    process = start()
    pids = read_pids(tmp_path / "pids", 1)
    assert process.exit_code() is None
    assert set(process.members()) == {process.pid, *pids}
    process.stop()
    process.stop()
    assert process.pid is None
    assert process.exit_code() == -signal.SIGTERM
    assert wait_until_dead(pids, 0) == []


def test_a_server_that_was_never_started_can_be_stopped(fake, tmp_path):
    ServerProcess(fake(), log_path=tmp_path / "x.log").stop()


def test_a_server_that_ignores_sigterm_is_killed_within_the_grace(
    start, tmp_path, read_pids, wait_until_dead
):
    process = start(term="ignore")
    pids = read_pids(tmp_path / "pids", 1)
    begin = time.monotonic()
    process.stop(grace_s=0.5)
    assert 0.5 <= time.monotonic() - begin < 10  # the default is 15
    assert process.exit_code() == -signal.SIGKILL
    assert wait_until_dead(pids, 0) == []


@pytest.mark.parametrize("mode", ["ok", "crash"])
def test_children_that_outlive_the_server_are_killed_too(
    start, tmp_path, read_pids, wait_until_dead, mode
):
    process = start(mode=mode, child=1)
    pids = read_pids(tmp_path / "pids", 2)
    assert len(pids) == 2
    process.stop(grace_s=20)
    assert wait_until_dead(pids, 0) == []


def test_an_early_end_is_reported_with_exit_code_root_cause_and_log(start):
    process = start(mode="crash")
    while process.exit_code() is None:
        time.sleep(0.02)
    with pytest.raises(ServerError) as caught:
        process.check_running()
    error = caught.value
    assert str(error) == "fake: ended with exit code 7: RuntimeError: no such layout"
    assert "WorkerProc initialization failed" in error.log_tail
    assert error.log_path == process.log_path


def test_a_server_killed_by_a_signal_is_reported_with_the_signal(start, tmp_path, read_pids):
    process = start(mode="silent")
    (pid,) = read_pids(tmp_path / "pids", 1)
    os.kill(pid, signal.SIGKILL)
    while process.exit_code() is None:
        time.sleep(0.02)
    with pytest.raises(ServerError, match="killed by signal 9"):
        process.check_running()


@pytest.fixture
def start_and_be_killed(fake, tmp_path, read_pids):
    """Starts a fake server from a process that is then killed; ids of the server's processes."""

    def run(count, **options):
        launch = fake(pids=tmp_path / "pids", **options)
        code = (
            "import time; from pathlib import Path\n"
            "from kvpp_connect.demo.process import Launch, ServerProcess\n"
            f"launch = Launch(name='x', argv={launch.argv!r}, port={launch.port},"
            " orderly_end_s=1)\n"
            f"ServerProcess(launch, log_path=Path({str(tmp_path / 'x.log')!r})).start()\n"
            "time.sleep(60)\n"
        )
        with subprocess.Popen([sys.executable, "-c", code]) as parent:
            pids = read_pids(tmp_path / "pids", count)
            parent.kill()
        return pids

    return run


def test_a_server_ends_when_the_process_that_started_it_is_killed(
    start_and_be_killed, wait_until_dead
):
    assert wait_until_dead(start_and_be_killed(1)) == []


def test_its_stubborn_children_end_then_too(start_and_be_killed, wait_until_dead):
    assert wait_until_dead(start_and_be_killed(2, child=1), limit_s=10) == []


def test_a_stubborn_server_ends_then_too(start_and_be_killed, wait_until_dead):
    pids = start_and_be_killed(1, term="ignore")
    assert wait_until_dead(pids, limit_s=10) == []


def test_a_server_ends_when_its_guard_is_killed(start, tmp_path, read_pids, wait_until_dead):
    process = start()
    pids = read_pids(tmp_path / "pids", 1)
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until_dead(pids) == []


def test_group_members_sees_this_process_and_no_strangers():
    members = group_members(os.getpgrp())
    assert os.getpid() in members
    assert group_members(2**22 + 1) == ()


def test_a_killed_server_leaves_no_shared_memory(start, tmp_path):
    process = start(term="ignore", shm=tmp_path / "shm")
    while not (tmp_path / "shm").exists() or not (tmp_path / "shm").read_text():
        time.sleep(0.02)
    segment = Path("/dev/shm", (tmp_path / "shm").read_text())
    assert segment.exists()
    process.stop(grace_s=0.1)
    assert process.exit_code() == -signal.SIGKILL
    assert not segment.exists()


def test_scratch_files_named_in_the_log_are_removed(start, fake, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    launch = replace(fake(pids=tmp_path / "pids", mode="ok"), scratch_pattern=r"fake_scratch_\d+")
    process = ServerProcess(launch, log_path=tmp_path / "server.log")
    process.start()
    (tmp_path / "fake_scratch_0123-left").touch()
    (tmp_path / "other").touch()
    while "fake_scratch" not in process.log_path.read_text():
        time.sleep(0.02)
    process.stop()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "pids", "server.log"]


def test_a_server_has_a_folder_of_its_own_that_is_removed_with_it(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    launch = replace(fake(mode="ok"), folder_variable="FAKE_FOLDER")
    process = ServerProcess(launch, log_path=tmp_path / "server.log")
    process.start()
    while "fake_scratch" not in process.log_path.read_text():
        time.sleep(0.02)
    assert [path.name for path in tmp_path.glob("kvpp-*/*")] == ["socket"]
    process.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["server.log"]
