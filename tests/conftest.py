import os
import random
import tempfile

import pytest
from clocks import AwakeClock
from hypothesis import HealthCheck, settings
from processes import Child

from kvpp_connect.demo.ports import free_ports

# Two busy cores must not turn a property into a timed test.
settings.register_profile("kvpp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", settings.get_profile("kvpp"), max_examples=10_000)
settings.load_profile("kvpp")


def pytest_addoption(parser):
    parser.addoption(
        "--chaos-seed",
        type=int,
        default=random.randrange(10**6),
        help="repeats the plan of an earlier run of tests/chaos (default: a fresh one)",
    )
    parser.addoption(
        "--chaos-soak-s",
        type=float,
        default=0.0,
        help="seconds for tests/chaos/test_soak.py (default: it is skipped)",
    )
    parser.addoption(
        "--schedules",
        type=int,
        default=500,
        help="programs for each of the six ways in tests/broadcast/test_asynchronous_device.py",
    )
    parser.addoption(
        "--first-schedule",
        type=int,
        default=0,
        help="seed of the first of them; the others follow",
    )


def pytest_configure(config):
    # vLLM does not remove its sockets.
    folder = tempfile.TemporaryDirectory(prefix="kvpp-test-", ignore_cleanup_errors=True)
    os.environ["VLLM_RPC_BASE_PATH"] = folder.name
    config.add_cleanup(folder.cleanup)


def pytest_report_header(config):
    return f"chaos seed: {config.getoption('--chaos-seed')}"


@pytest.fixture
def free_port():
    """A loopback port that nobody uses at this moment."""
    return free_ports(1)[0]


@pytest.fixture
def awake():
    """A clock on which a pause of the machine takes no time, to measure upper bounds with."""
    clock = AwakeClock()
    yield clock
    clock.close()


@pytest.fixture
def spawn():
    """Starts processes that are gone after the test."""
    children = []

    def start(function, *arguments):
        children.append(Child(function, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.kill()
