"""``kvpp demo pool``; its servers fork, which makes their start shorter."""

import json
import os
import subprocess
import sys

import pytest
from e2e_tools import with_equipment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_every_row_is_identical_and_hits_what_was_counted_by_hand(tmp_path):
    command = [sys.executable, "-m", "kvpp_connect.cli.main", "demo", "pool", "--json"]
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
    assert list(rows) == ["plain", "fill", "tp1", "hit", "off"]
    for row in rows.values():
        assert row["identical"] == row["requests"] == 12
        assert row["hit_tokens"] == row["expected_hit_tokens"]
        assert row["computed_tokens"] == row["prompt_tokens"] - row["hit_tokens"]
    # Most of each prompt, as soon as another instance has filled the pool.
    assert rows["hit"]["hit_tokens"] == rows["off"]["hit_tokens"] > 0.95 * 5179
    # An instance of another cut hits what it stored itself, as the one that filled the pool.
    assert rows["tp1"]["hit_tokens"] == rows["fill"]["hit_tokens"]
    assert rows["hit"]["objects"] == rows["off"]["objects"] == rows["tp1"]["objects"]
    assert 1 < rows["fill"]["bytes_per_kv_byte"] < 1.001
