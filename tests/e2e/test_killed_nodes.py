"""kill -9 in mid-transfer, with real servers: D goes on with the right tokens, P gets blocks back.

Most of the chaos is in tests/chaos, without a model. Here vLLM's own engine, workers and metrics
take part: once one rank of each node is killed, once the engine.
"""

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from e2e_tools import decode, members_of_server, prefill, wait_for

from kvpp_connect.errors import PeerError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LEASE_S = 8
# What vLLM calls its processes.
VICTIMS = {"rank": "VLLM::Worker", "engine": "VLLM::EngineCor"}


def kv(role, **settings):
    return {
        "kv_connector": "MooncakeConnectorV2",
        "kv_connector_module_path": "kvpp_connect.connectors",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


@pytest.fixture(scope="module", params=VICTIMS)
def nodes(request, describe, run_servers):
    """What is killed, and a prefill node with two decode nodes of two ranks."""
    consumer = kv("kv_consumer", control_timeout_s=2, failed_read_hold_s=2)
    d1, d2 = (describe(name, 2, kv=consumer) for name in ("d1", "d2"))
    p = describe("p", 2, kvpp={}, kv=kv("kv_producer", lease_s=LEASE_S))
    with run_servers(p, d1, d2) as clients:
        yield VICTIMS[request.param], clients


def processes(client, title):
    """Ids of a server's processes with that name, lowest first."""
    return [pid for pid in members_of_server(client) if named(pid, title)]


def named(pid, title):
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "comm").read_text().strip().startswith(title)
    return False


@contextmanager
def stalled(client):
    """The data path of a prefill node does not move: each pull that begins stays under way."""
    ranks = processes(client, "VLLM::Worker")
    assert len(ranks) == 2
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def in_background(client, prompt, params, answers):
    """Send a handed-over request; its tokens, or the error, go into ``answers``."""

    def send():
        try:
            answers.append(decode(client, prompt, params))
        except PeerError as error:
            answers.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def waits(client):
    return client.counters(["vllm:num_requests_waiting"]).get("vllm:num_requests_waiting", 0)


def test_a_decode_node_killed_in_mid_transfer_leaks_nothing_on_p(nodes, prompts):
    title, clients = nodes
    p, d = clients["p"], clients["d2"]
    params = [prefill(p, prompt) for prompt in prompts[:2]]
    assert p.counters(["vllm:kv_cache_usage_perc"])["vllm:kv_cache_usage_perc"] > 0
    answers = []
    with stalled(p):
        threads = [
            in_background(d, prompt, one, answers)
            for prompt, one in zip(prompts, params, strict=False)
        ]
        wait_for(lambda: waits(d) == 2)
        os.kill(processes(d, title)[0], signal.SIGKILL)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert all(isinstance(answer, PeerError) for answer in answers), answers
    usage = ["vllm:kv_cache_usage_perc"]
    wait_for(lambda: p.counters(usage)[usage[0]] == 0.0, timeout_s=LEASE_S + 30)


def test_a_prefill_node_killed_in_mid_transfer_costs_a_recompute(nodes, prompts, plain_tokens):
    title, clients = nodes
    p, d = clients["p"], clients["d1"]
    params = [prefill(p, prompt) for prompt in prompts]
    answers = {}
    victim = processes(p, title)[0]
    with stalled(p):
        threads = []
        for number, prompt in enumerate(prompts):
            answers[number] = []
            threads.append(in_background(d, prompt, params[number], answers[number]))
        wait_for(lambda: waits(d) >= 1)
        os.kill(victim, signal.SIGKILL)
        time.sleep(0.5)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert [answers[n] for n in range(len(prompts))] == [[tokens] for tokens in plain_tokens]
    assert d.counters(["vllm:kvpp_pull_failures_total"])["vllm:kvpp_pull_failures_total"] > 0
