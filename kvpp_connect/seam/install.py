"""The two things that are put around vLLM before its configuration is known.

vLLM has no hook that shows a plugin the configuration. The platform's ``check_and_update_config``
is the first function that sees ``additional_config`` while ``worker_cls`` is still open, so it is
wrapped. With KVPP off the wrapper reads settings, refuses wrong ones, and changes nothing. What the
user left open can be told from what the user asked for in ``apply_config_platform_defaults`` only,
which vLLM calls before it fills in its own defaults.
"""

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvpp_connect._log import get_logger
from kvpp_connect.config import KvppConfig, parse_additional_config
from kvpp_connect.errors import ConfigError
from kvpp_connect.platforms.base import PLATFORMS, Platform, select_platform
from kvpp_connect.seam import ascend, multi, settings
from kvpp_connect.seam.variants import variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.platforms import Platform as VllmPlatform

logger = get_logger(__name__)
_MARK = "_kvpp_connect_hook"
KVPP_WORKERS = frozenset(platform.kvpp_worker_cls for platform in PLATFORMS.values())


_always_settles = False


@contextmanager
def settling_defaults(*, always: bool) -> "Iterator[None]":
    """Treat what users leave open as with KVPP on, whether or not their configuration says so.

    Args:
        always: whether to do that; else nothing changes.
    """
    global _always_settles  # vLLM offers no way to hand it down
    before, _always_settles = _always_settles, always
    try:
        yield
    finally:
        _always_settles = before


def install_config_hook() -> None:
    """Wrap the current platform's defaults and its configuration check, once per process."""
    from vllm.platforms import current_platform

    platform_class: Any = type(current_platform)
    original = platform_class.check_and_update_config
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original.__func__)
    def check_and_update_config(cls: "type[VllmPlatform]", vllm_config: "VllmConfig") -> None:
        config = parse_additional_config(vllm_config.additional_config)
        parallel = vllm_config.parallel_config
        chosen = parallel.worker_cls
        if config.enabled and chosen in KVPP_WORKERS:
            # The platform chooses more than the worker where that is open.
            parallel.worker_cls = "auto"
        original.__func__(cls, vllm_config)
        check_connectors(vllm_config)
        if config.enabled:
            enable(vllm_config, config, chosen)

    open_defaults = platform_class.apply_config_platform_defaults

    @functools.wraps(open_defaults.__func__)
    def apply_config_platform_defaults(
        cls: "type[VllmPlatform]", vllm_config: "VllmConfig"
    ) -> None:
        open_defaults.__func__(cls, vllm_config)
        if _always_settles or parse_additional_config(vllm_config.additional_config).enabled:
            variant(vllm_config.device_config.device_type).settle_defaults(vllm_config)

    setattr(check_and_update_config, _MARK, True)
    platform_class.check_and_update_config = classmethod(check_and_update_config)
    platform_class.apply_config_platform_defaults = classmethod(apply_config_platform_defaults)


def check_connectors(vllm_config: "VllmConfig") -> None:
    """Let our connectors check their settings now instead of after the model was loaded.

    What is wrong with a connector as such is left to vLLM, which refuses it a moment later.

    Raises:
        ConfigError: a setting of one of our connectors cannot work.
    """
    transfers = [*_transfers(vllm_config)]
    if not any(_is_named_like_ours(transfer) for transfer in transfers):
        return
    for transfer in filter(_is_named_like_ours, transfers):
        connector = _connector_class(transfer)
        if connector is not None and connector.__module__.startswith("kvpp_connect."):
            connector.check_settings(vllm_config, transfer)
    telling = [str(t.kv_connector) for t in transfers if _tells_of_workers(_connector_class(t))]
    multi.check_handshakes(telling)


def _transfers(vllm_config: "VllmConfig") -> "Iterator[KVTransferConfig]":
    """The configured connector, or those inside a ``MultiConnector``."""
    from vllm.config import KVTransferConfig

    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    if not multi.is_multi(transfer.kv_connector, transfer.kv_connector_module_path):
        yield transfer
        return
    try:
        children = multi.children(transfer.kv_connector_extra_config)
    except ConfigError:
        return
    multi.check_children(children)
    for child in children:
        try:
            yield KVTransferConfig(**child)
        except (TypeError, ValueError):
            continue


