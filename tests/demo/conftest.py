import os
import sys
import time
from pathlib import Path

import pytest

from kvpp_connect.demo.ports import free_ports
from kvpp_connect.demo.process import Launch

FAKE_SERVER = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def fake():
    """Builds the Launch of a fake server: fake("name", mode="crash", ...), see fake_server.py."""

    def build(name="fake", *, port=None, **options):
        port = free_ports(1)[0] if port is None else port
        words = tuple(f"{key}={value}" for key, value in options.items())
        return Launch(
            name=name,
            argv=(sys.executable, str(FAKE_SERVER), str(port), *words),
            port=port,
        )

    return build


def _is_alive(pid):
    try:
        state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.fixture
def wait_until_dead():
    """Waits for processes to be gone; returns the ids of those that are not."""

    def wait(pids, limit_s=40.0):
        end = time.monotonic() + limit_s
        while (alive := [pid for pid in pids if _is_alive(pid)]) and time.monotonic() < end:
            time.sleep(0.02)
        return alive

    return wait


@pytest.fixture
def read_pids():
    """Ids in a pids= file, once there are `count` of them."""

    def read(path, count, limit_s=40.0):
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            pids = [int(x) for x in path.read_text().split()] if path.exists() else []
            if len(pids) >= count:
                return pids
            time.sleep(0.02)
        raise AssertionError(f"{path} holds {pids} after {limit_s} s, expected {count} ids")

    return read


@pytest.fixture
def clean_env():
    """Environment for child processes that behave as outside of a terminal."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
