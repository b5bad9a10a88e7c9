"""The caches that vLLM allocates for a checkpoint: components per layer, bytes per token.

Covers models whose layers all keep a full cache of one kind: MLA, sparse MLA with an indexer (SFA,
DSA) and plain attention. Others are refused by name: a hybrid model's cache is no sum over layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from kvpp_connect.errors import ConfigError
from kvpp_connect.layout import CacheComponent, StageLayers, stage_layers
from kvpp_connect.planning.attention import Attention
from kvpp_connect.planning.checkpoint import Checkpoint

Device = Literal["cpu", "cuda", "npu"]  # vLLM's device types
C8 = Literal["none", "main", "indexer", "both"]

# Model types whose cache is known here: one full cache per layer, and the indexer's.
MLA_LAYOUTS = frozenset(
    {
        "axk1",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "pangu_ultra_moe",
    }
)
PLAIN_LAYOUTS = frozenset(
    {
        "glm4_moe",
        "llama",
        "minimax_m2",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
    }
)
_DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_PREFERRED_DTYPE = "bfloat16"
_KV_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
# Bytes per token of the packed formats: quantised latent, scales and rope part in one row.
_PACKED_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_MOST_LAYERS = 512
# Tokens per block that vLLM chooses by itself, with MLA and without. With MLA on CUDA it depends
# on the attention backend; 64 is FlashMLA's.
_BLOCK_TOKENS: dict[str, tuple[int, int]] = {"cpu": (16, 128), "cuda": (64, 16), "npu": (128, 128)}
_SCALE_GROUP = 128  # quantised values that share one float32 scale


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """What the command line decides about the cache.

    Attributes:
        device: vLLM's device type.
        block_tokens: ``--block-size``; ``None`` for what vLLM chooses on that device.
        dtype: ``--dtype``.
        kv_cache_dtype: ``--kv-cache-dtype``.
        attention_backend: ``--attention-backend``; decides whether fp8 is packed with sparse MLA.
        c8: which caches are quantised to 8 bits on an NPU.
        drafts: MTP layers whose caches are kept.
    """

    device: str = "cuda"
    block_tokens: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    attention_backend: str = ""
    c8: str = "none"
    drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One component of a layer: its name below the layer, and bytes per token on one rank."""

    name: str
    token_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelCaches:
    """All caches of a model, on one rank that holds every layer.

    Attributes:
        block_tokens: tokens in a block.
        stored_as: what the main cache holds, for people.
        layers: pieces of each target layer.
        drafts: pieces of each MTP layer.
        has_indexer: sparse MLA.
        notes: what was assumed.
    """

    block_tokens: int
    stored_as: str
    layers: tuple[tuple[Piece, ...], ...]
    drafts: tuple[tuple[Piece, ...], ...]
    has_indexer: bool
    notes: tuple[str, ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, drafts included."""
        return sum(piece.token_bytes for layer in self.layers + self.drafts for piece in layer)

    def stages(self, pipeline: int, partition: str | None) -> tuple[StageLayers, ...]:
        """The caches of each pipeline stage; MTP layers live in the last one.

        Args:
            partition: VLLM_PP_LAYER_PARTITION, which overrides vLLM's own split.

        Raises:
            ConfigError: the layers cannot be split that way.
        """
        counts = pipeline_split(len(self.layers), pipeline, partition)
        stages: list[StageLayers] = []
        first = 0
        for stage, count in enumerate(counts):
            drafts = self.drafts if stage == pipeline - 1 else ()
            stages.append(
                stage_layers(
                    targets={i: self._components(i) for i in range(first, first + count)},
                    drafts=[c for i in range(len(drafts)) for c in self._draft_components(i)],
                )
            )
            first += count
        return tuple(stages)

    def _components(self, layer: int) -> list[CacheComponent]:
        return [self._component(layer, piece) for piece in self.layers[layer]]

    def _draft_components(self, draft: int) -> list[CacheComponent]:
        return [self._component(len(self.layers) + draft, piece) for piece in self.drafts[draft]]

    def _component(self, layer: int, piece: Piece) -> CacheComponent:
        return CacheComponent(
            layer_name=f"model.layers.{layer}.self_attn.{piece.name}",
            page_bytes=piece.token_bytes * self.block_tokens,
        )


def pipeline_split(num_layers: int, pipeline: int, partition: str | None = None) -> tuple[int, ...]:
    """Layers per pipeline stage, as vLLM splits them.

    The remainder goes to the stages before the last one, from the back: 62 over 4 is
    (15, 16, 16, 15).

    Raises:
        ConfigError: a stage would be empty, or ``partition`` does not fit.
    """
    if partition is not None:
        try:
            counts = tuple(int(part) for part in partition.split(","))
        except ValueError:
            counts = ()
        if len(counts) != pipeline or sum(counts) != num_layers or min(counts) < 1:
            raise ConfigError(
                f"VLLM_PP_LAYER_PARTITION is {partition!r}; expected {pipeline} numbers of layers "
                f"that add up to {num_layers}"
            )
        return counts
    if pipeline > num_layers:
        raise ConfigError(f"--pp is {pipeline}, more stages than the {num_layers} layers")
    quotient, remainder = divmod(num_layers, pipeline)
    raised = range(pipeline - 1 - remainder, pipeline - 1)
    return tuple(quotient + (stage in raised) for stage in range(pipeline))


def read_caches(
    checkpoint: Checkpoint, attention: Attention, options: CacheOptions, tensor_parallel: int
) -> ModelCaches:
    """Describe the caches that one rank holds without KVPP.

    Raises:
        ConfigError: the model's cache is not known here, or a setting does not fit it.
    """
    check_options(options)
    _check_known(checkpoint, attention)
    layers = _num_layers(checkpoint, options)
    dtype, notes = _model_dtype(checkpoint, options)
    kv_dtype = _kv_dtype(checkpoint, attention, options)
    if attention.is_mla:
        main, stored_as, more = _mla_pieces(checkpoint, options, dtype, kv_dtype)
        notes += more
    else:
        main, stored_as = _plain_pieces(checkpoint, attention, tensor_parallel, dtype, kv_dtype)
    sparse = attention.is_mla and _is_sparse(checkpoint)
    indexer = _indexer_pieces(checkpoint, options, dtype) if sparse else ()
    skips = _shared_indices(checkpoint, layers) if sparse else frozenset[int]()
    block_tokens, more = _block_tokens(attention, options, sparse)
    return ModelCaches(
        block_tokens=block_tokens,
        stored_as=stored_as,
        layers=tuple(main if i in skips else main + indexer for i in range(layers)),
        drafts=(main + indexer,) * options.drafts,
        has_indexer=sparse,
        notes=notes + more,
    )


def check_options(options: CacheOptions) -> None:
    """Refuse values that are none, whatever the model.

    Raises:
        ConfigError: names the flag and what is known.
    """
    choices = (
        ("--device", options.device, get_args(Device)),
        ("--dtype", options.dtype, ("auto", *_DTYPE_BYTES)),
        ("--kv-cache-dtype", options.kv_cache_dtype, (*_KV_DTYPES, *_PACKED_BYTES)),
        ("--c8", options.c8, get_args(C8)),
    )
    for flag, value, known in choices:
        if value not in known:
            raise ConfigError(f"{flag} is {value!r}; known here: {', '.join(known)}")
    if options.c8 != "none" and options.device != "npu":
        raise ConfigError(f"--c8 {options.c8} is a cache format of NPUs; add --device npu")
    if options.block_tokens is not None and options.block_tokens < 1:
        raise ConfigError(f"--block-size is {options.block_tokens}; expected at least 1")
    if not 0 <= options.drafts <= 64:
        raise ConfigError(f"--mtp is {options.drafts}; expected 0 to 64 MTP layers")


def _check_known(checkpoint: Checkpoint, attention: Attention) -> None:
    model_type, text = checkpoint.model_type, checkpoint.text
    known = MLA_LAYOUTS if attention.is_mla else MLA_LAYOUTS | PLAIN_LAYOUTS
    if model_type not in known:
        raise ConfigError(
            f"{checkpoint.path}: the cache layout of model type {model_type or '(none)'} is not "
            f"known here (hybrid or of several kinds); known: {', '.join(sorted(known))}"
        )
    kinds = text.get("layer_types")
    other = (
        sorted({str(kind) for kind in cast("list[object]", kinds)} - {"full_attention"})
        if isinstance(kinds, list) and not attention.is_mla
        else []
    )
    if text.get("sliding_window") is not None and text.get("use_sliding_window", True):
        other.append("sliding_window")
    if other and not attention.is_mla:
        raise ConfigError(
            f"{checkpoint.path}: not every layer keeps a full cache ({', '.join(other)}); the "
            "arithmetic here covers models of one kind of layer"
        )


def _num_layers(checkpoint: Checkpoint, options: CacheOptions) -> int:
    layers = checkpoint.needed_number("num_hidden_layers", "num_layers", "n_layer", "n_layers")
    if layers > _MOST_LAYERS:
        raise ConfigError(
            f"{checkpoint.where('num_hidden_layers')} is {layers}; at most {_MOST_LAYERS} here"
        )
    own_drafts = checkpoint.number("num_nextn_predict_layers", least=0)
    if own_drafts is not None and options.drafts > own_drafts:
        raise ConfigError(
            f"--mtp is {options.drafts}, and the checkpoint has {own_drafts} MTP layers "
            "(num_nextn_predict_layers)"
        )
    return layers


def _is_sparse(checkpoint: Checkpoint) -> bool:
    return checkpoint.text.get("index_topk") is not None


def _block_tokens(
    attention: Attention, options: CacheOptions, sparse: bool
) -> tuple[int, tuple[str, ...]]:
    chosen = _BLOCK_TOKENS[options.device][0 if attention.is_mla else 1]
    asked = options.block_tokens
    notes: tuple[str, ...] = ()
    if options.device == "cpu" and sparse:
        notes = ("vLLM itself runs no sparse attention on a CPU",)
    elif options.device == "cpu" and attention.is_mla and asked not in (None, chosen):
        return chosen, (f"--block-size {asked} ignored: MLA on CPU runs with {chosen} only",)
    return asked or chosen, notes


def _model_dtype(checkpoint: Checkpoint, options: CacheOptions) -> tuple[str, tuple[str, ...]]:
    """Data type of the model; "auto" stores float32 checkpoints in 16 bits, as vLLM does."""
    if options.dtype != "auto":
        return options.dtype, ()
    for config in (checkpoint.config, checkpoint.text):
        for key in ("dtype", "torch_dtype"):
            value = config.get(key)
            if isinstance(value, str):
                name = value.removeprefix("torch.")
                return (name if _DTYPE_BYTES.get(name) == 2 else _PREFERRED_DTYPE), ()
    return _PREFERRED_DTYPE, (f"the config names no dtype; {_PREFERRED_DTYPE} assumed",)


def _kv_dtype(checkpoint: Checkpoint, attention: Attention, options: CacheOptions) -> str:
    """``--kv-cache-dtype``, "auto" resolved by the checkpoint's quantisation as vLLM does."""
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    quantisation = checkpoint.config.get("quantization_config")
    if not isinstance(quantisation, dict):
        return "auto"
    settings = cast("dict[str, Any]", quantisation)
    method = str(settings.get("quant_method", ""))
    if method.startswith("modelopt"):
        inner = settings.get("quantization")
        places = [cast("dict[str, Any]", inner)] if isinstance(inner, dict) else []
        return _modelopt_kv_dtype([*places, settings], checkpoint)
    # compressed-tensors: vLLM looks at the scheme in plain attention, not in MLA.
    if settings.get("kv_cache_scheme") is not None and not attention.is_mla:
        return "fp8"
    return "auto"


def _modelopt_kv_dtype(places: list[dict[str, Any]], checkpoint: Checkpoint) -> str:
    found = [
        place[key]
        for key in ("kv_cache_scheme", "kv_cache_quant_algo")
        for place in places
        if place.get(key)
    ]
    if not found:
        return "auto"
    algorithm: object = found[0]
    if isinstance(algorithm, Mapping):
        scheme = cast("Mapping[str, object]", algorithm)
        is_float = scheme.get("type") == "float"
        if is_float and scheme.get("num_bits") == 8 and scheme.get("dynamic") is False:
            return "fp8"
        algorithm = "nvfp4" if is_float and scheme.get("num_bits") == 4 else ""
    name = str(algorithm).lower()
    if name == "nvfp4":
        raise ConfigError(
            f"{checkpoint.path}: the checkpoint asks for an nvfp4 KV cache, whose size is not "
            "known here; name another --kv-cache-dtype"
        )
    return "fp8_e4m3" if name == "fp8" else "auto"


def _element_bytes(dtype: str, kv_dtype: str) -> tuple[int, str]:
    """Bytes of one stored value, and its name."""
    if kv_dtype == "auto":
        return _DTYPE_BYTES[dtype], dtype
    return _DTYPE_BYTES.get(kv_dtype, 1), kv_dtype


def _plain_pieces(
    checkpoint: Checkpoint, attention: Attention, tensor_parallel: int, dtype: str, kv_dtype: str
) -> tuple[tuple[Piece, ...], str]:
    if kv_dtype in _PACKED_BYTES:
        raise ConfigError(f"--kv-cache-dtype {kv_dtype} is a format of sparse MLA only")
    size, stored_as = _element_bytes(dtype, kv_dtype)
    heads, head_values = attention.kv_heads, _head_values(checkpoint, attention)
    if checkpoint.model_type in MLA_LAYOUTS:
        # MLA turned off: keys and values are expanded for every attention head.
        heads = attention.attention_heads
    per_rank = max(1, heads // tensor_parallel)
    return (Piece(name="attn", token_bytes=2 * per_rank * head_values * size),), stored_as


def _head_values(checkpoint: Checkpoint, attention: Attention) -> int:
    if checkpoint.model_type in MLA_LAYOUTS:
        rope = checkpoint.number("qk_rope_head_dim", least=0) or 0
        return checkpoint.needed_number("qk_nope_head_dim") + rope
    head_dim = checkpoint.number("head_dim", least=0)
    if head_dim:
        return head_dim
    values = checkpoint.needed_number("hidden_size") // attention.attention_heads
    if values < 1:
        raise ConfigError(f"{checkpoint.where('hidden_size')} is less than the attention heads")
    return values


def _mla_pieces(
    checkpoint: Checkpoint, options: CacheOptions, dtype: str, kv_dtype: str
) -> tuple[tuple[Piece, ...], str, tuple[str, ...]]:
    latent = checkpoint.needed_number("kv_lora_rank")
    rope = checkpoint.number("qk_rope_head_dim", least=0) or 0
    sparse = _is_sparse(checkpoint)
    if options.device == "npu":
        pieces, stored_as = _npu_pieces(options, latent, rope, sparse, dtype)
        return pieces, stored_as, ()
    notes: tuple[str, ...] = ()
    backend = options.attention_backend.upper()
    if sparse and kv_dtype.startswith("fp8") and kv_dtype != "fp8_ds_mla":
        packs = backend in ("", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120")
        notes = () if backend else ("fp8 packed as FlashMLA does; see --attention-backend",)
        kv_dtype = "fp8_ds_mla" if packs else kv_dtype
    if sparse and kv_dtype == "auto" and backend == "FLASHINFER_MLA_SPARSE_SM120":
        kv_dtype = "fp8_ds_mla"
    if kv_dtype in _PACKED_BYTES:
        if not sparse:
            raise ConfigError(f"--kv-cache-dtype {kv_dtype} is a format of sparse MLA only")
        return (Piece(name="attn", token_bytes=_PACKED_BYTES[kv_dtype]),), kv_dtype, notes
    size, stored_as = _element_bytes(dtype, kv_dtype)
    return (Piece(name="attn", token_bytes=(latent + rope) * size),), stored_as, notes


def _npu_pieces(
    options: CacheOptions, latent: int, rope: int, sparse: bool, dtype: str
) -> tuple[tuple[Piece, ...], str]:
    """The latent and the rope part are two buffers on an NPU, and one with C8."""
    if options.c8 != "none" and not sparse:
        raise ConfigError(f"--c8 {options.c8} is a format of sparse MLA only")
    if options.c8 in ("main", "both"):
        packed = latent + 2 * rope + latent // _SCALE_GROUP * 4
        return (Piece(name="attn", token_bytes=packed),), "c8"
    if options.kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        raise ConfigError(
            f"--kv-cache-dtype {options.kv_cache_dtype} is not known for NPUs here; 8 bits there "
            "are --c8"
        )
    size, stored_as = _element_bytes(dtype, options.kv_cache_dtype)
    pieces = [Piece(name="attn.latent", token_bytes=latent * size)]
    if rope:
        pieces.append(Piece(name="attn.rope", token_bytes=rope * size))
    return tuple(pieces), stored_as


def _indexer_pieces(checkpoint: Checkpoint, options: CacheOptions, dtype: str) -> tuple[Piece, ...]:
    values = checkpoint.needed_number("index_head_dim")
    name = "indexer.k_cache"
    if options.device != "npu":
        # 8-bit keys and one float32 scale for each 128 of them.
        return (Piece(name=name, token_bytes=values + values // _SCALE_GROUP * 4),)
    if options.c8 in ("indexer", "both"):
        return (Piece(name=name, token_bytes=values), Piece(name=f"{name}.scale", token_bytes=2))
    return (Piece(name=name, token_bytes=values * _DTYPE_BYTES[dtype]),)


def _shared_indices(checkpoint: Checkpoint, layers: int) -> frozenset[int]:
    """Layers that use another layer's top-k and keep no indexer cache."""
    pattern = checkpoint.text.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str | list):
            raise ConfigError(f"{checkpoint.where('index_topk_pattern')} is no string or list")
        marks = cast("str | list[object]", pattern)
        return frozenset(i for i in range(min(layers, len(marks))) if marks[i] == "S")
    every = checkpoint.number("index_topk_freq") or 1
    offset = checkpoint.number("index_skip_topk_offset", least=0)
    offset = 2 if offset is None else offset
    return frozenset(i for i in range(layers) if max(i - offset + 1, 0) % every)
