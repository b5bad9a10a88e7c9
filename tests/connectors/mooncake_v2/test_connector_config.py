import pytest

from kvpp_connect.connectors.mooncake_v2.config import MooncakeV2Config, parse_extra_config
from kvpp_connect.errors import ConfigError


def test_defaults():
    assert parse_extra_config({}) == MooncakeV2Config()


def test_values_are_taken():
    given = {"host": "10.0.0.1", "control_port": 7000, "protocol": "rdma", "lease_s": 5}
    config = parse_extra_config(given)
    assert (config.host, config.control_port, config.protocol) == ("10.0.0.1", 7000, "rdma")
    assert config.lease_s == 5.0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lease": 5}, "unknown key 'lease'; did you mean 'lease_s'"),
        ({"host": 5}, "host is 5; expected a string"),
        ({"protocol": "tpc"}, "protocol is 'tpc'; expected one of tcp"),
        ({"control_port": 70000}, "control_port is 70000"),
        ({"control_port": True}, "control_port is True"),
        ({"lease_s": -1}, "lease_s is -1"),
        ({"control_timeout_s": "1"}, "control_timeout_s is '1'"),
    ],
)
def test_bad_values_are_refused_by_name(extra, message):
    with pytest.raises(ConfigError, match=message):
        parse_extra_config(extra)
