"""Command lines of vLLM's API server and of vllm-router, for small models on a CPU.

Specifications only; fleet.py starts them.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpp_connect.demo.ports import LOOPBACK
from kvpp_connect.demo.process import Launch

MODEL_NAME = "kvpp-demo"
_EAGER = ("--enforce-eager",)
_COMPILED = ("--compilation-config", '{"cudagraph_mode": "PIECEWISE"}')


def _loopback_env() -> dict[str, str]:
    """Environment of every server: this machine only, no proxy in between."""
    return {name: _with_loopback(os.environ.get(name, "")) for name in ("NO_PROXY", "no_proxy")}


def _with_loopback(value: str) -> str:
    return ",".join(filter(None, (value, LOOPBACK)))


def _vllm_env(*, compiled: bool) -> dict[str, str]:
    return {
        **_loopback_env(),
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",  # the KV cache size is read from the log
        "HF_HUB_OFFLINE": "1",
        # vLLM compiles small helpers at the first request even with --enforce-eager: half a minute
        # on two cores, and a C++ compiler would have to be there.
        "TORCH_COMPILE_DISABLE": "0" if compiled else "1",
        # Several engines share few cores, so none of them pins its threads.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Several engines that wait in sched_yield loops can stop a small machine for minutes.
        "KVPP_CONNECT_NO_SCHED_YIELD": "1",
        "MC_FORCE_TCP": "1",
        "MC_TCP_BIND_ADDRESS": LOOPBACK,
        # On a machine that stalls now and then, give a silent connection up early and read again.
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
        "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """One vLLM OpenAI server in float32 on the CPU."""

    name: str
    model: Path
    port: int
    tensor_parallel_size: int = 1
    additional_config: Mapping[str, Any] | None = None
    kv_transfer_config: Mapping[str, Any] | None = None
    kv_cache_bytes: int = 200_000_000  # per rank, all of it resident
    max_model_tokens: int = 2048
    max_requests: int = 8  # that run at the same time
    compiled: bool = False  # piecewise, which takes about a minute; else eager
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Base URL without a slash at the end."""
        return f"http://{LOOPBACK}:{self.port}"

    def launch(self) -> Launch:
        """The program to start.

        The console script `vllm` asks for the metadata of a distribution of that name, which the
        CPU build does not have; the module is the same server. The attention backend is named
        because on a CPU with AMX vLLM picks one that cannot load float32 weights.
        """
        arguments = {
            "--model": str(self.model),
            "--served-model-name": MODEL_NAME,
            "--host": LOOPBACK,
            "--port": str(self.port),
            "--tensor-parallel-size": str(self.tensor_parallel_size),
            "--dtype": "float32",
            "--attention-backend": "CPU_MLA",
            "--max-model-len": str(self.max_model_tokens),
            "--max-num-seqs": str(self.max_requests),
            "--kv-cache-memory-bytes": str(self.kv_cache_bytes),
            "--seed": "0",
        }
        if self.additional_config is not None:
            arguments["--additional-config"] = json.dumps(dict(self.additional_config))
        if self.kv_transfer_config is not None:
            arguments["--kv-transfer-config"] = json.dumps(dict(self.kv_transfer_config))
        return Launch(
            name=self.name,
            argv=(
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *(word for pair in arguments.items() for word in pair),
                *(_COMPILED if self.compiled else _EAGER),
                *("--disable-uvicorn-access-log", *self.extra_args),
            ),
            port=self.port,
            env={**_vllm_env(compiled=self.compiled), **self.env},
            scratch_pattern=r"vllm_dist_[0-9a-f]{32}",
            folder_variable="VLLM_RPC_BASE_PATH",  # of sockets that vLLM does not remove
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterServer:
    """vllm-router in front of prefill and decode servers, which take turns."""

    name: str
    port: int
    metrics_port: int
    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    extra_args: tuple[str, ...] = ()

    def launch(self) -> Launch:
        """The program to start.

        "nixl" names the shape of kv_transfer_params that the router exchanges, not a library.
        """
        arguments = {
            "--host": LOOPBACK,
            "--port": str(self.port),
            "--prometheus-host": LOOPBACK,
            "--prometheus-port": str(self.metrics_port),
            "--kv-connector": "nixl",
            "--policy": "round_robin",
            "--worker-startup-check-interval": "1",
        }
        return Launch(
            name=self.name,
            argv=(
                *(sys.executable, "-m", "vllm_router.launch_router"),
                *("--vllm-pd-disaggregation", "--disable-retries"),
                *(word for pair in arguments.items() for word in pair),
                *(word for url in self.prefill_urls for word in ("--prefill", url)),
                *(word for url in self.decode_urls for word in ("--decode", url)),
                *self.extra_args,
            ),
            port=self.port,
            other_ports=(self.metrics_port,),
            env=_loopback_env(),
        )
