"""A request whose load failed as a whole loads once more, on vLLM's own scheduler."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpp_connect.demo.model import write_checkpoint
from kvpp_connect.seam.retries import allow_second_loads

# vLLM looks at the model's class in a process of its own.
pytestmark = pytest.mark.distributed

BLOCK, BLOCKS = 16, 40
PROMPT = list(range(24 * BLOCK + 1))  # more than half of the cache


class Offers(KVConnectorBase_V1, SupportsHMA):
    """Offers all of a prompt, to be loaded in the background, whenever it is asked."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return request.num_tokens - 1 - num_computed_tokens, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs):
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name):
        raise NotImplementedError

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        raise NotImplementedError

    def wait_for_save(self):
        raise NotImplementedError


def make_scheduler(folder):
    config: VllmConfig = EngineArgs(
        model=str(write_checkpoint(folder / "tiny")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=BLOCK,
        kv_cache_memory_bytes=1 << 24,
        skip_tokenizer_init=True,
        attention_backend="CPU_MLA",
        kv_transfer_config={
            "kv_connector": "Offers",
            "kv_connector_module_path": __name__,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        },
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=None)
    page = 576 * 4 * BLOCK
    tensor = KVCacheTensor(
        size=page * BLOCKS, layers=["a"], layer_stride=page * BLOCKS, block_stride=page
    )
    with set_current_vllm_config(config):
        return Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=BLOCKS,
                kv_cache_tensors=[tensor],
                kv_cache_groups=[KVCacheGroupSpec(["a"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )


def step(scheduler, **connector_output):
    """One step in which workers report this."""
    output = scheduler.schedule()
    ids = [*output.num_scheduled_tokens]
    result = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        sampled_token_ids=[[] for _ in ids],
        kv_connector_output=KVConnectorOutput(**connector_output),
    )
    scheduler.update_from_output(output, result)
    return output


def test_a_request_larger_than_half_of_the_cache_loads_again_after_its_load_failed(tmp_path):
    allow_second_loads()
    allow_second_loads()
    scheduler = make_scheduler(tmp_path)
    request = Request("r", PROMPT, SamplingParams(max_tokens=2), None)
    scheduler.add_request(request)
    for _ in range(3):
        step(scheduler)
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        (blocks,) = scheduler.kv_cache_manager.get_block_ids("r")
        assert len(blocks) == 24
        step(scheduler, finished_recving={"r"}, failed_recving={"r"})
    # It was promoted and admitted in one step: the load after the last failure is under way.
    step(scheduler)
    step(scheduler, finished_recving={"r"})
    assert step(scheduler).num_scheduled_tokens == {"r": 1}
