"""The page of metrics names every metric and cause of both connectors, and no other."""

import re
from pathlib import Path

from kvpp_connect.connectors.ascend_store.stats import TABLE as POOL
from kvpp_connect.connectors.mooncake_v2.stats import TABLE as TRANSFER

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_the_page_names_every_metric_and_no_other():
    documented = re.findall(r"^\| `vllm:kvpp_(\w+?)(?:_total)?(?:\{cause\})?`", PAGE, re.MULTILINE)
    known = [
        name
        for table in (POOL, TRANSFER)
        for part in (table.counters, table.causes, table.gauges)
        for name in part
    ]
    assert sorted(documented) == sorted(known)


def test_the_page_names_every_cause():
    for table in (POOL, TRANSFER):
        for name, (_, causes) in table.causes.items():
            (row,) = re.findall(rf"^\| `vllm:kvpp_{name}_total.*$", PAGE, re.MULTILINE)
            assert all(f"`{cause}`" in row for cause in causes)
