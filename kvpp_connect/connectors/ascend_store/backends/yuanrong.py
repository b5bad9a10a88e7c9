"""The pool's store on openyuanrong-datasystem: a client of the datasystem worker on this node.

Objects live in the workers' shared memory, so no client lends any. Reading and storing are one copy
between that memory and ours. The worker evicts the oldest objects when it is full.

The client holds Python's global lock while it waits for the worker: one that hangs stops the whole
process for ``request_timeout_ms``. So after a call without an answer no call is tried for a while.
"""

import ctypes
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from kvpp_connect.connectors.ascend_store.backends.address import check_reachable, parse_address
from kvpp_connect.connectors.ascend_store.backends.base import (
    Buffer,
    GetOutcome,
    PutOutcome,
    StoreError,
)
from kvpp_connect.connectors.ascend_store.backends.guard import ClientGuard
from kvpp_connect.connectors.ascend_store.backends.settings import YuanrongSettings
from kvpp_connect.errors import ConfigError

_T = TypeVar("_T")

# The client is documented for fewer than 2,000 keys at a time, and makes room for a whole call.
_CALL_KEYS = 1000
_CALL_BYTES = 64 << 20
_PAUSE_S = 5.0

_CODE = re.compile(r"code: \[([^\]]*)\]")
_NOT_FOUND = "Key not found"
_NO_MEMORY = "Out of memory"


class _CallError(Exception):
    """A call that the client refused, with the code that its message begins with."""

    def __init__(self, error: RuntimeError) -> None:
        match = _CODE.search(str(error))
        self.code = match[1] if match else ""
        super().__init__(str(error).partition("\n")[0])


class YuanrongStore:
    """A ``KVClient`` with errors turned into outcomes."""

    def __init__(self, settings: YuanrongSettings) -> None:
        """Connect to the worker.

        Raises:
            ConfigError: the package is not installed, or there is no worker.
        """
        self._worker = settings.worker_addr
        self._guard = ClientGuard(f"the yuanrong store at {self._worker}")
        self._silent_until = 0.0
        address = parse_address(self._worker, "worker_addr")
        remedy = "start it with dscli, or correct worker_addr (environment: DS_WORKER_ADDR)"
        check_reachable(address, "datasystem worker", remedy)
        module = _load()
        self._evictable = module.WriteMode.NONE_L2_CACHE_EVICT
        self._client: Any = module.KVClient(
            address.host,
            address.port,
            connect_timeout_ms=settings.connect_timeout_ms,
            req_timeout_ms=settings.request_timeout_ms,
            enable_exclusive_connection=settings.enable_exclusive_connection,
        )
        try:
            self._client.init()
        except RuntimeError as error:
            raise ConfigError(
                f"the datasystem worker at {address} refuses this client "
                f"({_CallError(error)}); {remedy}"
            ) from error

    @property
    def supports_ranges(self) -> bool:
        return True

    def register(self, memory: Buffer) -> None:
        """Remember the memory; the client copies from and to any."""
        self._guard.registered(memory)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        found: list[bool] = []
        with self._guard.call():
            for part in _parts(keys):
                try:
                    found += self._ask(lambda part=part: self._client.exist(list(keys[part])))
                except _CallError as error:
                    raise StoreError(f"the worker at {self._worker} fails: {error}") from error
        return found

    def put(self, keys: Sequence[str], sources: Sequence[Buffer]) -> list[PutOutcome]:
        self._guard.check(keys, sources)
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        with self._guard.call():
            # A put would replace an object that others may count on, and cost a copy.
            there = self.exists(list(first))
            outcomes = dict.fromkeys(first, PutOutcome.PRESENT)
            absent = [i for i, present in zip(first.values(), there, strict=True) if not present]
            for part in _parts([sources[index] for index in absent]):
                names = [keys[index] for index in absent[part]]
                outcome = self._put(names, [sources[index] for index in absent[part]])
                outcomes.update(dict.fromkeys(names, outcome))
        return [outcomes[key] for key in keys]

    def _put(self, keys: list[str], sources: list[Buffer]) -> PutOutcome:
        """Store absent objects: all of them, or none counts as stored."""
        try:
            slots = self._ask(
                lambda: self._client.mcreate(keys, [s.size for s in sources], self._evictable)
            )
            for slot, source in zip(slots, sources, strict=True):
                target = np.frombuffer(slot.MutableData(), np.uint8)
                if target.size != source.size:
                    return PutOutcome.FAILED
                ctypes.memmove(target.ctypes.data, source.address, source.size)
            self._ask(lambda: self._client.mset_buffer(slots))
        except _CallError as error:
            return PutOutcome.FULL if error.code == _NO_MEMORY else PutOutcome.FAILED
        return PutOutcome.STORED

    def get(self, keys: Sequence[str], targets: Sequence[Buffer]) -> list[GetOutcome]:
        return self._read(keys, targets, None)

    def get_ranges(
        self, keys: Sequence[str], targets: Sequence[Buffer], offset: int
    ) -> list[GetOutcome]:
        return self._read(keys, targets, offset)

    def _read(
        self, keys: Sequence[str], targets: Sequence[Buffer], offset: int | None
    ) -> list[GetOutcome]:
        self._guard.check(keys, targets)
        outcomes: list[GetOutcome] = []
        with self._guard.call():
            for part in _parts(targets):
                wanted = list(keys[part])
                try:
                    found = self._ask(lambda wanted=wanted: self._client.get_buffers(wanted))
                except _CallError as error:
                    missing = error.code == _NOT_FOUND  # said when not one of them is there
                    outcome = GetOutcome.MISSING if missing else GetOutcome.FAILED
                    outcomes += [outcome] * len(wanted)
                    continue
                # Shared memory: it stays as it is while ``found`` refers to it.
                pairs = zip(found, targets[part], strict=True)
                outcomes += [_copy_out(view, target, offset) for view, target in pairs]
        return outcomes

    def remove_prefix(self, prefix: str) -> int:
        """Nothing: the client cannot list keys. ``prefix`` is not used."""
        with self._guard.call():
            return 0

    def close(self) -> None:
        if self._guard.shut():
            self._client = None  # it has no close of its own

    def _ask(self, call: Callable[[], _T]) -> _T:
        """Call the client.

        Raises:
            StoreError: the worker does not answer, or did not a moment ago.
            _CallError: it answers with an error.
        """
        if time.monotonic() < self._silent_until:
            raise StoreError(f"the datasystem worker at {self._worker} did not answer just now")
        try:
            return call()
        except RuntimeError as error:
            failure = _CallError(error)
            if failure.code.startswith("RPC"):
                self._silent_until = time.monotonic() + _PAUSE_S
                raise StoreError(
                    f"no answer from the datasystem worker at {self._worker}: {failure}"
                ) from error
            raise failure from error


