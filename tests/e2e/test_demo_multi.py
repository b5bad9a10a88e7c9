"""``kvpp demo multi``; its servers fork, which makes their start shorter."""

import json
import os
import subprocess
import sys

import pytest
from e2e_tools import with_equipment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_every_phase_is_identical_and_hits_what_was_counted_by_hand(tmp_path):
    command = [sys.executable, "-m", "kvpp_connect.cli.main", "demo", "multi", "--json"]
    done = subprocess.run(
        [*command, "--log-dir", tmp_path, "--timeout", "800"],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
        env=os.environ | with_equipment(fork=1),
    )
    assert done.returncode == 0, done.stderr[-5000:]
    report = json.loads(done.stdout)
    assert report["ok"]
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["plain", "first", "again", "killed"]
    for row in rows.values():
        assert row["identical"] == row["requests"] == 11
    assert set(rows["again"]["pool_hit_tokens"]) == {"p1", "p2"}
    # The node that is left finds in the pool what the killed one has computed.
    assert rows["killed"]["pool_hit_tokens"] == {"p2": rows["again"]["expected_hit_tokens"]}
