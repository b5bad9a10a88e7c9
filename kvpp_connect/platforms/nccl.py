"""What NCCL has to be able to do beside a model, without loading it.

The model's collectives and KVPP's broadcasts are kernels that wait inside for other GPUs. Two of
them on different streams deadlock where one GPU starts the first before the second and another GPU
the other way round, with no room for both. NCCL starts the kernels of all of its communicators in
the order in which the host launched them if ``LAUNCH_ORDER`` is set when it launches its first one
(from 2.26 on), as long as there is one NCCL in the process.
"""

import re

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
LEAST_NCCL = (2, 26)
_LIBRARY = re.compile(r"\S*/libnccl\.so[.\d]*$", re.MULTILINE)


def nccl_problem(version: tuple[int, ...], memory_map: str) -> str:
    """What keeps NCCL from ordering launches; empty where nothing does.

    Args:
        version: of torch's NCCL; empty where torch has none.
        memory_map: of this process, as in ``/proc/self/maps``.
    """
    if version[:2] < LEAST_NCCL:
        found = ".".join(map(str, version)) or "absent"
        return (
            f"NCCL is {found}; only {'.'.join(map(str, LEAST_NCCL))} and newer start kernels in "
            f"the order of their launches ({LAUNCH_ORDER}). Install the torch that this vLLM asks "
            "for, with its own NCCL"
        )
    libraries = sorted(set(_LIBRARY.findall(memory_map)))
    if len(libraries) > 1:
        return (
            f"this process has loaded {len(libraries)} NCCL libraries ({', '.join(libraries)}), "
            "and neither orders its launches after the other's. Unset VLLM_NCCL_SO_PATH, so that "
            "vLLM uses torch's"
        )
    return ""
