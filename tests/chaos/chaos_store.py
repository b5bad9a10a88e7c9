"""The pool's store at its worst: a real client, and a share of its calls goes wrong.

Objects that are damaged are really damaged, in the real store, through the same client: read,
removed, and put again with other content. Calls that fail or take their time are made up.
"""

import random
import threading
import time

from chaos_model import LAYERS, PAGE_BYTES
from chaos_spec import LATE_WRITE_S, POOL_LATE_S, POOL_READ_HOLD_S, NodeSpec
from pool_equipment import Memory

from kvpp_connect.connectors.ascend_store import connector, health, loader
from kvpp_connect.connectors.ascend_store.backends.base import (
    Buffer,
    GetOutcome,
    PutOutcome,
    StoreError,
)
from kvpp_connect.connectors.ascend_store.objects import HEADER_BYTES

CALLS = ("get", "put", "put exists", "lookup")
BAD_OBJECTS = (
    "get: object gone",
    "get: object damaged",
    "get: object torn",
    "get: object of other content",
    "get: object too short",
    "get: object too long",
)
BAD_GETS = (
    "get: error",
    "get: late",
    "get: fails",
    "get: fails and writes later",
)
BAD_PUTS = (
    "put: error",
    "put: error after storing",
    "put: late",
    "put: full",
    "put: fails",
    "put exists: error",
    "put exists: late",
)
BAD_LOOKUPS = ("lookup: error", "lookup: late")
SLOW_CALLS = ("put exists: slow", "put: slow", "get: slow", "lookup: slow")
STORE_FAULTS = (*BAD_OBJECTS, *BAD_GETS, *BAD_PUTS, *BAD_LOOKUPS, *SLOW_CALLS)


def hurt_stores(spec: NodeSpec, part: str, noted: list) -> None:
    """Let the stores that this process opens do what the node's description says.

    Args:
        part: which process of the node this is.
        noted: takes what was done, and which objects were not there.
    """
    assert set(spec.store_faults) <= set(STORE_FAULTS), spec.store_faults
    loader.GIVEN_UP_READ_S = POOL_READ_HOLD_S
    # The store is soon tried again, so that more of its calls can fail.
    health._FIRST_PAUSE_S, health._LONGEST_PAUSE_S = 0.1, 2.0  # noqa: SLF001 - no setting
    create_store = connector.create_store

    def create(settings, *, segment, **more):
        store = create_store(settings, segment=segment, **more)
        rng = random.Random(f"{spec.seed} {part}")
        return BadStore(store, spec, rng, noted, is_rank=segment)

    connector.create_store = create


