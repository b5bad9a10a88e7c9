"""The pool's store on Mooncake: a client of a mooncake_master that may lend memory of its own.

Objects live in the memory that clients lend: those of a client that ends are lost, and all are when
the master restarts. A client finds a restarted master again by itself.

Time: while the master is dead each call ends with an error after about five seconds; while it
hangs, after ``MC_RPC_TIMEOUT_MS``. Reads are checked against the object's lease after the last
byte.
"""

import os
import re
import threading
from collections.abc import Sequence
from typing import Any

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.ascend_store.backends.address import check_reachable, parse_address
from kvpp_connect.connectors.ascend_store.backends.base import (
    Buffer,
    GetOutcome,
    PutOutcome,
    StoreError,
)
from kvpp_connect.connectors.ascend_store.backends.guard import ClientGuard
from kvpp_connect.connectors.ascend_store.backends.settings import MooncakeSettings
from kvpp_connect.connectors.mooncake_engine import (
    MooncakeEngine,
    install_hint,
    set_tcp_environment,
)
from kvpp_connect.errors import ConfigError

logger = get_logger(__name__)

_STORE_ENVIRONMENT = {
    # Mooncake waits 30 s for a master that hangs, and tries 20 times to set up a client.
    "MC_RPC_TIMEOUT_MS": "10000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
}

# Mooncake's error codes that mean something to us (types.h of mooncake-store).
_NO_SPACE = -200
_INVALID = -600
_NOT_READY = -703  # somebody is writing it
_NOT_FOUND = -704
_EXISTS = -705
_RPC_FAILED = -900
_RPC_TIMEOUT = -901

_PUTS = {0: PutOutcome.STORED, _EXISTS: PutOutcome.PRESENT, _NO_SPACE: PutOutcome.FULL}
_GETS = {
    _NOT_FOUND: GetOutcome.MISSING,
    _NOT_READY: GetOutcome.MISSING,
    _INVALID: GetOutcome.SHORT,  # sizes and memory are checked before: what is left is its size
}


