"""Servers shared by the e2e tests.

They fork their processes, which makes a start several times shorter; `kvpp demo` and the test
model's own server start as users start them.
"""

import random

import pytest
from e2e_tools import continue_all, with_equipment

pytest.importorskip("vllm", reason="needs vLLM")

from kvpp_connect.demo.client import CompletionClient
from kvpp_connect.demo.fleet import Fleet
from kvpp_connect.demo.model import write_checkpoint
from kvpp_connect.demo.ports import free_ports
from kvpp_connect.demo.servers import MODEL_NAME, VllmServer

START_S = 400


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def describe(model):
    """Describes a server that keeps chunked prefill and prefix caching, in small chunks.

    ``kvpp`` holds KVPP's options; without it KVPP is off.
    """

    def build(
        name,
        ranks=1,
        *,
        kvpp=None,
        kv=None,
        switches=(),
        args=(),
        cache_bytes=60_000_000,
        model=model,
        compiled=False,
        env=(),
    ):
        return VllmServer(
            name=name,
            model=model,
            compiled=compiled,
            port=free_ports(1)[0],
            tensor_parallel_size=ranks,
            kv_cache_bytes=cache_bytes,
            max_model_tokens=1024,
            max_requests=4,
            additional_config={"enable_kvpp": True, "kvpp": kvpp} if kvpp is not None else None,
            kv_transfer_config=kv,
            env={**with_equipment(chunked=1, fork=1, **dict.fromkeys(switches, 1)), **dict(env)},
            extra_args=("--max-num-batched-tokens", "128", *args),
        )

    return build


@pytest.fixture(scope="session")
def run_servers(logs):
    """Context manager: starts servers, stops them; gives their clients by name."""

    class Servers:
        def __init__(self, *servers):
            self._servers = servers
            self._fleet = Fleet(logs)

        def __enter__(self):
            self._fleet.__enter__()
            try:
                running = self._fleet.start([s.launch() for s in self._servers], timeout_s=START_S)
            except BaseException as error:
                self._fleet.__exit__(type(error), error, None)
                raise
            self.logs = {s.name: s.process.log_path for s in running}
            return {
                s.name: CompletionClient(url=s.url, model=MODEL_NAME, timeout_s=200)
                for s in running
            }

        def __exit__(self, *error):
            self._fleet.__exit__(*error)

    return Servers


@pytest.fixture(scope="session")
def prompts():
    """A common prefix of 300 tokens and tails of several lengths."""
    rng = random.Random(0)
    prefix = [rng.randrange(5, 500) for _ in range(300)]
    return [[*prefix, *(rng.randrange(5, 500) for _ in range(n))] for n in (17, 200, 333, 5, 90)]


@pytest.fixture(scope="session")
def plain(describe, run_servers):
    """Plain vLLM on one rank."""
    with run_servers(describe("plain")) as clients:
        yield clients["plain"]


@pytest.fixture(scope="session")
def plain_tokens(plain, prompts):
    """What plain vLLM answers to each prompt: 12 tokens."""
    return continue_all(plain, prompts)