class BadStore:
    """A ``PoolStore`` around a real one."""

    def __init__(self, store, spec, rng, noted, *, is_rank):
        self._store = store
        self._spec = spec
        self._rng = rng
        self._noted = noted
        self._exists_call = "put exists" if is_rank else "lookup"
        self._taken: set[str] = set()  # keys of objects that were removed here
        self._others: list[str] = []  # keys of objects that were read before
        self._desk = Memory(1 << 20)
        self._lock = threading.Lock()  # of the desk
        if is_rank:
            store.register(self._desk.whole)

    @property
    def supports_ranges(self):
        return self._store.supports_ranges

    def register(self, memory):
        self._store.register(memory)

    def close(self):
        self._store.close()

    def exists(self, keys):
        self._hurt_call(self._choose(self._exists_call))
        return self._store.exists(keys)

    def remove_prefix(self, prefix):
        self._taken.add(prefix)
        return self._store.remove_prefix(prefix)

    def put(self, keys, sources):
        fault = self._choose("put")
        if fault in ("put: full", "put: fails"):
            outcome = PutOutcome.FULL if fault == "put: full" else PutOutcome.FAILED
            return self._put_some(fault, outcome, keys, sources)
        if fault == "put: error after storing":
            self._store.put(keys, sources)
        self._hurt_call(fault)
        return self._store.put(keys, sources)

    def get(self, keys, targets):
        return self._get(keys, targets, self._store.get)

    def get_ranges(self, keys, targets, offset):
        def read(some_keys, some_targets):
            return self._store.get_ranges(some_keys, some_targets, offset)

        return self._get(keys, targets, read)

    def _get(self, keys, targets, read):
        fault = self._choose("get")
        victim = self._rng.randrange(len(keys))
        if fault in BAD_OBJECTS:
            if self._hurt_object(fault, keys[victim]):
                self._note(fault)
        elif fault.startswith("get: fails"):
            return self._fail_get(fault, keys, targets, victim, read)
        else:
            self._hurt_call(fault)
        outcomes = read(keys, targets)
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome is GetOutcome.MISSING and key not in self._taken:
                self._noted.append(("seen", "object missing"))
        return outcomes

    def _choose(self, call):
        """What to do to a call."""
        if self._rng.random() >= self._spec.store_rates.get(call, 0.0):
            return ""
        return self._rng.choice([f for f in self._spec.store_faults if f.startswith(f"{call}:")])

    def _note(self, fault):
        # A slow call is no fault: it is there to make room for others.
        self._noted.append(("seen" if fault.endswith("slow") else "fault", f"store {fault}"))

    def _hurt_call(self, fault):
        """Before the call: sleep, or raise."""
        if not fault:
            return
        self._note(fault)
        if fault.endswith("late"):
            time.sleep(POOL_LATE_S)
        elif fault.endswith("slow"):
            time.sleep(self._rng.uniform(*self._spec.store_slow_s))
        else:
            raise StoreError(f"made up: {fault}")

    def _put_some(self, fault, outcome, keys, sources):
        self._note(fault)
        refused = {i for i in range(len(keys)) if self._rng.random() < 0.5}
        taken = [i for i in range(len(keys)) if i not in refused]
        real = self._store.put([keys[i] for i in taken], [sources[i] for i in taken])
        outcomes = dict(zip(taken, real, strict=True))
        return [outcomes.get(i, outcome) for i in range(len(keys))]

    def _fail_get(self, fault, keys, targets, victim, read):
        """One object is not read; its target may be written for a while."""
        self._note(fault)
        if fault == "get: fails and writes later":
            target, noise = targets[victim], self._rng.randbytes(64)

            def write_late():
                time.sleep(self._rng.uniform(0.05, LATE_WRITE_S))
                Memory.write(Buffer(target.address + target.size // 2, 64), noise)

            threading.Thread(target=write_late, daemon=True).start()
        rest = [i for i in range(len(keys)) if i != victim]
        outcomes = read([keys[i] for i in rest], [targets[i] for i in rest])
        return [*outcomes[:victim], GetOutcome.FAILED, *outcomes[victim:]]

    def _hurt_object(self, fault, key):
        """Remove or overwrite an object; answers whether it could be done."""
        size = HEADER_BYTES + PAGE_BYTES * LAYERS // self._spec.ranks
        self._taken.add(key)
        if fault == "get: object gone":
            return self._store.remove_prefix(key) > 0
        with self._lock:
            content = self._read(key, size)
            other = next((k for k in self._others if k != key), None)
            self._others = [key, *self._others[:3]]
            if content is None:
                return False
            match fault:
                case "get: object damaged":
                    at = self._rng.randrange(size)
                    content = content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]
                case "get: object torn":
                    begin = self._rng.randrange(64, size // 2)
                    content = content[:begin] + bytes(size - begin)
                case "get: object of other content":
                    content = self._read(other, size) if other else None
                case "get: object too short":
                    content = content[: size // 2]
                case "get: object too long":
                    content = content + bytes(64)
            if content is None:
                return False
            self._store.remove_prefix(key)
            begin = self._desk.whole.address
            Memory.write(Buffer(begin, len(content)), content)
            [outcome] = self._store.put([key], [Buffer(begin, len(content))])
            return outcome is PutOutcome.STORED

    def _read(self, key, size):
        buffer = Buffer(self._desk.whole.address, size)
        [outcome] = self._store.get([key], [buffer])
        return Memory.read(buffer) if outcome is GetOutcome.READ else None
