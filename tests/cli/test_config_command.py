"""`kvpp config`: what it prints is what the servers' own checks accept."""

import json
import re
import shlex

import pytest

from kvpp_connect.cli.transfers import check_connectors, connectors_of
from kvpp_connect.config import parse_additional_config

MASTER = ("--master-address", "10.0.0.5:50051")


@pytest.fixture(autouse=True)
def no_pool_settings_around(monkeypatch):
    for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER", "MOONCAKE_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(kvpp):
    """The JSON of a node."""

    def run(*arguments):
        done = kvpp("config", *arguments, "--json")
        assert done.code == 0, done.stderr
        return done.document

    return run


NODES = {
    "prefill": ("prefill", "--tp", "8", "--control-port", "7000", "--host", "10.0.0.7"),
    "decode": ("decode", "--tp", "4", "--protocol", "rdma"),
    "decode with kvpp": ("decode", "--tp", "4", "--kvpp", "--mode", "compact"),
    "pool": ("pool", "--tp", "2", *MASTER, "--segment-size", "4GB", "--namespace", "a"),
    "pool without kvpp": ("pool", "--tp", "2", "--no-kvpp", *MASTER),
    "multi": ("multi", "--tp", "8", "--pp", "2", *MASTER, "--control-port", "7000"),
    "multi, decode": ("multi", "--side", "decode", "--tp", "8", *MASTER, "--store-decoded"),
    "multi, both": ("multi", "--side", "both", "--tp", "8", *MASTER),
}


@pytest.mark.parametrize("node", NODES)
def test_the_servers_parsers_accept_it(config, node):
    document = config(*NODES[node])
    check_connectors(document["kv_transfer_config"])
    parse_additional_config(document["additional_config"])
    given = dict(zip(document["arguments"][::2], document["arguments"][1::2], strict=True))
    assert json.loads(given["--kv-transfer-config"]) == document["kv_transfer_config"]
    assert json.loads(given.get("--additional-config", "{}")) == document["additional_config"]


def test_roles_follow_from_what_the_node_does(config):
    def roles(*arguments):
        transfer = config(*arguments)["kv_transfer_config"]
        return transfer["kv_role"], [
            (child["kv_connector"], child["kv_role"]) for child in connectors_of(transfer)
        ]

    p2p, pool = "MooncakeConnectorV2", "AscendStoreConnector"
    assert roles("prefill") == ("kv_producer", [(p2p, "kv_producer")])
    assert roles("decode") == ("kv_consumer", [(p2p, "kv_consumer")])
    assert roles("pool", *MASTER) == ("kv_both", [(pool, "kv_both")])
    assert roles("multi", *MASTER) == ("kv_both", [(p2p, "kv_producer"), (pool, "kv_both")])
    assert roles("multi", "--side", "decode", *MASTER) == (
        "kv_consumer",
        [(p2p, "kv_consumer"), (pool, "kv_consumer")],
    )
    assert roles("multi", "--side", "both", *MASTER)[1][0] == (p2p, "kv_both")


def test_failed_loads_are_recomputed_and_only_the_whole_says_so(config):
    for node in ("decode", "multi", "multi, decode"):
        transfer = config(*NODES[node])["kv_transfer_config"]
        assert transfer["kv_load_failure_policy"] == "recompute"
    children = config(*NODES["multi"])["kv_transfer_config"]["kv_connector_extra_config"]
    assert not any("kv_load_failure_policy" in child for child in children["connectors"])


def test_kvpp_is_on_where_there_is_something_to_share(config):
    def is_on(*arguments):
        return config(*arguments)["additional_config"].get("enable_kvpp", False)

    assert is_on("prefill", "--tp", "2")
    assert not is_on("prefill")
    assert not is_on("decode", "--tp", "2")
    assert is_on("decode", "--tp", "2", "--kvpp")
    assert not is_on("prefill", "--tp", "2", "--no-kvpp")


def test_people_get_a_command_line_that_a_shell_reads(kvpp):
    printed = kvpp("config", "prefill", "/models/a model", "--tp", "8").stdout
    words = shlex.split(printed.replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "/models/a model"]
    assert json.loads(words[words.index("--additional-config") + 1]) == {"enable_kvpp": True}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("multi", "--tp", "1", "--kvpp", *MASTER), "KVPP group .* has 1 rank.*turn enable_kvpp"),
        (("prefill", "--tp", "2", "--mode", "fast"), "mode is 'fast'; expected one of: auto"),
        (("prefill", "--mode", "full"), "--mode full has no meaning without KVPP; add --kvpp"),
        (("pool",), "no master_server_address is set"),
        (("pool", "--backend", "redis"), "backend is 'redis'; expected one of"),
        (("pool", *MASTER, "--control-port", "7"), "--control-port has no meaning for a pool"),
        (("pool", *MASTER, "--side", "both"), "--side has no meaning for a pool"),
        (("decode", "--control-port", "7"), "'control_port' has no meaning with kv_role"),
        (("decode", *MASTER), "--master-address has no meaning for a decode"),
        (("multi", *MASTER, "--store-decoded"), "--store-decoded concerns decode nodes"),
        (("prefill", "--control-port", "70000"), "control_port is 70000; expected 0 to 65535"),
        (("prefill", "--protocol", "udp"), "protocol is 'udp'"),
        (("prefill", "--secret-file", "/no/such/file"), "cannot read '/no/such/file'"),
    ],
)
def test_what_no_server_would_take_is_one_line(kvpp, arguments, said):
    done = kvpp("config", *arguments)
    assert done.code == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert re.search(said, done.stderr), done.stderr
