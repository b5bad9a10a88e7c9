"""Whatever a config says: an answer or one line, never a traceback."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.attention import KV_HEAD_KEYS, MLA_MODEL_TYPES
from kvpp_connect.planning.audit import audit, read_model
from kvpp_connect.planning.broadcasts import Step
from kvpp_connect.planning.caches import MLA_LAYOUTS, PLAIN_LAYOUTS, CacheOptions
from kvpp_connect.planning.checkpoint import read_checkpoint
from kvpp_connect.planning.geometry import ParallelSizes
from kvpp_connect.planning.plan import PlanRequest, make_plan
from kvpp_connect.planning.serverlog import read_capacity

_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.integers(min_value=2**31),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
_SIZE = st.one_of(st.integers(1, 128), _ODD)
_MODEL_TYPES = st.one_of(
    st.sampled_from(sorted(MLA_MODEL_TYPES | PLAIN_LAYOUTS | {"eagle", "falcon", "dbrx", "mamba"})),
    _ODD,
)
_NUMBERS = (
    *KV_HEAD_KEYS,
    "num_attention_heads",
    "n_head",
    "num_hidden_layers",
    "hidden_size",
    "head_dim",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "index_topk",
    "index_head_dim",
    "index_topk_freq",
    "index_skip_topk_offset",
    "num_nextn_predict_layers",
    "max_position_embeddings",
    "model_max_length",
    "sliding_window",
)
_FLAT = st.fixed_dictionaries(
    {},
    optional={
        "model_type": _MODEL_TYPES,
        **dict.fromkeys(_NUMBERS, _SIZE),
        "index_topk_pattern": st.one_of(st.text("FS", max_size=8), _ODD),
        "layer_types": st.one_of(st.lists(st.just("full_attention")), _ODD),
        "is_causal": _ODD,
        "multi_query": _ODD,
        "compress_ratios": _ODD,
        "torch_dtype": st.one_of(st.sampled_from(["float32", "bfloat16", "torch.half"]), _ODD),
        "rope_scaling": st.one_of(st.fixed_dictionaries({"factor": _ODD}), _ODD),
        "quantization_config": st.one_of(
            st.fixed_dictionaries(
                {"quant_method": st.sampled_from(["modelopt", "fp8"]), "kv_cache_scheme": _ODD}
            ),
            _ODD,
        ),
        "attn_config": _ODD,
        "model": _ODD,
        "architectures": _ODD,
    },
)
_CONFIGS = st.one_of(
    _FLAT,
    st.builds(
        lambda outer, inner, key: {**outer, key: inner},
        _FLAT,
        st.one_of(_FLAT, _ODD),
        st.sampled_from(["text_config", "llm_config", "thinker_config", "decoder", "model"]),
    ),
)
_SIZES = st.builds(
    ParallelSizes,
    tensor=st.integers(-1, 64),
    pipeline=st.integers(0, 4),
    prefill_context=st.integers(0, 4),
    decode_context=st.integers(-1, 64),
)
_OPTIONS = st.builds(
    CacheOptions,
    device=st.sampled_from(["cpu", "cuda", "npu"]),
    block_tokens=st.one_of(st.none(), st.integers(0, 256)),
    dtype=st.sampled_from(["auto", "float32", "half"]),
    kv_cache_dtype=st.sampled_from(["auto", "fp8", "fp8_ds_mla"]),
    c8=st.sampled_from(["none", "both"]),
    drafts=st.integers(0, 2),
)


def check_one_line(error):
    assert str(error)
    assert "\n" not in str(error)


def model_of(config, environment, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(config))
    return read_model(path, environment=environment)


@settings(max_examples=400, deadline=None)
@given(
    config=_CONFIGS,
    sizes=_SIZES,
    options=_OPTIONS,
    disable=st.sampled_from(["0", "1", "x"]),
    memory=st.one_of(st.integers(1, 10**6), st.integers(10**6, 10**12)),
)
def test_any_config_gives_an_answer_or_one_line(
    config, sizes, options, disable, memory, tmp_path_factory
):
    environment = {"VLLM_MLA_DISABLE": disable}
    try:
        model = model_of(config, environment, tmp_path_factory)
        row = audit(model, sizes, options)
    except ConfigError as error:
        check_one_line(error)
        return
    assert row.factor >= 1
    assert row.copies >= 1
    assert 0 <= row.wasted_share < 1
    assert row.wasted_token_bytes is None or row.wasted_token_bytes >= 0
    request = PlanRequest(
        sizes=sizes,
        memory_bytes=memory,
        options=options,
        step=Step(requests=2, context_tokens=100),
        link_bytes_per_s=1e9,
        layer_s=1e-3,
    )
    try:
        plan = make_plan(model, request, environment={})
    except ConfigError as error:
        check_one_line(error)
        return
    for capacity in plan.capacities:
        assert capacity.blocks >= 0
        assert capacity.problem or capacity.blocks * capacity.block_tokens >= 1


@settings(max_examples=300, deadline=None)
@given(content=st.one_of(st.binary(max_size=200), _ODD.map(lambda v: json.dumps(v).encode())))
def test_any_file_gives_a_config_or_one_line(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_bytes(content)
    try:
        assert isinstance(read_checkpoint(path).config, dict)
    except ConfigError as error:
        check_one_line(error)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=20),
            st.sampled_from(
                [
                    "KV cache size: 1,0 tokens",
                    "Maximum concurrency for 1 tokens per request: 1.,x",
                    "(EngineCore pid=1) ",
                    "# GPU blocks: 1, # CPU blocks: 2",
                    "\n",
                ]
            ),
        )
    ).map("".join)
)
def test_any_log_can_be_read(text):
    found = read_capacity(text)
    assert found is None or found.engines


@settings(max_examples=200, deadline=None)
@given(
    model_type=st.sampled_from(sorted(MLA_LAYOUTS)),
    layers=st.integers(1, 80),
    tensor=st.sampled_from([1, 2, 4, 8, 16]),
    pipeline=st.integers(1, 3),
    memory=st.integers(10**8, 10**11),
    alignment_device=st.sampled_from(["cpu", "cuda"]),
)
def test_kvpp_never_holds_more_than_its_ranks_times_plain(
    model_type, layers, tensor, pipeline, memory, alignment_device, tmp_path_factory
):
    config = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "max_position_embeddings": 512,
    }
    model = model_of(config, {}, tmp_path_factory)
    request = PlanRequest(
        sizes=ParallelSizes(tensor=tensor, pipeline=min(pipeline, layers)),
        memory_bytes=memory,
        options=CacheOptions(device=alignment_device),
    )
    plan = make_plan(model, request, environment={})
    plain = plan.capacities[0]
    for capacity in plan.capacities[1:]:
        # Rounding down to whole blocks may favour either by less than one block.
        assert capacity.tokens <= tensor * (plain.tokens + plain.block_tokens) + 512
    by_variant = {capacity.variant: capacity for capacity in plan.capacities}
    if tensor > 1:
        assert by_variant["compact"].blocks >= by_variant["full"].blocks
