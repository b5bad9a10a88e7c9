"""What differs between the vLLMs that the seam runs in, by vLLM's device type."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpp_connect.seam import ascend, cuda, ledger
from kvpp_connect.seam.ascend_ledger import ASCEND_CONFIG_LEDGER, SUPPORTED_ASCEND
from kvpp_connect.seam.device_ledger import CPU_LEDGER, CUDA_LEDGER

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _no_problems(vllm_config: "VllmConfig") -> Iterable[str]:
    del vllm_config
    return ()


def _nothing(vllm_config: "VllmConfig") -> None:
    del vllm_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A vLLM and what surrounds it.

    Attributes:
        touchpoints: the symbols that the seam leans on there.
        supported: the versions, in words.
        problems: settings that KVPP cannot run with there, beyond those of every vLLM.
        compact_obstacles: settings that compact mode cannot run with there, likewise.
        settle_defaults: fills what the user left open, before vLLM's own defaults do.
        settle: changes a configuration in which nothing is wrong.
        serves_kvpp: whether it has a KVPP of its own, which then serves ``enable_kvpp``.
    """

    touchpoints: tuple[ledger.Touchpoint, ...] = ledger.LEDGER
    supported: str = ledger.SUPPORTED
    problems: Callable[["VllmConfig"], Iterable[str]] = _no_problems
    compact_obstacles: Callable[["VllmConfig"], Iterable[str]] = _no_problems
    settle_defaults: Callable[["VllmConfig"], None] = _nothing
    settle: Callable[["VllmConfig"], None] = _nothing
    serves_kvpp: Callable[[], bool] = bool  # no

    def verify(self) -> None:
        """Compare the touchpoints with what is installed.

        Raises:
            SeamError: a symbol is missing or looks different.
        """
        ledger.verify(self.touchpoints, self.supported)


_STOCK = Variant()
_VARIANTS = {
    "cpu": Variant(touchpoints=(*ledger.LEDGER, *CPU_LEDGER)),
    cuda.DEVICE_TYPE: Variant(
        touchpoints=(*ledger.LEDGER, *CUDA_LEDGER),
        problems=cuda.problems,
        settle_defaults=cuda.settle_defaults,
        settle=cuda.settle,
    ),
    ascend.DEVICE_TYPE: Variant(
        touchpoints=ASCEND_CONFIG_LEDGER,
        supported=SUPPORTED_ASCEND,
        problems=ascend.problems,
        compact_obstacles=ascend.compact_obstacles,
        settle_defaults=ascend.settle_defaults,
        settle=ascend.settle,
        serves_kvpp=ascend.has_own_kvpp,
    ),
}


def variant(device_type: str) -> Variant:
    """The vLLM of a device type: the stock one unless something else is known to run there."""
    return _VARIANTS.get(device_type, _STOCK)
