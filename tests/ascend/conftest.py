"""Contract tests with vllm-ascend: `make test-ascend` runs them, in an environment of their own."""

from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from kvpp_connect.demo.ports import free_ports

if find_spec("vllm_ascend") is None:
    collect_ignore_glob = ["test_*.py"]  # the usual environment has a vLLM of its own
else:
    import ascend_vllm

    ascend_vllm.set_environment()


@contextmanager
def _children(function, model, ranks, options, *arguments):
    from processes import Child

    (port,) = free_ports(1)
    started = [
        Child(function, str(model), ranks, rank, port, options, *arguments) for rank in range(ranks)
    ]
    try:
        yield started
    finally:
        for child in started:
            child.kill()


@pytest.fixture(scope="module")
def run_ranks(tmp_path_factory):
    """Run ``function(pipe, model, ranks, rank, port, options)`` on each rank; what each sends."""
    import ascend_chain

    def run(function, kind, ranks=2, *, layers=6, drafts=0, **options):
        folder = tmp_path_factory.mktemp(kind)
        model = ascend_chain.write_model(folder / "model", kind, layers=layers, drafts=drafts)
        options |= {"drafts": drafts} if drafts else {}
        with _children(function, model, ranks, options) as children:
            return [child.get(timeout_s=300) for child in children]

    return run
