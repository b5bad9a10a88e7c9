"""Work-arounds for machines, off unless asked for.

``KVPP_CONNECT_NO_SCHED_YIELD=1`` makes vLLM's message queues sleep instead of calling
``sched_yield`` in a loop. On a Linux 6.18 guest with two cores, five processes in such loops
stopped every process of the machine for two minutes ("workqueue lockup" in dmesg); with sleeps they
did not. vLLM has the other way built in and chooses by Python version only.
"""

import os

VARIABLE = "KVPP_CONNECT_NO_SCHED_YIELD"


def apply() -> None:
    """Apply what the environment asks for; may be called again."""
    if os.environ.get(VARIABLE) != "1":
        return
    from vllm.distributed import utils

    utils.USE_SCHED_YIELD = False
