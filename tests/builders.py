"""Keyword builders for plain values used all over the tests."""

from kvpp_connect.layout import (
    CacheComponent,
    ComponentAddress,
    EngineManifest,
    RankManifest,
    StageLayers,
    TokenShard,
    stage_layers,
)


def layer_name(index: int, part: str = "attn") -> str:
    return f"model.layers.{index}.self_attn.{part}"


def equal_stage(num_layers: int, page_bytes: int = 100) -> StageLayers:
    return bundle_stage([[page_bytes]] * num_layers)


def bundle_stage(bundles: list[list[int]], drafts: list[int] | None = None) -> StageLayers:
    """A stage from the page sizes of each bundle's components, and of the drafts."""
    return stage_layers(
        targets={
            index: [
                CacheComponent(layer_name=layer_name(index, f"c{i}"), page_bytes=size)
                for i, size in enumerate(sizes)
            ]
            for index, sizes in enumerate(bundles)
        },
        drafts=[
            CacheComponent(layer_name=f"draft.{i}", page_bytes=size)
            for i, size in enumerate(drafts or [])
        ],
    )


def address(
    name: str,
    base: int,
    page_bytes: int = 64,
    token_bytes: int = 4,
    stride: int | None = None,
    dtype: str = "float32",
) -> ComponentAddress:
    return ComponentAddress(
        layer_name=name,
        address=base,
        page_bytes=page_bytes,
        block_stride_bytes=stride or page_bytes,
        token_bytes=token_bytes,
        dtype=dtype,
    )


def manifest(
    *ranks: RankManifest,
    block_tokens: int = 16,
    num_blocks: int = 32,
    incarnation: str = "one",
) -> EngineManifest:
    return EngineManifest(
        engine_id="prefill",
        incarnation=incarnation,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        ranks=tuple(ranks),
    )


def rank_manifest(
    rank: int,
    *components: ComponentAddress,
    session: str = "",
    pp_rank: int = 0,
    shard: TokenShard | None = None,
) -> RankManifest:
    return RankManifest(
        pp_rank=pp_rank,
        rank_in_group=rank,
        session=session or f"127.0.0.1:{1000 * (pp_rank + 1) + rank}",
        components=components,
        shard=shard or TokenShard(),
    )
