"""``kvpp demo`` as a newcomer runs it."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_the_demo_is_identical_on_every_row(tmp_path):
    command = [sys.executable, "-m", "kvpp_connect.cli.main", "demo", "--json"]
    done = subprocess.run(
        [*command, "--log-dir", tmp_path, "--timeout", "800"],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    report = json.loads(done.stdout)
    assert report["ok"]
    assert [row["name"] for row in report["rows"]] == ["plain", "full", "kvpp", "pd"]
    for row in report["rows"]:
        assert row["identical"] == row["requests"] == 12
    pd = report["rows"][3]
    assert pd["pulled_bytes"] == pd["logical_bytes"] > 0
    for row in report["rows"][1:]:
        assert row["kv_cache_ratio"] == pytest.approx(row["kv_cache_ratio_formula"], rel=1e-2)
