"""run_demo() on fake servers, as a program: python fake_demo.py JSON_OF_OPTIONS [NAME:KEY=VALUE...]

Servers are called plain, kvpp, prefill, decode and router, as in the real demo; see
fake_server.py for what may be set on each of them. The router is the decode server's twin.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from kvpp_connect.demo.pd import run_demo
from kvpp_connect.demo.process import Launch
from kvpp_connect.demo.rows import RowPlan
from kvpp_connect.demo.scenario import DemoOptions

FAKE_SERVER = Path(__file__).with_name("fake_server.py")
DEFAULTS = {
    "plain": {"kv_tokens": "10000"},
    "kvpp": {"kv_tokens": "12000"},
    "prefill": {"kv_tokens": "12000"},
    "decode": {"pull": "1"},
    "router": {},
}


@dataclass(frozen=True)
class Fake:
    name: str
    port: int
    options: dict = field(default_factory=dict)

    def launch(self):
        words = [f"{key}={value}" for key, value in self.options.items()]
        argv = (sys.executable, str(FAKE_SERVER), str(self.port), *words)
        return Launch(name=self.name, argv=argv, port=self.port)


def planner_of(changes):
    """A row planner whose servers have `changes` (name -> options) on top of the defaults."""

    def planner(model, ports, *, kv_cache_bytes):
        assert (model / "model.safetensors").exists()
        servers = [
            Fake(name, port, {**options, **changes.get(name, {})})
            for port, (name, options) in zip(ports, DEFAULTS.items(), strict=False)
        ]
        plain, kvpp, prefill, decode, router = servers

        def row(name, entry, capacity, started, **more):
            return RowPlan(
                name=name,
                title=f"row {name}",
                servers=tuple(started),
                entry=entry.name,
                capacity_of=capacity.name,
                **more,
            )

        # No real router: D itself is asked, so that its pull counters move.
        pd_only = {"router": router, "kvpp_ranks": 2, "puller": decode.name}
        return (
            row("plain", plain, plain, [plain]),
            row("kvpp", kvpp, kvpp, [kvpp], kvpp_ranks=2),
            row("pd", decode, prefill, [prefill, decode], **pd_only),
        )

    return planner


def read_arguments():
    options = json.loads(sys.argv[1])
    if options.get("log_dir"):
        options["log_dir"] = Path(options["log_dir"])
    changes = {}
    for word in sys.argv[2:]:
        name, _, pair = word.partition(":")
        key, _, value = pair.partition("=")
        changes.setdefault(name, {})[key] = value
    return DemoOptions(**options), changes


def main():
    options, changes = read_arguments()
    return run_demo(options, planner_of(changes))


if __name__ == "__main__":
    sys.exit(main())
