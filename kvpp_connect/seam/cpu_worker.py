"""The KVPP worker for vLLM on CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from kvpp_connect.seam.worker import KvppWorkerMixin


class KvppCPUWorker(KvppWorkerMixin, CPUWorker):
    """``CPUWorker`` with KVPP."""
