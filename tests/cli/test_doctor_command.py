"""`kvpp doctor` with vLLM and Mooncake played by the test; see also the distributed tests."""

import json
import socket

import pytest
from builders import manifest, rank_manifest
from planning_tools import MLA, write_config

from kvpp_connect.cli import probes
from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import ControlServer
from kvpp_connect.connectors.mooncake_v2.secret import load_keys
from kvpp_connect.seam import checks

CONNECTOR = {"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_producer"}
POOL = {"kv_connector": "AscendStoreConnector", "kv_role": "kv_both"}


def multi(*children):
    extra = {"connectors": children}
    return json.dumps(
        {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    )


@pytest.fixture
def machine(monkeypatch):
    """A machine on which nothing is wrong; its attributes may be changed."""

    class Machine:
        deployments = ()
        asked = None

    facts = Machine()

    def judge(path, arguments, additional, transfer):
        facts.asked = (path, arguments, additional, transfer)
        return facts.deployments

    monkeypatch.setattr(probes, "touchpoints", lambda device_type: iter(()))
    monkeypatch.setattr(probes, "mooncake", lambda *_, **__: iter(()))
    monkeypatch.setattr(checks, "deployment_problems", judge)
    monkeypatch.setattr(checks, "host_address", lambda: "127.0.0.1")
    monkeypatch.setattr(probes.ledger, "vllm_version", lambda: "0.32.0")
    return facts


@pytest.fixture
def doctor(kvpp, machine):
    def run(*arguments):
        return kvpp("doctor", "--json", *arguments)

    return run


def findings(done):
    """Everything but what is well."""
    return [
        (finding["topic"], finding["said"], finding["way_out"])
        for finding in done.document["findings"]
        if finding["state"] != "ok"
    ]


def test_a_good_machine_ends_with_0(doctor):
    done = doctor()
    assert (done.code, findings(done)) == (0, [])
    assert done.document["ok"] is True


@pytest.mark.parametrize(
    ("version", "said"), [("unknown", "not installed"), ("0.31.9", "0.31.9 is not supported")]
)
def test_a_vllm_that_does_not_fit_ends_with_1(doctor, monkeypatch, version, said):
    monkeypatch.setattr(probes.ledger, "vllm_version", lambda: version)
    done = doctor()
    assert done.code == 1
    assert findings(done)[0][:2] == ("vLLM", said)
    assert "install vLLM >= 0.32 and < 0.34" in findings(done)[0][2]


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.32.0", True),
        ("0.33.1+cpu", True),
        ("0.34.0", False),
        ("0.31.99", False),
        ("1.0", False),
        ("main", False),
    ],
)
def test_the_range_of_supported_releases(version, supported):
    assert probes.is_supported(version) is supported


def test_every_problem_of_the_deployment_is_listed(doctor, machine, tmp_path):
    machine.deployments = ("enable_kvpp: one", "enable_kvpp: two")
    folder = write_config(tmp_path, MLA)
    arguments = ("--tp", "2", "--additional-config", '{"enable_kvpp": true}')
    done = doctor(folder, *arguments, "--", "--max-model-len", "2048")
    assert done.code == 1
    assert [said for _, said, _ in findings(done)] == ["enable_kvpp: one", "enable_kvpp: two"]
    assert machine.asked == (
        folder / "config.json",
        ["--tensor-parallel-size=2", "--max-model-len", "2048"],
        {"enable_kvpp": True},
        {},
    )


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--additional-config", '{"enable_kvpp": 1}', "enable_kvpp is 1"),
        ("--additional-config", '{"kvpp": {"mod": 1}}', "did you mean 'mode'?"),
        ("--additional-config", "{", "--additional-config is no JSON"),
        ("--additional-config", "[]", "--additional-config is no JSON object"),
        (
            "--kv-transfer-config",
            json.dumps({**CONNECTOR, "kv_connector_extra_config": {"lease": 5}}),
            "unknown key 'lease'; did you mean 'lease_s'?",
        ),
        (
            "--kv-transfer-config",
            json.dumps({**CONNECTOR, "kv_connector_extra_config": 5}),
            "is no object",
        ),
        ("--kv-transfer-config", '{"kv_role": "kv_both"}', "kv_connector is None"),
        (
            "--kv-transfer-config",
            multi({**CONNECTOR, "kv_connector_extra_config": {"lease": 5}}),
            "unknown key 'lease'; did you mean 'lease_s'?",
        ),
        ("--kv-transfer-config", multi(CONNECTOR, POOL), "master_server_address"),
        ("--kv-transfer-config", multi(CONNECTOR, CONNECTOR), "MooncakeConnectorV2 2 times"),
        ("--kv-transfer-config", multi(), "expected a list with one object per connector"),
    ],
)
def test_our_own_keys_are_checked_by_the_servers_parsers(
    doctor, machine, tmp_path, flag, value, said
):
    done = doctor(write_config(tmp_path, MLA), flag, value)
    assert done.code == 1
    assert said in findings(done)[0][1]
    # The server would say the same once more.
    assert machine.asked is None or "no JSON" in said


def test_a_missing_checkpoint_is_one_finding(doctor, tmp_path):
    assert "no such file" in findings(doctor(tmp_path / "absent"))[0][1]


