import os
import signal
import socket
import time

import pytest

from kvpp_connect.demo.fleet import Fleet, State
from kvpp_connect.demo.interrupt import Interrupted
from kvpp_connect.demo.ports import LOOPBACK, check_ports_free, free_ports
from kvpp_connect.demo.process import Launch, ServerError, stop_all
from kvpp_connect.errors import ConfigError

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]


def test_servers_start_in_parallel_and_none_is_left_after_the_block(
    fake, tmp_path, read_pids, wait_until_dead
):
    seen = []
    launches = [fake(name, pids=tmp_path / "pids") for name in ("prefill", "decode")]
    with Fleet(tmp_path) as fleet:
        servers = fleet.start(launches, timeout_s=30, progress=seen.append)
        assert [server.name for server in servers] == ["prefill", "decode"]
        assert servers[0].url == f"http://127.0.0.1:{launches[0].port}"
        pids = read_pids(tmp_path / "pids", 2)
        fleet.check()
    assert wait_until_dead(pids, 0) == []
    check_ports_free((x.name, x.port) for x in launches)
    assert {status.state for status in seen[0]} <= {State.STARTING, State.READY}
    assert [status.state for status in seen[-1]] == [State.READY] * 2


def test_a_server_that_ends_early_stops_the_others_and_is_named(
    fake, tmp_path, read_pids, wait_until_dead
):
    seen = []
    good = fake("good", mode="silent", pids=tmp_path / "pids")
    bad = fake("bad", mode="crash", after=tmp_path / "pids")
    with (
        pytest.raises(ServerError, match="bad: ended with exit code 7: RuntimeError: no such"),
        Fleet(tmp_path) as fleet,
    ):
        fleet.start([good, bad], timeout_s=30, progress=seen.append)
    assert wait_until_dead(read_pids(tmp_path / "pids", 1), 0) == []
    assert [status.state for status in seen[-1]] == [State.STARTING, State.FAILED]


def test_a_server_that_never_becomes_healthy_fails_at_the_limit(
    fake, tmp_path, read_pids, wait_until_dead
):
    launches = [fake("slow", mode="silent", pids=tmp_path / "pids"), fake("quick")]

    def until_slow_has_begun(_):
        while "loading weights" not in (tmp_path / "slow.log").read_text():
            time.sleep(0.02)

    def start():
        with Fleet(tmp_path) as fleet:
            fleet.start(launches, timeout_s=1, progress=until_slow_has_begun)

    begin = time.monotonic()
    with pytest.raises(ServerError, match="slow: was not ready after 1 s") as caught:
        start()
    assert caught.value.log_tail == "loading weights"
    assert time.monotonic() - begin < 30
    assert wait_until_dead(read_pids(tmp_path / "pids", 1), 0) == []


def test_a_busy_port_is_refused_before_anything_starts(fake, tmp_path):
    with socket.create_server((LOOPBACK, 0)) as taken, Fleet(tmp_path / "logs") as fleet:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* wanted by decode"):
            fleet.start([fake("prefill"), fake("decode", port=port)], timeout_s=5)
        assert list((tmp_path / "logs").iterdir()) == []


def test_further_ports_of_a_server_are_checked_too(fake, tmp_path):
    with socket.create_server((LOOPBACK, 0)) as taken, Fleet(tmp_path) as fleet:
        port = taken.getsockname()[1]
        launch = fake("router")
        launch = Launch(name="router", argv=launch.argv, port=free_ports(1)[0], other_ports=(port,))
        with pytest.raises(ConfigError, match=f"port {port} "):
            fleet.start([launch], timeout_s=5)


def test_two_servers_of_one_name_are_refused(fake, tmp_path):
    with Fleet(tmp_path) as fleet, pytest.raises(ConfigError, match="two servers are called 'x'"):
        fleet.start([fake("x"), fake("x")], timeout_s=5)


def test_a_server_that_dies_later_is_noticed_by_check(fake, tmp_path, read_pids):
    with Fleet(tmp_path) as fleet:
        (server,) = fleet.start([fake(pids=tmp_path / "pids")], timeout_s=30)
        os.kill(read_pids(tmp_path / "pids", 1)[0], signal.SIGKILL)
        while server.process.exit_code() is None:
            time.sleep(0.02)
        with pytest.raises(ServerError, match="killed by signal 9"):
            fleet.check()


def test_a_failed_request_is_blamed_on_the_server_that_ended_or_complained(
    fake, tmp_path, read_pids
):
    bad = fake("bad", log="ValueError: no block left", pids=tmp_path / "pids")
    with Fleet(tmp_path) as fleet:
        (good,) = fleet.start([fake("good")], timeout_s=30)
        assert str(fleet.explain("no answer", suspect=good)) == "good: no answer"
        (running,) = fleet.start([bad], timeout_s=30)
        error = fleet.explain("no answer", suspect=good)
        assert str(error) == "bad: no answer: ValueError: no block left"
        os.kill(read_pids(tmp_path / "pids", 1)[0], signal.SIGKILL)
        while running.process.exit_code() is None:
            time.sleep(0.02)
        assert "bad: was killed by signal 9" in str(fleet.explain("x", suspect=good))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_block_and_the_servers(
    fake, tmp_path, read_pids, wait_until_dead, number
):
    def start_and_wait():
        with Fleet(tmp_path) as fleet:
            fleet.start([fake(pids=tmp_path / "pids")], timeout_s=30)
            os.kill(os.getpid(), number)
            time.sleep(30)

    former = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught:
        start_and_wait()
    assert caught.value.exit_code == 128 + number
    assert wait_until_dead(read_pids(tmp_path / "pids", 1), 0) == []
    assert signal.getsignal(number) is former


def test_a_signal_during_the_clean_up_waits_until_it_is_done(
    fake, tmp_path, read_pids, wait_until_dead, monkeypatch
):
    def stop_interrupted(graces_s):
        os.kill(os.getpid(), signal.SIGINT)
        stop_all(graces_s)

    monkeypatch.setattr("kvpp_connect.demo.fleet.stop_all", stop_interrupted)

    def start_and_leave():
        with Fleet(tmp_path, stop_grace_s=1) as fleet:
            fleet.start([fake(term="ignore", pids=tmp_path / "pids")], timeout_s=30)

    with pytest.raises(Interrupted):
        start_and_leave()
    assert wait_until_dead(read_pids(tmp_path / "pids", 1), 0) == []


def test_where_nobody_complained_the_other_logs_are_shown_too(fake, tmp_path):
    with Fleet(tmp_path) as fleet:
        launches = [fake("router"), fake("decode", log="reading again")]
        router, _ = fleet.start(launches, timeout_s=30)
        error = fleet.explain("no answer", suspect=router)
    assert "reading again" in error.log_tail.partition("--- decode.log\n")[2]
