"""What differs between the vLLMs that the seam runs in, by vLLM's device type."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpp_connect.seam import ascend, ledger
from kvpp_connect.seam.ascend_ledger import ASCEND_CONFIG_LEDGER, SUPPORTED_ASCEND

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _nothing(vllm_config: "VllmConfig") -> Iterable[str]:
    del vllm_config
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A vLLM and what surrounds it.

    Attributes:
        touchpoints: the symbols that the seam leans on there.
        supported: the versions, in words.
        problems: settings that KVPP cannot run with there, beyond those of every vLLM.
        compact_obstacles: settings that compact mode cannot run with there, likewise.
        serves_kvpp: whether it has a KVPP of its own, which then serves ``enable_kvpp``.
    """

    touchpoints: tuple[ledger.Touchpoint, ...] = ledger.LEDGER
    supported: str = ledger.SUPPORTED
    problems: Callable[["VllmConfig"], Iterable[str]] = _nothing
    compact_obstacles: Callable[["VllmConfig"], Iterable[str]] = _nothing
    serves_kvpp: Callable[[], bool] = bool  # no

    def verify(self) -> None:
        """Compare the touchpoints with what is installed.

        Raises:
            SeamError: a symbol is missing or looks different.
        """
        ledger.verify(self.touchpoints, self.supported)


_STOCK = Variant()
_VARIANTS = {
    ascend.DEVICE_TYPE: Variant(
        touchpoints=ASCEND_CONFIG_LEDGER,
        supported=SUPPORTED_ASCEND,
        problems=ascend.problems,
        compact_obstacles=ascend.compact_obstacles,
        serves_kvpp=ascend.has_own_kvpp,
    )
}


def variant(device_type: str) -> Variant:
    """The vLLM of a device type: the stock one unless something else is known to run there."""
    return _VARIANTS.get(device_type, _STOCK)