def test_ports_are_free_or_taken(doctor, free_port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        done = doctor("--port", str(free_port), "--port", str(number), "--port", "99999")
    assert done.code == 1
    assert [said for _, said, _ in findings(done)] == [
        f"127.0.0.1:{number} cannot be used (Address already in use)",
        "99999 is no port",
    ]
    assert "choose another port" in findings(done)[0][2]


def test_a_producers_control_port_must_be_free_on_its_host(doctor):
    extra = {"control_port": 7000, "host": "192.0.2.1"}
    config = json.dumps({**CONNECTOR, "kv_connector_extra_config": extra})
    host, port = findings(doctor("--kv-transfer-config", config))
    assert host[:2] == (
        "host",
        "192.0.2.1 is no address of this machine (Cannot assign requested address)",
    )
    assert port[0] == "control port"
    assert "192.0.2.1:7000 cannot be used" in port[1]
    assert "no address of this machine" in port[2]
    bound = {**extra, "bind_host": "127.0.0.1"}
    config = json.dumps({**CONNECTOR, "kv_connector_extra_config": bound})
    assert [topic for topic, _, _ in findings(doctor("--kv-transfer-config", config))] == ["host"]
    consumer = json.dumps({**json.loads(config), "kv_role": "kv_consumer"})
    assert "no meaning" in findings(doctor("--kv-transfer-config", consumer))[0][1]


def test_each_child_of_a_multi_connector_is_looked_at(doctor, free_port):
    p = {**CONNECTOR, "kv_connector_extra_config": {"control_port": 7000, "host": "192.0.2.1"}}
    pool = {**POOL, "kv_connector_extra_config": {"master_server_address": f"[::1]:{free_port}"}}
    found = findings(doctor("--kv-transfer-config", multi(p, pool)))
    assert [topic for topic, _, _ in found] == ["host", "control port", "master"]
    registry = {**POOL, "kv_connector_extra_config": {"master_server_address": "etcd://one:1"}}
    assert findings(doctor("--kv-transfer-config", multi(registry))) == []


def test_a_prefill_node_is_asked_for_its_manifest(doctor):
    known = manifest(rank_manifest(0), rank_manifest(1), num_blocks=7)
    server = ControlServer("127.0.0.1", 0, lambda _: wire.ManifestAnswer(known))
    try:
        done = doctor("--producer", f"127.0.0.1:{server.port}")
    finally:
        server.close()
    assert done.code == 0
    (found,) = [f for f in done.document["findings"] if f["topic"] == "producer"]
    assert found["said"].endswith("is engine prefill: 2 ranks, 7 blocks of 16 tokens")


def test_a_prefill_node_with_a_secret_is_asked_with_it(doctor, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a secret of enough bytes")
    known = wire.ManifestAnswer(manifest(rank_manifest(0)))
    server = ControlServer("127.0.0.1", 0, lambda _: known, keys=load_keys(str(secret)))
    extra = {"control_secret_file": str(secret)}
    config = json.dumps({**CONNECTOR, "kv_connector_extra_config": extra})
    ask = ("--producer", f"127.0.0.1:{server.port}")
    try:
        assert findings(doctor(*ask, "--kv-transfer-config", config)) == []
        (found,) = findings(doctor(*ask))
    finally:
        server.close()
    assert "control_secret_file" in found[1]


def test_a_prefill_node_that_is_not_ready_says_why(doctor):
    server = ControlServer("127.0.0.1", 0, lambda _: wire.ErrorAnswer("still starting"))
    try:
        done = doctor("--producer", f"127.0.0.1:{server.port}")
    finally:
        server.close()
    assert done.code == 1
    assert "still starting" in findings(done)[0][1]


def test_something_else_on_the_control_port_is_no_prefill_node(doctor, monkeypatch):
    monkeypatch.setattr(probes, "_CONNECT_S", 0.3)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        done = doctor("--producer", f"127.0.0.1:{stranger.getsockname()[1]}")
    assert "no answer" in findings(done)[0][1]


def test_a_master_answers_or_does_not(doctor, free_port):
    with socket.socket() as master:
        master.bind(("127.0.0.1", 0))
        master.listen()
        assert doctor("--master", f"127.0.0.1:{master.getsockname()[1]}").code == 0
    done = doctor("--master", f"127.0.0.1:{free_port}")
    assert done.code == 1
    assert "does not answer" in findings(done)[0][1]
    assert "start mooncake_master" in findings(done)[0][2]


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:0", "host:99999", "host:x"])
def test_what_is_no_address_is_said(doctor, address):
    for option in ("--master", "--producer"):
        done = doctor(option, address)
        assert done.code == 1
        assert findings(done)[0][1:] == (f"{address!r} is no address", "write HOST:PORT")


def test_rdma_needs_memory_that_may_be_locked(doctor, monkeypatch):
    monkeypatch.setattr(probes.resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    assert doctor().code == 0
    config = {**CONNECTOR, "kv_connector_extra_config": {"protocol": "rdma"}}
    topic, said, way_out = findings(doctor("--kv-transfer-config", json.dumps(config)))[0]
    assert (topic, said[:20]) == ("locked memory", "limited to 8.00 MiB ")
    assert "ulimit -l unlimited" in way_out
    unlimited = probes.resource.RLIM_INFINITY
    monkeypatch.setattr(probes.resource, "getrlimit", lambda _: (unlimited, unlimited))
    assert doctor("--kv-transfer-config", json.dumps(config)).code == 0


def test_people_get_lines_with_the_way_out(kvpp, machine, free_port):
    done = kvpp("doctor", "--master", f"127.0.0.1:{free_port}")
    assert done.code == 1
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["ok", "kvpp-connect"]
    assert any(line.strip().startswith("-> start mooncake_master") for line in lines)
    assert lines[-1] == "1 of 4 checks would fail"
    assert kvpp("doctor").stdout.splitlines()[-1] == "nothing would fail"
