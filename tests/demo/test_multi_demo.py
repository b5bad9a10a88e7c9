"""The parts of ``kvpp demo multi`` that need no server: what is started, and what is judged."""

import json
from pathlib import Path

from kvpp_connect.demo.multi import make_prompts
from kvpp_connect.demo.multi_report import MultiReport, Phase, judge, to_table
from kvpp_connect.demo.multi_servers import plan_servers
from kvpp_connect.demo.pool_servers import PoolServers
from kvpp_connect.demo.verdict import to_json

POOL = PoolServers(ports=(1, 2, 3, 4))
TOKENS = ((1, 2), (3, 4))
PLAIN = Phase(
    name="plain",
    title="plain",
    tokens=TOKENS,
    prompt_tokens=50,
    requests_s=1.0,
    pool_hit_tokens={},
)


def phase(**changes):
    """A phase in which all is well."""
    values = {
        "name": "again",
        "title": "again",
        "tokens": TOKENS,
        "prompt_tokens": 50,
        "requests_s": 1.0,
        "pool_hit_tokens": {"p1": 16, "p2": 16},
        "expected_hit_tokens": 32,
        "pulled_tokens": 50,
    }
    return Phase(**values | changes)


def failures(**changes):
    return judge(phase(**changes), PLAIN).failures


def config_of(server):
    argv = server.launch().argv
    return json.loads(argv[argv.index("--kv-transfer-config") + 1])


def test_both_connectors_are_on_every_node_and_in_both_orders():
    servers = plan_servers(Path("/m"), (5, 6, 7, 8, 9, 10), POOL, kv_cache_bytes=1000)
    orders = {}
    for server in servers.engines:
        children = config_of(server)["kv_connector_extra_config"]["connectors"]
        orders[server.name] = [child["kv_connector"] for child in children]
    assert orders["p1"] == orders["p2"][::-1] == orders["d"]
    assert set(orders["p1"]) == {"MooncakeConnectorV2", "AscendStoreConnector"}
    assert "--kv-transfer-config" not in servers.plain.launch().argv
    router = servers.router.launch().argv
    assert [router[i + 1] for i, word in enumerate(router) if word == "--prefill"] == [
        servers.first.url,
        servers.second.url,
    ]


def test_each_request_meets_the_other_node_in_the_next_round():
    prompts = make_prompts()
    assert len(prompts) % 2 == 1
    starts = [prompt[:16] for prompt in prompts if len(prompt) >= 16]
    assert len(set(starts)) == len(starts)


def test_a_phase_in_which_all_is_well_has_no_failures():
    assert failures() == ()
    assert judge(PLAIN, PLAIN).failures == ()


def test_what_is_wrong_is_said():
    assert failures(tokens=((1, 2), (3, 5))) == ("1 of 2 answers differ from plain vLLM",)
    assert failures(expected_hit_tokens=48) == ("32 tokens came from the pool, 48 should have",)
    alone = failures(pool_hit_tokens={"p1": 32, "p2": 0})
    assert alone == ("nothing came from the pool on p2",)
    assert failures(pulled_tokens=49) == ("the decode node pulled 49 of 50 prompt tokens",)
    assert failures(held_blocks=("p2", "d")) == ("blocks are still held on p2, d",)


def test_the_report_names_the_row_and_is_shown_in_both_ways():
    bad = judge(phase(pulled_tokens=1), PLAIN)
    report = MultiReport(rows=(judge(PLAIN, PLAIN), bad), total_s=2.0)
    assert not report.ok
    assert report.failures == ("again: the decode node pulled 1 of 50 prompt tokens",)
    assert json.loads(to_json(report))["rows"][1]["pool_hit_tokens"] == {"p1": 16, "p2": 16}
    assert to_table(report).row_count == 2
    assert not MultiReport(rows=(), total_s=0.0).ok
    assert not MultiReport(rows=(judge(PLAIN, PLAIN),), total_s=1.0, error="gone").ok
