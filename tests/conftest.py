import socket

import pytest
from hypothesis import HealthCheck, settings

# Two busy cores must not turn a property into a timed test.
settings.register_profile("kvpp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", settings.get_profile("kvpp"), max_examples=10_000)
settings.load_profile("kvpp")


@pytest.fixture
def free_port():
    """A loopback port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
