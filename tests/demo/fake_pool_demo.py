"""run_pool_demo() on fake servers and a real pool, as a program, with fake_demo.py's arguments.

Servers are called plain and fill; see fake_server.py for what may be set on each of them.
"""

import sys
from unittest import mock

from fake_demo import Fake, read_arguments

from kvpp_connect.demo.pool import run_pool_demo
from kvpp_connect.demo.pool_rows import PoolRowPlan


def planner_of(changes):
    def planner(model, ports, pool, *, kv_cache_bytes):
        assert (model / "model.safetensors").exists()
        plain, fill = (
            Fake(name, port, {"computes": "1", **changes.get(name, {})})
            for name, port in zip(("plain", "fill"), ports, strict=False)
        )
        cut = changes.get("fill", {}).get("cut", "")
        return (
            (PoolRowPlan(name="plain", title="row plain", server=plain),),
            (PoolRowPlan(name="fill", title="row fill", server=fill, cut=cut, shards=2),),
        )

    return planner


def main():
    options, changes = read_arguments()
    # Fake servers store nothing later.
    with mock.patch("kvpp_connect.demo.pool_runner._SETTLE_LIMIT_S", 1.0):
        return run_pool_demo(options, planner_of(changes))


if __name__ == "__main__":
    sys.exit(main())
