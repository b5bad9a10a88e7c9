"""Pure planning of the owner-only layout: standard library only, no device, no I/O."""

from kvpp_connect.layout.budget import (
    RankBudget,
    capacity_by_bytes,
    capacity_ratio,
    group_blocks,
    plan_budget,
)
from kvpp_connect.layout.manifest import (
    WIRE_SCHEMA,
    ComponentAddress,
    EngineManifest,
    GroupManifest,
    RankManifest,
    TokenShard,
    layout_digest,
)
from kvpp_connect.layout.model import (
    CacheComponent,
    LayerBundle,
    StageLayers,
    stage_layers,
    tensor_name,
)
from kvpp_connect.layout.ownership import assign_owners, equal_counts
from kvpp_connect.layout.placement import (
    BlockNumbers,
    BundlePlace,
    ComponentPlace,
    GroupLayout,
    RankPlacement,
    place_rank,
    plan_group,
    running_obstacle,
)
from kvpp_connect.layout.scratch import (
    FullScratch,
    RunningScratch,
    ScratchSize,
    running_scratch,
)

__all__ = [
    "WIRE_SCHEMA",
    "BlockNumbers",
    "BundlePlace",
    "CacheComponent",
    "ComponentAddress",
    "ComponentPlace",
    "EngineManifest",
    "FullScratch",
    "GroupLayout",
    "GroupManifest",
    "LayerBundle",
    "RankBudget",
    "RankManifest",
    "RankPlacement",
    "RunningScratch",
    "ScratchSize",
    "StageLayers",
    "TokenShard",
    "assign_owners",
    "capacity_by_bytes",
    "capacity_ratio",
    "equal_counts",
    "group_blocks",
    "layout_digest",
    "place_rank",
    "plan_budget",
    "plan_group",
    "running_obstacle",
    "running_scratch",
    "stage_layers",
    "tensor_name",
]
