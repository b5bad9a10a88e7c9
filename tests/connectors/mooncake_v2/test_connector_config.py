import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvpp_connect.connectors.mooncake_v2.config import (
    MooncakeV2Config,
    parse_extra_config,
    replica_port,
)
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
        ({"bind_host": None}, "bind_host is None; expected a string"),
        ({"max_lease_s": 5}, r"max_lease_s is 5, less than lease_s \(60\)"),
        ({"max_lease_s": 50, "lease_s": 51}, r"max_lease_s is 50, less than lease_s \(51\)"),
        ({"max_questions_per_s": 0}, "max_questions_per_s is 0; expected at least 1"),
        ({"max_questions_per_s": True}, "max_questions_per_s is True"),
        ({"control_secret_file": 7}, "control_secret_file is 7; expected a string"),
        ({"control_secret_file": "/not/there"}, "cannot read '/not/there'"),
        ({"control_secret": "hunter2hunter2hunter2"}, "did you mean 'control_secret_file'"),
    ],
)
def test_bad_values_are_refused_by_name(extra, message):
    with pytest.raises(ConfigError, match=message):
        parse_extra_config(extra)


@pytest.mark.parametrize(
    ("role", "extra"),
    [
        ("kv_consumer", {"lease_s": 5}),
        ("kv_consumer", {"control_port": 7000}),
        ("kv_consumer", {"bind_host": "0.0.0.0"}),
        ("kv_producer", {"control_timeout_s": 5}),
        ("kv_producer", {"failed_read_hold_s": 5}),
    ],
)
def test_a_key_without_meaning_in_this_role_is_named(role, extra):
    (key,) = extra
    with pytest.raises(ConfigError, match=f"'{key}' has no meaning with kv_role \"{role}\""):
        parse_extra_config(extra, role)
    parse_extra_config(extra, "kv_both")


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_keys_of_every_role_are_taken_everywhere(role):
    assert parse_extra_config({"host": "h", "protocol": "tcp"}, role).host == "h"


def test_replicas_count_up_from_the_port_and_stay_within_the_range():
    config = MooncakeV2Config(control_port=65534)
    assert [replica_port(config, replica) for replica in (0, 1)] == [65534, 65535]
    with pytest.raises(ConfigError, match="replica 2 of data parallelism would use 65536"):
        replica_port(config, 2)
    assert replica_port(MooncakeV2Config(), 5) == 0


def test_the_readme_documents_every_setting_with_its_default():
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    table = readme.split("`kv_connector_extra_config` of `MooncakeConnectorV2`")[1]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table.split("## How it works")[0], re.M))
    assert rows.keys() == {field.name for field in fields(MooncakeV2Config)}
    numbers = {name: float(text) for name, text in rows.items() if re.fullmatch(r"[\d.]+", text)}
    defaults = MooncakeV2Config()
    assert numbers == {
        field.name: getattr(defaults, field.name)
        for field in fields(defaults)
        if isinstance(getattr(defaults, field.name), int | float)
    }