def _copy_out(view: Any, target: Buffer, offset: int | None) -> GetOutcome:  # noqa: ANN401 - of yr
    if view is None:
        return GetOutcome.MISSING
    source = np.frombuffer(view, np.uint8)
    end = target.size + (offset or 0)
    if source.size < end or (offset is None and source.size != end):
        return GetOutcome.SHORT
    ctypes.memmove(target.address, source.ctypes.data + (offset or 0), target.size)
    return GetOutcome.READ


def _parts(items: Sequence[str] | Sequence[Buffer]) -> Iterator[slice]:
    """Cuts into calls that the client can take; buffers also by bytes."""
    start, held = 0, 0
    for index, item in enumerate(items):
        size = item.size if isinstance(item, Buffer) else 0
        if index > start and (index - start == _CALL_KEYS or held + size > _CALL_BYTES):
            yield slice(start, index)
            start, held = index, 0
        held += size
    if start < len(items):
        yield slice(start, len(items))


def _load() -> Any:  # noqa: ANN401 - a module without types
    """Import the client, with its libraries for itself.

    It shows its own glog to all libraries that are loaded later: Mooncake's, which has another
    glog, crashes on that. A process may have both, for P/D and for the pool.

    Raises:
        ConfigError: it is not installed.
    """
    shown_to_all = ctypes.RTLD_GLOBAL
    ctypes.RTLD_GLOBAL = ctypes.RTLD_LOCAL
    try:
        import yr.datasystem  # pyright: ignore[reportMissingImports] - optional
    except ImportError as error:
        raise ConfigError(
            f"cannot load the yuanrong client ({error}). Install openyuanrong-datasystem "
            "(pip install kvpp-connect[yuanrong])"
        ) from error
    finally:
        ctypes.RTLD_GLOBAL = shown_to_all
    return yr.datasystem
