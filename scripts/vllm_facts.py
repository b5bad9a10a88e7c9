"""Write what the seam's ledger needs to know of a vLLM release, read from its wheel.

    python scripts/vllm_facts.py WHEEL OUT.json

Its facts let the tests check the ledger against releases that cannot be installed here.
"""

import json
import sys
from pathlib import Path

from released import Source, read_wheel

from kvpp_connect.seam.device_ledger import STOCK_LEDGER


def _facts(source: Source) -> dict[str, dict[str, list[str]]]:
    """The facts of all entries of the ledgers, by target."""
    facts: dict[str, dict[str, list[str]]] = {}
    for entry in STOCK_LEDGER:
        targets = [target for target in (entry.target, entry.elsewhere) if target is not None]
        fact = next((found for t in targets if (found := source.fact(t)) is not None), None)
        if fact is None:
            raise SystemExit(f"{entry.target} is not in the wheel")
        seen = {"parameters": fact.parameters, "fields": fact.fields}
        facts[entry.target] = {
            kind: list(names) for kind, names in seen.items() if names is not None
        }
    return facts


def main() -> None:
    """Read the wheel named first into the file named second."""
    wheel, out = map(Path, sys.argv[1:])
    facts = _facts(Source(read_wheel(wheel)))
    out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
