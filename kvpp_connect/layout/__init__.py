"""Pure planning of the owner-only layout: standard library only, no device, no I/O."""

from kvpp_connect.layout.budget import RankBudget, full_capacity_ratio, plan_budget
from kvpp_connect.layout.manifest import (
    WIRE_SCHEMA,
    ComponentAddress,
    EngineManifest,
    RankManifest,
    layout_digest,
)
from kvpp_connect.layout.model import CacheComponent, LayerBundle, StageLayers, stage_layers
from kvpp_connect.layout.ownership import assign_owners, equal_counts
from kvpp_connect.layout.placement import (
    BundlePlace,
    ComponentPlace,
    GroupLayout,
    RankPlacement,
    place_rank,
    plan_group,
)

__all__ = [
    "WIRE_SCHEMA",
    "BundlePlace",
    "CacheComponent",
    "ComponentAddress",
    "ComponentPlace",
    "EngineManifest",
    "GroupLayout",
    "LayerBundle",
    "RankBudget",
    "RankManifest",
    "RankPlacement",
    "StageLayers",
    "assign_owners",
    "equal_counts",
    "full_capacity_ratio",
    "layout_digest",
    "place_rank",
    "plan_budget",
    "plan_group",
    "stage_layers",
]
