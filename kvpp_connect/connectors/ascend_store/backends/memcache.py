"""The pool's store on memcache_hybrid: a client of its MetaService that may lend memory of its own.

Objects live in the memory that clients lend. Reads need the stored object's exact size, so parts
cannot be read. When a provider ends its objects vanish at once; the MetaService may restart.
"""

from collections.abc import Sequence
from typing import Any

from kvpp_connect.connectors.ascend_store.backends.address import check_reachable, parse_address
from kvpp_connect.connectors.ascend_store.backends.base import (
    Buffer,
    GetOutcome,
    PutOutcome,
    StoreError,
)
from kvpp_connect.connectors.ascend_store.backends.guard import ClientGuard
from kvpp_connect.connectors.ascend_store.backends.settings import MemcacheSettings
from kvpp_connect.errors import ConfigError

# Directions of copies: memcache_hybrid's G2H and H2G, pool to host and back.
_POOL_TO_HOST = 2
_HOST_TO_POOL = 3

# Codes seen with release 1.3.0.
_REFUSED = -1  # of a put: no room; of a get: any failure
_UNAVAILABLE = (-3000, -3014)  # no MetaService; -3000 also for arguments, which are checked before
_NOT_FOUND = -3007
_WRONG_SIZE = -3012

_PUTS = {0: PutOutcome.STORED, _REFUSED: PutOutcome.FULL}
_GETS = {0: GetOutcome.READ, _NOT_FOUND: GetOutcome.MISSING, _WRONG_SIZE: GetOutcome.SHORT}


class MemcacheStore:
    """A ``memcache_hybrid.DistributedObjectStore`` with codes turned into outcomes.

    A put of a key that exists answers STORED like the first one: the first write stays.
    """

    def __init__(self, settings: MemcacheSettings, *, segment: bool, device_index: int) -> None:
        """Connect to the MetaService.

        Args:
            settings: where the pool is.
            segment: whether to lend memory to the pool; a client that does not only looks up.
            device_index: accelerator of this process.

        Raises:
            ConfigError: the package is not installed, there is no MetaService, or it refuses.
        """
        self._url = settings.meta_service_url
        self._guard = ClientGuard(f"the memcache store at {self._url}")
        # Its client waits for both without end.
        for key, url in (
            ("meta_service_url", settings.meta_service_url),
            ("config_store_url", settings.config_store_url),
        ):
            check_reachable(
                parse_address(url.removeprefix("tcp://"), key),
                "memcache MetaService",
                f"start it, or correct {key} (also in the file that MMC_LOCAL_CONFIG_PATH names)",
            )
        try:
            import memcache_hybrid  # pyright: ignore[reportMissingImports] - optional
        except ImportError as error:
            raise ConfigError(
                f"cannot load the memcache client ({error}). Install memcache-hybrid "
                "(pip install kvpp-connect[memcache])"
            ) from error
        self._store: Any = memcache_hybrid.DistributedObjectStore()
        config = local_config(memcache_hybrid.LocalConfig(), settings, segment=segment)
        for step, code in (
            ("set-up", lambda: self._store.setup(config)),
            ("start", lambda: self._store.init(device_index, segment)),
        ):
            if (answer := code()) != 0:
                raise ConfigError(
                    f"memcache refuses the {step} of this client of {self._url} (code {answer}); "
                    f"check protocol {settings.protocol!r}, dram_size {settings.dram_size}, "
                    f"world_size {settings.world_size}, and the driver of accelerator "
                    f"{device_index}"
                )

    @property
    def supports_ranges(self) -> bool:
        return False

    def register(self, memory: Buffer) -> None:
        with self._guard.call():
            code = self._store.register_buffer(memory.address, memory.size)
        if code != 0:
            raise ConfigError(
                f"memcache refuses to register {memory.size} bytes of host memory (code {code}); "
                "check the locked-memory limit (ulimit -l)"
            )
        self._guard.registered(memory)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        if not keys:
            return []
        with self._guard.call():
            codes = self._checked(self._store.batch_is_exist(list(keys)), len(keys))
        if min(codes) < 0:
            raise StoreError(f"the memcache store at {self._url} fails (code {min(codes)})")
        return [code == 1 for code in codes]

    def put(self, keys: Sequence[str], sources: Sequence[Buffer]) -> list[PutOutcome]:
        self._guard.check(keys, sources)
        if not keys:
            return []
        addresses, sizes = [s.address for s in sources], [s.size for s in sources]
        with self._guard.call():
            answer = self._store.batch_put_from(list(keys), addresses, sizes, _HOST_TO_POOL)
            codes = self._checked(answer, len(keys))
        return [_PUTS.get(code, PutOutcome.FAILED) for code in codes]

    def get(self, keys: Sequence[str], targets: Sequence[Buffer]) -> list[GetOutcome]:
        self._guard.check(keys, targets)
        if not keys:
            return []
        addresses, sizes = [t.address for t in targets], [t.size for t in targets]
        with self._guard.call():
            answer = self._store.batch_get_into(list(keys), addresses, sizes, _POOL_TO_HOST)
            codes = self._checked(answer, len(keys))
        return [_GETS.get(code, GetOutcome.FAILED) for code in codes]

    def get_ranges(
        self, keys: Sequence[str], targets: Sequence[Buffer], offset: int
    ) -> list[GetOutcome]:
        """Not possible here; see ``supports_ranges``. No argument is used."""
        raise AssertionError("a memcache store reads whole objects only")

    def remove_prefix(self, prefix: str) -> int:
        """Nothing: the client cannot list keys. ``prefix`` is not used."""
        with self._guard.call():
            return 0

    def close(self) -> None:
        if self._guard.shut():
            self._store.close()

    def _checked(self, codes: list[int], count: int) -> list[int]:
        """Refuse answers that concern the store as a whole."""
        lost = next((code for code in codes if code in _UNAVAILABLE), None)
        if lost is not None:
            raise StoreError(f"no answer from the memcache MetaService at {self._url} ({lost})")
        if len(codes) != count:
            raise StoreError(f"the store at {self._url} answers {len(codes)} of {count} keys")
        return codes


def local_config(config: Any, settings: MemcacheSettings, *, segment: bool) -> Any:  # noqa: ANN401 - of memcache
    """Fill memcache's ``LocalConfig``; what its file sets beside our settings comes first.

    Raises:
        ConfigError: the file sets what this release does not know, or to a value of another type.
    """
    for name, text in settings.options:
        default = getattr(config, name, None)
        try:
            if isinstance(default, bool):
                value = {"true": True, "false": False}[text.lower()]
            elif default is None:
                raise ConfigError(f"this release of memcache-hybrid has no setting {name}")
            else:
                value = type(default)(text)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"memcache's setting {name} is {text!r}; expected {type(default).__name__}"
            ) from error
        setattr(config, name, value)
    config.meta_service_url = settings.meta_service_url
    config.config_store_url = settings.config_store_url
    config.protocol = settings.protocol
    config.dram_size = str(settings.dram_size if segment else 0)
    # The same on all ranks, also on those that lend nothing.
    config.max_dram_size = str(settings.max_dram_size or settings.dram_size)
    config.world_size = settings.world_size
    config.client_timeout_seconds = settings.client_timeout_seconds
    config.log_level = settings.log_level
    return config
