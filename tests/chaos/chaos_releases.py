"""What the harness says and asks differently in the vLLM under vllm-ascend, up to 0.26."""

from dataclasses import fields

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput

from kvpp_connect.seam.older_vllm import TELLS_SYNC_LOADS

# The CPU's must be named where the machine could run another; the NPU's platform has one.
ENGINE_OPTIONS = {"attention_backend": "CPU_MLA"} if current_platform.device_type == "cpu" else {}


def cache_tensors(names, num_blocks, page_bytes):
    """vLLM's description of one allocation for all layers, or of one for each."""
    if "shared_by" in {field.name for field in fields(KVCacheTensor)}:
        return [KVCacheTensor(size=page_bytes * num_blocks, shared_by=[name]) for name in names]
    return [
        KVCacheTensor(
            size=page_bytes * num_blocks * len(names),
            layers=list(names),
            layer_stride=page_bytes * num_blocks,
            block_stride=page_bytes,
        )
    ]


def transfer_results(connector, finished_ids):
    """What a model runner hands on of a connector's ended transfers."""
    if TELLS_SYNC_LOADS:
        ended = connector.get_transfer_results(finished_ids)
        known = {
            "finished_sending": ended.finished_sending,
            "finished_recving": ended.finished_recving,
            "failed_recving": ended.failed_recving,
        }
    else:
        sent, received = connector.get_finished(finished_ids)
        known = {"finished_sending": sent, "finished_recving": received}
    return KVConnectorOutput(
        **known,
        invalid_block_ids=connector.get_block_ids_with_load_errors(),
        kv_connector_stats=connector.get_kv_connector_stats(),
        kv_connector_worker_meta=connector.build_connector_worker_meta(),
    )