class MooncakeStore:
    """A ``mooncake.store.MooncakeDistributedStore`` with codes turned into outcomes.

    A put of a key that exists answers STORED like the first one: the first write stays.
    """

    def __init__(
        self,
        settings: MooncakeSettings,
        *,
        host: str,
        segment: bool,
        protocol: str,
        engine: MooncakeEngine | None = None,
    ) -> None:
        """Connect to the master.

        Args:
            settings: where the pool is.
            host: this node's address, unless ``settings`` has another.
            segment: whether to lend memory to the pool.
            protocol: transfer protocol, unless ``settings`` has another.
            engine: transfer engine of this process to share; None: the store makes one.

        Raises:
            ConfigError: mooncake is not installed, there is no master, or it refuses the client.
        """
        self._address = settings.master_server_address
        self._guard = ClientGuard(f"the mooncake store at {self._address}")
        self._one_session = threading.Lock()
        if "://" not in self._address:
            check_reachable(
                parse_address(self._address, "master_server_address"),
                "mooncake_master",
                "start it, or correct master_server_address (environment: MOONCAKE_MASTER)",
            )
        protocol = settings.protocol or (engine.protocol if engine else protocol)
        if engine and engine.protocol != protocol:
            raise ConfigError(
                f"the mooncake store's protocol is {protocol!r}, and the engine that it would "
                f"share uses {engine.protocol!r}; set both to the same"
            )
        module = _load(settings.local_hostname or host, protocol)
        self._store: Any = module.MooncakeDistributedStore()
        size = settings.global_segment_size if segment else 0
        self._connect(settings, host, size, protocol, engine)
        self._same_node = settings.prefer_alloc_in_same_node
        self._replication: Any = module.ReplicateConfig()
        self._replication.replica_num = settings.replica_num
        self._replication.prefer_alloc_in_same_node = self._same_node
        if settings.preferred_segment and size:
            self._replication.preferred_segment = self._store.get_hostname()

    def _connect(
        self,
        settings: MooncakeSettings,
        host: str,
        segment_bytes: int,
        protocol: str,
        engine: MooncakeEngine | None,
    ) -> None:
        # Older releases lack these arguments: they get them only where they change something.
        optional: dict[str, Any] = {}
        if engine:
            optional["engine"] = engine.native_handle
        if settings.tenant_id != "default":
            optional["tenant_id"] = settings.tenant_id
        if settings.enable_ssd_offload:
            optional["enable_ssd_offload"] = True
            optional["ssd_offload_path"] = settings.ssd_offload_path
        hostname = engine.session if engine else settings.local_hostname or host
        try:
            code = self._store.setup(
                hostname,
                settings.metadata_server,
                segment_bytes,
                settings.local_buffer_size,
                protocol,
                settings.device_name,
                self._address,
                **optional,
            )
        except TypeError as error:
            if engine:  # nobody asked for it
                return self._connect(settings, host, segment_bytes, protocol, None)
            raise ConfigError(
                f"this release of mooncake does not know {', '.join(sorted(optional))}; install a "
                "newer one, or leave these settings out"
            ) from error
        if code != 0:
            raise ConfigError(
                f"mooncake refuses this client of the master at {self._address} (code {code}); "
                "check that this is its RPC port, that master and client are of one release, "
                f"that there is memory for {segment_bytes} bytes of segment "
                f"(global_segment_size), and that protocol {protocol!r} works here"
            )
        if engine:
            logger.info("the pool's store shares the transfer engine at %s", engine.session)
        return None

    @property
    def supports_ranges(self) -> bool:
        return True

    @property
    def native(self) -> Any:  # noqa: ANN401 - a class without types
        """Mooncake's own client, for benchmarks."""
        return self._store

    def register(self, memory: Buffer) -> None:
        with self._guard.call():
            code = self._store.register_buffer(memory.address, memory.size)
        if code != 0:
            raise ConfigError(
                f"mooncake refuses to register {memory.size} bytes of host memory (code {code}); "
                "check the locked-memory limit (ulimit -l)"
            )
        self._guard.registered(memory)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        if not keys:
            return []
        with self._guard.call():
            codes = self._checked(self._store.batch_is_exist(list(keys)), len(keys))
        if min(codes) < 0:
            raise StoreError(f"the mooncake master at {self._address} fails (code {min(codes)})")
        return [code == 1 for code in codes]

    def put(self, keys: Sequence[str], sources: Sequence[Buffer]) -> list[PutOutcome]:
        self._guard.check(keys, sources)
        if not keys:
            return []
        addresses = [source.address for source in sources]
        sizes = [source.size for source in sources]
        with self._guard.call():
            if self._same_node:  # batch_put_from refuses this setting
                answer = self._store.batch_put_from_multi_buffers(
                    list(keys), [[a] for a in addresses], [[n] for n in sizes], self._replication
                )
            else:
                answer = self._store.batch_put_from(list(keys), addresses, sizes, self._replication)
            codes = self._checked(answer, len(keys))
        return [_PUTS.get(code, PutOutcome.FAILED) for code in codes]

    def get(self, keys: Sequence[str], targets: Sequence[Buffer]) -> list[GetOutcome]:
        self._guard.check(keys, targets)
        if not keys:
            return []
        with self._guard.call():
            answer = self._store.batch_get_into(
                list(keys), [target.address for target in targets], [t.size for t in targets]
            )
            codes = self._checked(answer, len(keys))
        return [_got(code, target.size) for code, target in zip(codes, targets, strict=True)]

    def get_ranges(
        self, keys: Sequence[str], targets: Sequence[Buffer], offset: int
    ) -> list[GetOutcome]:
        self._guard.check(keys, targets)
        if not keys:
            return []
        # A session, because get_into_ranges neither checks the leases after reading nor asks the
        # master for more than one key at a time. Sessions go by key: one user at a time.
        with self._guard.call(), self._one_session:
            started = self._checked(self._store.batch_get_session_start(list(keys)), len(keys))
            try:
                return self._read_session(keys, targets, offset, started)
            finally:
                self._store.batch_get_session_end(list(keys))

    def _read_session(
        self, keys: Sequence[str], targets: Sequence[Buffer], offset: int, started: list[int]
    ) -> list[GetOutcome]:
        outcomes = [_GETS.get(code, GetOutcome.FAILED) for code in started]
        found = [index for index, code in enumerate(started) if code == 0]
        if not found:
            return outcomes
        answer = self._store.batch_get_into_multi_buffer_ranges(
            [keys[index] for index in found],
            [[targets[index].address] for index in found],
            [[targets[index].size] for index in found],
            [[offset]] * len(found),
        )
        codes = self._checked(answer, len(found))
        for index, code in zip(found, codes, strict=True):
            outcomes[index] = _got(code, targets[index].size)
        return outcomes

    def remove_prefix(self, prefix: str) -> int:
        with self._guard.call():
            code = self._store.remove_by_regex(f"^{re.escape(prefix)}", True)
        if code < 0:
            raise StoreError(
                f"the mooncake master at {self._address} does not remove {prefix!r} (code {code})"
            )
        return code

    def close(self) -> None:
        if self._guard.shut():
            self._store.close()

    def _checked(self, codes: list[int], count: int) -> list[int]:
        """Refuse answers that concern the store as a whole."""
        if len(codes) != count:
            raise StoreError(
                f"mooncake answers {len(codes)} codes for {count} keys: its client of "
                f"{self._address} is not connected"
            )
        lost = next((code for code in codes if code in (_RPC_FAILED, _RPC_TIMEOUT)), None)
        if lost is not None:
            raise StoreError(f"no answer from the mooncake master at {self._address} (code {lost})")
        return codes


def _got(code: int, size: int) -> GetOutcome:
    if code >= 0:
        return GetOutcome.READ if code == size else GetOutcome.SHORT
    return _GETS.get(code, GetOutcome.FAILED)


def _load(host: str, protocol: str) -> Any:  # noqa: ANN401 - a module without types
    """Import mooncake's store, which reads the environment on the way.

    Raises:
        ConfigError: it is not installed.
    """
    if protocol == "tcp":
        set_tcp_environment(host)
    for name, value in _STORE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import mooncake.store
    except ImportError as error:
        raise ConfigError(
            f"cannot load mooncake's store ({error}). {install_hint(protocol)}"
        ) from error
    return mooncake.store
