"""``kv_connector_extra_config`` of AscendStoreConnector to one frozen object."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvpp_connect.config import parse_bool, parse_positive_seconds, reject_unknown_keys
from kvpp_connect.connectors.ascend_store.backends.settings import (
    BACKENDS,
    StoreSettings,
    parse_store_settings,
)
from kvpp_connect.errors import ConfigError

LoadMode = Literal["async", "sync", "layerwise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Settings of AscendStoreConnector.

    Attributes:
        backend: the store.
        store: the store's own settings.
        loads: whether this node loads from the pool.
        puts: whether it stores into it.
        load_mode: "async": a request waits until its blocks are there, others run; "sync": the step
            waits for them; "layerwise": each layer waits for its own.
        keep_partial: whether the tokens behind a prompt's last full block are stored as well.
        namespace: engines with another one share nothing.
        host: address of this node for the store; empty: vLLM's own choice (VLLM_HOST_IP).
        lookup_timeout_s: seconds after which a prompt is computed instead of looked up further.
        load_timeout_s: seconds after which a load counts as failed and is computed.
        staging_bytes: memory of each rank through which objects are put, and as much again through
            which they are loaded.
        verify: whether each object's seal is checked before it is used.
    """

    backend: str = "mooncake"
    store: StoreSettings
    loads: bool = True
    puts: bool = True
    load_mode: LoadMode = "async"
    keep_partial: bool = False
    namespace: str = ""
    host: str = ""
    lookup_timeout_s: float = 1.0
    load_timeout_s: float = 10.0
    staging_bytes: int = 64 << 20
    verify: bool = True


_WHERE = "kv_connector_extra_config"
_IGNORED = ("lookup_rpc_port", "mooncake_rpc_port")
_BOOLS = (
    "load_async",
    "use_layerwise",
    "consumer_is_to_put",
    "consumer_is_to_load",
    "discard_partial_chunks",
    "verify",
)
_SECONDS = ("lookup_timeout_s", "load_timeout_s")
_OWN_KEYS = {"backend", "namespace", "host", "staging_bytes", *_IGNORED, *_BOOLS, *_SECONDS}
_LEAST_STAGING_BYTES = 1 << 20


def parse_extra_config(extra: Mapping[str, Any], kv_role: str = "kv_both") -> PoolConfig:
    """Read and check the settings of a node with the given ``kv_role``.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or range, settings that exclude each
            other, or a store's configuration that cannot be read.
    """
    backend = extra.get("backend", "mooncake")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ConfigError(f"{_WHERE}.backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    store_keys = BACKENDS[backend].plain_keys
    where = f"{_WHERE} of AscendStoreConnector with backend {backend}"
    reject_unknown_keys(extra, _OWN_KEYS | store_keys, where)
    flags = {name: parse_bool(extra[name], f"{_WHERE}.{name}") for name in _BOOLS if name in extra}
    seconds = {
        name: parse_positive_seconds(extra[name], f"{_WHERE}.{name}")
        for name in _SECONDS
        if name in extra
    }
    for name in ("namespace", "host"):
        if not isinstance(extra.get(name, ""), str):
            raise ConfigError(f"{_WHERE}.{name} is {extra[name]!r}; expected a string")
    is_consumer = kv_role == "kv_consumer"
    return PoolConfig(
        backend=backend,
        store=parse_store_settings(backend, {k: extra[k] for k in extra if k in store_keys}),
        loads=not is_consumer or flags.get("consumer_is_to_load", True),
        puts=not is_consumer or flags.get("consumer_is_to_put", False),
        load_mode=_load_mode(flags),
        keep_partial=not flags.get("discard_partial_chunks", True),
        namespace=extra.get("namespace", ""),
        host=extra.get("host", ""),
        staging_bytes=_staging_bytes(extra),
        verify=flags.get("verify", True),
        **seconds,
    )


def _load_mode(flags: Mapping[str, bool]) -> LoadMode:
    if not flags.get("use_layerwise", False):
        return "async" if flags.get("load_async", True) else "sync"
    if flags.get("load_async", False):
        raise ConfigError(
            f"{_WHERE}: use_layerwise loads while the step runs, load_async before it; set one of "
            "them"
        )
    return "layerwise"


def _staging_bytes(extra: Mapping[str, Any]) -> int:
    value = extra.get("staging_bytes", PoolConfig.__dataclass_fields__["staging_bytes"].default)
    if isinstance(value, bool) or not isinstance(value, int) or value < _LEAST_STAGING_BYTES:
        raise ConfigError(
            f"{_WHERE}.staging_bytes is {value!r}; expected at least {_LEAST_STAGING_BYTES} bytes"
        )
    return value
