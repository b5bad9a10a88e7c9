"""What the e2e tests do with servers."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from kvpp_connect.demo.client import CompletionClient
from kvpp_connect.demo.guard import group_members
from kvpp_connect.demo.local_http import post_json

MAX_TOKENS = 12
EQUIPMENT = Path(__file__).parent / "equipment"


def with_equipment(**switches):
    """Environment that loads the test equipment with some of its switches on."""
    path = os.pathsep.join(filter(None, (str(EQUIPMENT), os.environ.get("PYTHONPATH", ""))))
    return {"PYTHONPATH": path} | {f"KVPP_TEST_{name.upper()}": "1" for name in switches}


def continue_all(client: CompletionClient, prompts, concurrency=4):
    answers = client.complete_all(prompts, max_tokens=MAX_TOKENS, concurrency=concurrency)
    return [answer.token_ids for answer in answers]


def post(client, prompt, max_tokens, params=None, **more):
    """One completion with ``kv_transfer_params``, as the router would send it."""
    return post_json(
        f"{client.url}/v1/completions",
        {
            "model": client.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": params,
            **more,
        },
        timeout_s=client.timeout_s,
    )


def prefill(client, prompt):
    """Let a prefill node compute a prompt; answer its hand-over."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    return post(client, prompt, 1, asked)["kv_transfer_params"]


def decode(client, prompt, params):
    """Continue a handed-over prompt on a decode node."""
    return tuple(post(client, prompt, MAX_TOKENS, params)["choices"][0]["token_ids"])


def kv(role, **extra):
    """The transfer configuration of a P/D node that gives up early."""
    if role != "kv_producer":
        extra = {"control_timeout_s": 5, "failed_read_hold_s": 1, **extra}
    return {
        "kv_connector": "MooncakeConnectorV2",
        "kv_connector_module_path": "kvpp_connect.connectors",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def count(client, *names):
    """Values of the connector's counters."""
    found = client.counters([f"vllm:kvpp_{name}_total" for name in names])
    return [found.get(f"vllm:kvpp_{name}_total", 0) for name in names]


def wait_for(condition, timeout_s=90):
    """The condition's first true value; fails when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError("the condition did not come true in time")


def pool(master, role="kv_both", **extra):
    """The transfer configuration of a node that uses a pool on a Mooncake master."""
    return {
        "kv_connector": "AscendStoreConnector",
        "kv_connector_module_path": "kvpp_connect.connectors",
        "kv_role": role,
        "kv_connector_extra_config": {
            "backend": "mooncake",
            "master_server_address": master.address,
            "global_segment_size": 0,  # a store node lends the memory
            "protocol": "tcp",
            # A machine that stalls must not turn a hit into a recompute.
            "lookup_timeout_s": 20,
            "load_timeout_s": 60,
            **extra,
        },
    }


def multi(*children, role="kv_both"):
    """The transfer configuration of a node with several connectors."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "connectors": [
                {key: child[key] for key in child if key != "kv_load_failure_policy"}
                for child in children
            ]
        },
    }


def is_idle(client):
    """Whether nobody holds blocks: no request, no lease, and no put that copies them."""
    usage = "vllm:kv_cache_usage_perc"
    return client.counters([usage]) == {usage: 0.0}


def members_of_server(client):
    """Ids of all processes of a server, lowest first."""
    port = client.url.rsplit(":", 1)[1].encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            argv = (entry / "cmdline").read_bytes().split(b"\0")
            if b"--port" in argv and argv[argv.index(b"--port") + 1] == port:
                return group_members(os.getpgid(int(entry.name)))
    raise AssertionError(f"no server at {client.url}")


def kill_server(client):
    """SIGKILL for all of a server's processes, as if its machine had gone."""
    for pid in members_of_server(client):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
