"""What an engine must be like for the pool, known before the model is loaded."""

from typing import TYPE_CHECKING

from kvpp_connect.connectors.ascend_store.config import PoolConfig
from kvpp_connect.errors import ConfigError
from kvpp_connect.seam import multi
from kvpp_connect.seam.api import TELLS_SYNC_LOADS
from kvpp_connect.seam.host_plan import host_serves

if TYPE_CHECKING:
    from kvpp_connect.seam.api import VllmConfig


def check_engine(vllm_config: "VllmConfig", config: PoolConfig) -> None:
    """Refuse an engine that the pool cannot serve, or not in the way that is asked for.

    Raises:
        ConfigError: names the setting and what to change.
    """
    model = vllm_config.model_config
    if model is None or not model.use_mla:
        raise ConfigError(
            "AscendStoreConnector: the model does not use MLA, its ranks hold different KV heads; "
            "this version of kvpp-connect pools MLA models only"
        )
    if config.load_mode != "async" and vllm_config.max_concurrent_batches > 1:
        setting = "use_layerwise" if config.load_mode == "layerwise" else '"load_async": false'
        raise ConfigError(
            f"AscendStoreConnector: {setting} needs steps one after the other, since a load that "
            "fails must be known before the next one. Remove it, or use --no-async-scheduling and "
            "one pipeline stage"
        )
    if config.load_mode != "async" and host_serves(vllm_config):
        raise ConfigError(
            "AscendStoreConnector: vllm-ascend's own KVPP broadcasts a layer whether it is loaded "
            'or not; remove use_layerwise and "load_async": false'
        )
    if not TELLS_SYNC_LOADS:
        _check_older_vllm(vllm_config, config)


def _check_older_vllm(vllm_config: "VllmConfig", config: PoolConfig) -> None:
    """Refuse what needs a vLLM that says which forwards read what is loaded for them."""
    problem = ""
    if config.load_mode != "async":
        problem = 'loads before or during a forward; remove use_layerwise and "load_async": false'
    elif vllm_config.parallel_config.pipeline_parallel_size > 1:
        # Workers of all stages but the last cannot tell the scheduler what has been stored.
        problem = "pipeline stages; use --pipeline-parallel-size 1"
    elif stranger := _stranger(vllm_config):
        problem = f"{stranger} beside it, which may load so; remove that connector"
    if problem:
        raise ConfigError(f"AscendStoreConnector: this vLLM is too old for {problem}")


def _stranger(vllm_config: "VllmConfig") -> str:
    """Name of a connector beside ours that is none of ours; empty for none."""
    whole = vllm_config.kv_transfer_config
    if whole is None or not multi.is_multi(whole.kv_connector, whole.kv_connector_module_path):
        return ""
    beside = multi.named_children(multi.children(whole.kv_connector_extra_config))
    return next((child.name for child in beside if not child.is_ours), "")
