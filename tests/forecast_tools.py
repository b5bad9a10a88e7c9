"""`kvpp plan` for tests whose servers have to agree with it."""

import json
import subprocess
import sys


def kvpp(*arguments):
    """The JSON document of one `kvpp` command."""
    done = subprocess.run(
        [sys.executable, "-m", "kvpp_connect.cli.main", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def forecast(model, variant, memory, *arguments, ranks=2, max_tokens=1024, max_requests=4):
    """What `kvpp plan` says of one layout of a float32 server on the CPU.

    The defaults are those of the servers that `describe` describes. ``variant`` is "plain",
    "full" or "compact"; the answer's ``tokens`` and ``concurrency`` are what the server logs.
    """
    document = kvpp(
        *("plan", model, "--tp", ranks, "--kv-memory", memory, "--max-model-len", max_tokens),
        *("--device", "cpu", "--dtype", "float32", "--max-num-seqs", max_requests, *arguments),
    )
    (found,) = [c for c in document["capacities"] if c["variant"] == variant]
    return found
