"""`kvpp plan` and `kvpp capacity` against servers that run: to the block."""

import pytest
from forecast_tools import forecast, kvpp
from sparse_model import write_sparse_checkpoint

from kvpp_connect.demo.logs import read_log
from kvpp_connect.planning.serverlog import read_capacity

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MEMORY = 60_000_000
# The servers of `describe`: 1,024 tokens, 4 requests.
SHAPE = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "4")
SERVERS = {
    "plain": None,
    "full": {"mode": "full"},
    "compact": {"mode": "compact"},
    "running": {"mode": "compact", "running_tokens": 1600},
}


@pytest.fixture(scope="module")
def server_logs(describe, run_servers):
    """Start-up logs of one server for each layout, two ranks each, two at a time."""
    found = {}
    names = list(SERVERS)
    for pair in (names[:2], names[2:]):
        servers = run_servers(
            *(describe(f"forecast-{name}", 2, kvpp=SERVERS[name]) for name in pair)
        )
        with servers:
            found |= {name: servers.logs[f"forecast-{name}"] for name in pair}
    return found


@pytest.mark.parametrize("name", SERVERS)
def test_the_plan_agrees_with_the_server_to_the_block(server_logs, model, name):
    running = (SERVERS[name] or {}).get("running_tokens")
    planned = forecast(
        model,
        "compact" if name == "running" else name,
        MEMORY,
        *(("--running-tokens", running) if running else ()),
    )
    served = read_capacity(read_log(server_logs[name]))
    assert served.tokens == planned["tokens"] == planned["blocks"] * 16
    assert served.concurrency == pytest.approx(planned["concurrency"], abs=0.005)


@pytest.mark.parametrize("name", ["full", "compact", "running"])
def test_the_logs_give_the_ratio_that_the_plan_expects(server_logs, model, name):
    running = (SERVERS[name] or {}).get("running_tokens")
    document = kvpp(
        *(
            "capacity",
            server_logs["plain"],
            server_logs[name],
            "--config",
            model,
            "--tp",
            "2",
            *SHAPE,
        ),
        *("--layout", "full" if name == "full" else "compact"),
        *(("--running-tokens", running) if running else ()),
    )
    # The logs give the memory to the block only.
    assert document["ratio"] == pytest.approx(document["expected"]["ratio"], rel=5e-3)
    assert document["ratio"] > 1


@pytest.fixture(scope="module")
def unequal_model(tmp_path_factory):
    """Eleven layers with and without an indexer, which no group divides evenly."""
    path = tmp_path_factory.mktemp("model") / "unequal"
    return write_sparse_checkpoint(path, "FSFFSFSSFSF", heads=8)


@pytest.mark.parametrize("ranks", [4, 8])
def test_larger_groups_with_unequal_layers_agree_to_the_block(
    describe, run_servers, unequal_model, ranks
):
    modes = ("full", "compact")
    servers = run_servers(
        *(
            describe(
                f"unequal-{mode}-{ranks}",
                ranks,
                kvpp={"mode": mode},
                switches=("sparse",),
                args=("--tokenizer-mode", "hf"),
                model=unequal_model,
            )
            for mode in modes
        )
    )
    with servers:
        logs = {mode: read_log(servers.logs[f"unequal-{mode}-{ranks}"]) for mode in modes}
    for mode in modes:
        planned = forecast(unequal_model, mode, MEMORY, "--block-size", 64, ranks=ranks)
        served = read_capacity(logs[mode])
        assert served.tokens == planned["tokens"] == planned["blocks"] * 64
