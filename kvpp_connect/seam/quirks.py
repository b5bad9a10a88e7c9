"""Work-arounds for machines, off unless asked for.

``KVPP_CONNECT_NO_SCHED_YIELD=1`` keeps vLLM from waiting in ``sched_yield`` loops: its message
queues sleep instead, and on CPU the ranks reduce over gloo instead of the shared-memory
communicator, whose native code yields as well. On a Linux 6.18 guest with two cores, five processes
in such loops stopped every process of the machine for two minutes ("workqueue lockup" in dmesg),
and fewer of them starved threads that serve Mooncake reads; with sleeps they did not.
"""

import os

VARIABLE = "KVPP_CONNECT_NO_SCHED_YIELD"


def apply() -> None:
    """Apply what the environment asks for; may be called again."""
    if os.environ.get(VARIABLE) != "1":
        return
    from vllm.distributed import utils
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    utils.USE_SCHED_YIELD = False
    CpuCommunicator._all_group_ranks_share_shm_group_name = (  # noqa: SLF001 - in the ledger
        lambda self: False
    )
