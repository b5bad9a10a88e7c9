"""Ranks of the chain: plugin -> worker -> model runner -> tiny model -> budget -> allocation."""

import json
import types

import ascend_vllm

MEMORY_BYTES = 256 << 20
BLOCK_TOKENS = 128
CONNECTOR = {
    "kv_connector": "MooncakeConnectorV2",
    "kv_connector_module_path": "kvpp_connect.connectors",
    "kv_connector_extra_config": {"protocol": "tcp", "host": "127.0.0.1"},
}
FULL = {"enable_kvpp": True, "kvpp": {"mode": "full"}}
INDEXER = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 48,
    "index_n_heads": 4,
    "index_head_dim": 128,
}


def write_model(path, kind, *, layers=6, drafts=0):
    """The directory of a tiny MLA or SFA model in bfloat16."""
    from kvpp_connect.demo.model import ModelSpec, write_checkpoint

    write_checkpoint(path, ModelSpec(layers=layers, mtp_layers=drafts))
    config = json.loads((path / "config.json").read_text())
    config |= {"torch_dtype": "bfloat16", "dtype": "bfloat16", **(INDEXER if kind == "sfa" else {})}
    (path / "config.json").write_text(json.dumps(config))
    return path


def engine_config(model, ranks, *, kvpp=True, role="", drafts=0, **more):
    """vLLM's configuration, through the platform's and the plugin's checks."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = more.pop("transfer", {})
    more.setdefault("additional_config", FULL if kvpp else {})
    if role:
        transfer = CONNECTOR | {"kv_role": role} | transfer
    if transfer:
        more["kv_transfer_config"] = KVTransferConfig(**transfer)
    speculation = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
    return EngineArgs(
        model=str(model),
        load_format="dummy",
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_memory_bytes=MEMORY_BYTES,
        speculative_config=speculation,
        **more,
    ).create_engine_config()


class Rank:
    """A worker, from its construction to its caches."""

    def __init__(self, config, rank, ranks, port):
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        self.config, self.rank, self.ranks = config, rank, ranks
        self.address = f"tcp://127.0.0.1:{port}"
        arguments = {
            "vllm_config": config,
            "local_rank": rank,
            "rank": rank,
            "distributed_init_method": self.address,
            "is_driver_worker": rank == 0,
        }
        self.wrapper = WorkerWrapperBase(rpc_rank=rank)
        self.wrapper.init_worker([arguments] * ranks)
        self.worker = self.wrapper.worker
        self.worker._init_device = self._init_device  # noqa: SLF001 - the NPU's part

    def start(self):
        """What vLLM's engine asks of its workers, up to the allocation of the caches."""
        from vllm.config import set_current_vllm_config
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        with set_current_vllm_config(self.config):
            self.worker.init_device()
            with ascend_vllm.weights_on_cpu(self.config):
                self.worker.load_model()
            self.worker.model_runner.profile_run = lambda: None  # needs the NPU's operators
            self.specs = self.worker.get_kv_cache_spec()
            self.reported_bytes = self.worker.determine_available_memory()
            rows = self._gather((self.specs, self.reported_bytes))
            configs = get_kv_cache_configs(
                self.config, [specs for specs, _ in rows], [memory for _, memory in rows]
            )
            self.cache_config = configs[self.rank]
            self.wrapper.initialize_from_config(configs)

    @property
    def layers(self):
        return self.config.compilation_config.static_forward_context

    def _gather(self, value):
        import torch.distributed as dist

        rows = [None] * self.ranks
        dist.all_gather_object(rows, value)
        return rows

    def _init_device(self):
        import torch
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
        from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel

        self.worker.init_snapshot = types.SimpleNamespace(free_memory=1 << 34)
        init_distributed_environment(self.ranks, self.rank, self.address, self.rank, backend="gloo")
        ensure_model_parallel_initialized(self.ranks, 1, backend="gloo")
        init_ascend_model_parallel(self.config.parallel_config)
        return torch.device("cpu")


def start_rank(model, ranks, rank, port, options):
    """A started rank; ``options`` are those of ``engine_config``."""
    import vllm.plugins

    ascend_vllm.prepare()
    vllm.plugins.load_general_plugins()
    ascend_vllm.run_on_cpus()
    chain = Rank(engine_config(model, ranks, **options), rank, ranks, port)
    chain.start()
    return chain


def described_rank(pipe, model, ranks, rank, port, options):
    """Start a rank and send what it has ended up with; wait until it may end."""
    chain = start_rank(model, ranks, rank, port, options)
    pipe.send(describe(chain))
    pipe.recv()


def describe(chain):
    """A rank in plain values."""
    from kvpp_connect.seam.runtime import active_placement

    placement = active_placement()
    found = {
        "worker": type(chain.worker).__name__,
        "runner": type(chain.worker.model_runner).__name__,
        "all2all": chain.config.parallel_config.all2all_backend,
        "reported_bytes": chain.reported_bytes,
        "num_blocks": chain.cache_config.num_blocks,
        "planner_block_bytes": sum(s.page_size_bytes for s in chain.specs.values()),
        "caches": {
            name: [
                {
                    "shape": tuple(t.shape),
                    "dtype": str(t.dtype),
                    "address": t.data_ptr(),
                    "nbytes": t.nbytes,
                    "allocation": t.untyped_storage().data_ptr(),
                    "allocated": t.untyped_storage().nbytes(),
                }
                for t in chain.layers[name].kv_cache
            ]
            for name in chain.specs
        },
        "registered": [*ascend_vllm.registered],
        "manifest": ascend_vllm.manifest(),
    }
    if placement is not None:
        found |= {
            "owners": placement.layout.owners,
            "total_bytes": placement.total_bytes,
            "persistent": sorted(placement.persistent_layers),
            "drafts": [c.layer_name for c in placement.layout.stage.drafts],
        }
    return found
