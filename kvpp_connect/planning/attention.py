"""How many KV heads vLLM sees in a checkpoint, and how often tensor parallelism repeats them.

MLA comes first: such a checkpoint states ``num_key_value_heads`` too, 128 of them for DeepSeek, and
dividing by that number finds no duplication in the layout that stores everything on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.checkpoint import Checkpoint

MLA_DISABLE_VARIABLE = "VLLM_MLA_DISABLE"

MLA_MODEL_TYPES = frozenset(
    {
        "axk1",
        "bailing_hybrid",
        "bailing_hybrid_mtp",
        "bailing_hybrid_v3_mtp",
        "deepseek_mtp",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "deepseek_v41",
        "dots3_note",
        "glm4_moe_lite",
        "glm4_moe_lite_mtp",
        "glm5_next",
        "glm5_next_text",
        "glm_moe_dsa",
        "hy_v4",
        "hy_v4_mtp",
        "k3_dspark",
        "kimi_k2",
        "kimi_linear",
        "longcat_flash",
        "pangu_ultra_moe",
        "pangu_ultra_moe_mtp",
    }
)
"""Model types for which vLLM has an MLA implementation; a test compares them with vLLM's."""

_EAGLE_MLA_MODEL_TYPES = frozenset(
    {"axk1", "deepseek_mtp", "deepseek_v2", "deepseek_v3", "deepseek_v32"}
)
KV_HEAD_KEYS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
"""Keys for the number of KV heads; the first that is there counts."""

# Older families call their attention heads by another name; Transformers translates it.
_OLDER_HEAD_KEYS = ("n_head", "num_heads", "n_heads")
_ATTENTION_FREE = frozenset({"falcon_mamba", "mamba", "medusa", "timm_wrapper"})

ModelImpl = Literal["vllm", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The facts that decide about duplication.

    Attributes:
        is_mla: whether vLLM serves the model with MLA.
        kv_heads: distinct KV heads, one with MLA.
        kv_heads_from: where that number comes from: a key of the config, or "MLA".
        attention_heads: query heads.
        why: one line for people: what decided between MLA and the rest.
    """

    is_mla: bool
    kv_heads: int
    kv_heads_from: str
    attention_heads: int
    why: str

    @property
    def kind(self) -> str:
        """The usual abbreviation: MLA, MHA, MQA or GQA."""
        if self.is_mla:
            return "MLA"
        if self.kv_heads == self.attention_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    def factor(self, tensor_parallel: int) -> int:
        """Copies of each KV head over the ranks of a tensor parallel group.

        Up to the number of KV heads every added rank takes heads off the others; beyond it, it
        adds a copy.

        Example:
            >>> qwen = Attention(
            ...     is_mla=False, kv_heads=4, kv_heads_from="", attention_heads=64, why=""
            ... )
            >>> qwen.factor(4), qwen.factor(8)
            (1, 2)
        """
        return max(1, tensor_parallel // self.kv_heads)


def mla_disabled(environment: Mapping[str, str]) -> bool:
    """Whether VLLM_MLA_DISABLE turns MLA off, read as vLLM reads it.

    Raises:
        ConfigError: vLLM cannot parse the value and would not start.
    """
    value = environment.get(MLA_DISABLE_VARIABLE, "0")
    try:
        return bool(int(value))
    except ValueError:
        raise ConfigError(
            f"{MLA_DISABLE_VARIABLE} is {value!r}, which vLLM reads as a whole number: set it to 0 "
            "or 1, or unset it"
        ) from None


def read_attention(
    checkpoint: Checkpoint, *, disabled: bool = False, model_impl: ModelImpl = "vllm"
) -> Attention:
    """Decide as vLLM does.

    Args:
        disabled: what ``mla_disabled`` says.
        model_impl: "transformers" for vLLM's Transformers backend, which has a rule of its own.

    Raises:
        ConfigError: a head count is absent, or no number of at least 1.
    """
    if checkpoint.model_type in _ATTENTION_FREE:
        raise ConfigError(
            f"{checkpoint.path}: model type {checkpoint.model_type} keeps no keys and values: "
            "nothing can be duplicated"
        )
    is_mla, why = _decide_mla(checkpoint, disabled, model_impl)
    heads = checkpoint.needed_number("num_attention_heads", *_OLDER_HEAD_KEYS)
    kv_heads, source = (1, "MLA") if is_mla else _kv_heads(checkpoint, heads)
    return Attention(
        is_mla=is_mla, kv_heads=kv_heads, kv_heads_from=source, attention_heads=heads, why=why
    )


def _decide_mla(checkpoint: Checkpoint, disabled: bool, model_impl: ModelImpl) -> tuple[bool, str]:
    text, model_type = checkpoint.text, checkpoint.model_type
    if disabled:
        return False, f"{MLA_DISABLE_VARIABLE} is set"
    if model_impl == "transformers":
        found = checkpoint.number("kv_lora_rank") is not None
        return found, f"the Transformers backend goes by kv_lora_rank, {_presence(found)}"
    if not text.get("is_causal", True):
        return False, "is_causal is false: vLLM's MLA kernels are causal"
    if model_type == "eagle":
        found = _wrapped_model_type(checkpoint) in _EAGLE_MLA_MODEL_TYPES
        found = found and checkpoint.number("kv_lora_rank") is not None
        return found, "an EAGLE module goes by the model that it wraps"
    if model_type not in MLA_MODEL_TYPES:
        return False, f"vLLM has no MLA for model type {model_type or '(none)'}"
    key = "head_dim" if "compress_ratios" in text else "kv_lora_rank"
    found = checkpoint.number(key) is not None
    return found, f"{model_type} has MLA in vLLM, {key} {_presence(found)}"


def _presence(found: bool) -> str:
    return "present" if found else "absent"


def _wrapped_model_type(checkpoint: Checkpoint) -> object:
    wrapped = checkpoint.text.get("model")
    if not isinstance(wrapped, dict):
        raise ConfigError(
            f"{checkpoint.where('model')} is no object; an EAGLE module wraps a model"
        )
    return cast("dict[str, object]", wrapped).get("model_type")


def _kv_heads(checkpoint: Checkpoint, attention_heads: int) -> tuple[int, str]:
    special = _special_kv_heads(checkpoint)
    if special is not None:
        return special
    for key in KV_HEAD_KEYS:
        value = checkpoint.number(key)
        if value is not None:
            return value, key
    return attention_heads, "attention heads"


def _special_kv_heads(checkpoint: Checkpoint) -> tuple[int, str] | None:
    """The families for which vLLM has a rule besides the five keys."""
    text = checkpoint.text
    if checkpoint.model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        if text.get("multi_query") and not text.get("new_decoder_architecture"):
            return 1, "multi_query"
    elif checkpoint.model_type == "dbrx":
        attention = text.get("attn_config")
        if isinstance(attention, dict) and "kv_n_heads" in attention:
            nested = replace(checkpoint, text=attention, text_key="attn_config")
            return nested.needed_number("kv_n_heads"), "attn_config.kv_n_heads"
    elif checkpoint.model_type in ("nemotron-nas", "cohere_asr"):
        raise ConfigError(
            f"{checkpoint.path}: the KV heads of model type {checkpoint.model_type} differ from "
            "layer to layer or module to module; one duplication factor does not describe them"
        )
    return None