def _is_named_like_ours(transfer: "KVTransferConfig") -> bool:
    chosen = multi.Named(str(transfer.kv_connector), transfer.kv_connector_module_path or "")
    return chosen.is_ours


def _connector_class(transfer: "KVTransferConfig") -> Any | None:  # noqa: ANN401 - of any connector
    """The class that vLLM would make; ``None`` where it would refuse."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        return KVConnectorFactory.get_connector_class(transfer)
    except (ValueError, ImportError, AttributeError):
        return None


def _tells_of_workers(connector: Any | None) -> bool:  # noqa: ANN401 - of any connector
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    silent = KVConnectorBase_V1.get_handshake_metadata
    return getattr(connector, "get_handshake_metadata", silent) is not silent


def _check_names(vllm_config: "VllmConfig") -> None:
    for transfer in _transfers(vllm_config):
        connector = _connector_class(transfer)
        if connector is None and not transfer.kv_connector_module_path and ascend.installed():
            raise ConfigError(
                f"enable_kvpp: connector {transfer.kv_connector!r} is not known by its name where "
                "vllm-ascend is installed. Set kv_connector_module_path to "
                f"{multi.CONNECTOR_MODULE!r}"
            )
        if connector is not None and not connector.__module__.startswith("kvpp_connect."):
            raise ConfigError(
                f"enable_kvpp: connector {transfer.kv_connector!r} is the one of "
                f"{connector.__module__}, which has taken the name. Set kv_connector_module_path "
                f"to {multi.CONNECTOR_MODULE!r}"
            )


def enable(vllm_config: "VllmConfig", config: KvppConfig, chosen_worker: str) -> None:
    """Check the deployment and select the KVPP worker.

    Args:
        chosen_worker: ``worker_cls`` as the user gave it, "auto" by default.

    Raises:
        SeamError: this vLLM does not look the way the ledger says.
        ConfigError: the deployment asks for something that KVPP does not support.
    """
    device_type = vllm_config.device_config.device_type
    host = variant(device_type)
    if host.serves_kvpp():
        ascend.leave_to_host(config)
        logger.info("KVPP: vllm-ascend serves the layers; connectors take ownership from its plan")
        return
    host.verify()
    settings.check_supported(vllm_config)
    _check_names(vllm_config)
    platform = select_platform(device_type)
    _check_worker(vllm_config, platform, chosen_worker)
    vllm_config.parallel_config.worker_cls = platform.kvpp_worker_cls
    host.settle(vllm_config)
    choice = settings.choose_mode(vllm_config, config)
    if choice.mode == "compact":
        settings.scratch_size(vllm_config, config)  # refuses what cannot work
        scheduler = vllm_config.scheduler_config
        scheduler.scheduler_cls = settings.KVPP_SCHEDULERS[bool(scheduler.async_scheduling)]
    logger.debug("KVPP on: mode %s, worker %s", choice.mode, platform.kvpp_worker_cls)


def _check_worker(vllm_config: "VllmConfig", platform: Platform, chosen: str) -> None:
    """Refuse a worker that KVPP's cannot stand for, be it the user's choice or the platform's."""
    if chosen not in ("auto", platform.worker_cls, platform.kvpp_worker_cls):
        raise ConfigError(
            f"enable_kvpp: worker_cls is {chosen!r}; KVPP needs a worker of its own. "
            "Remove --worker-cls, or turn enable_kvpp off"
        )
    settled = vllm_config.parallel_config.worker_cls
    if settled not in ("auto", platform.worker_cls, platform.kvpp_worker_cls):
        raise ConfigError(
            f"enable_kvpp: this deployment runs on the worker {settled!r}, for which KVPP has none "
            "to put in its place. Turn enable_kvpp off, or what asks for that worker"
        )
