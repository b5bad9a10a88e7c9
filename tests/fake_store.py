"""A store in this process's memory that fails as it is told."""

import ctypes
import re
import threading
from collections import Counter

from kvpp_connect.connectors.ascend_store.backends.base import (
    MAX_KEY_LENGTH,
    GetOutcome,
    PutOutcome,
    StoreError,
)

_KEY = re.compile(r"[A-Za-z0-9\-_:@#]+")


class FakePool:
    """What the clients of one pool share.

    Attributes:
        objects: bytes by key.
        down: every call raises StoreError.
        full: every new object is refused.
        failing: keys whose puts and gets answer FAILED.
    """

    def __init__(self):
        self.objects = {}
        self.down = False
        self.full = False
        self.failing = set()
        self.lock = threading.Lock()

    def lose(self, keys):
        """Drop objects, as an eviction does."""
        for key in keys:
            self.objects.pop(key, None)

    def corrupt(self, key):
        """Flip the bits of an object's first byte."""
        content = self.objects[key]
        self.objects[key] = bytes([content[0] ^ 0xFF]) + content[1:]

    def shorten(self, key):
        """Take an object's last byte."""
        self.objects[key] = self.objects[key][:-1]


class FakeStore:
    """One client of a FakePool.

    Attributes:
        pool: what it stores in; shared with other clients if it was given.
        calls: how often each method was called.
        keys: how many keys each method was called with.
        ranges: what ``supports_ranges`` answers.
        hold: methods by name that wait for ``release``.
        waiting: set while a call waits.
    """

    def __init__(self, pool=None, *, ranges=True):
        self.pool = pool or FakePool()
        self.calls = Counter()
        self.keys = Counter()
        self.ranges = ranges
        self.hold = set()
        self.waiting = threading.Event()
        self._released = threading.Event()
        self._memory = []
        self._closed = False

    def block(self, *methods):
        """Let calls of these methods wait until ``release``."""
        self._released.clear()
        self.hold = set(methods)

    def release(self):
        self.hold = set()
        self._released.set()

    @property
    def supports_ranges(self):
        return self.ranges

    def register(self, memory):
        self._enter("register", ())
        self._memory.append(memory)

    def exists(self, keys):
        self._enter("exists", keys)
        return [key in self.pool.objects for key in keys]

    def put(self, keys, sources):
        self._enter("put", keys, sources)
        return [self._put(key, source) for key, source in zip(keys, sources, strict=True)]

    def _put(self, key, source):
        with self.pool.lock:
            if key in self.pool.failing:
                return PutOutcome.FAILED
            if key in self.pool.objects:
                return PutOutcome.PRESENT
            if self.pool.full:
                return PutOutcome.FULL
            self.pool.objects[key] = ctypes.string_at(source.address, source.size)
            return PutOutcome.STORED

    def get(self, keys, targets):
        self._enter("get", keys, targets)
        return [self._get(key, target) for key, target in zip(keys, targets, strict=True)]

    def get_ranges(self, keys, targets, offset):
        assert self.ranges, "this store reads whole objects only"
        self._enter("get_ranges", keys, targets)
        return [self._get(key, target, offset) for key, target in zip(keys, targets, strict=True)]

    def _get(self, key, target, offset=None):
        content = self.pool.objects.get(key)
        if content is None:
            return GetOutcome.MISSING
        if key in self.pool.failing:
            return GetOutcome.FAILED
        part = content if offset is None else content[offset : offset + target.size]
        if len(part) != target.size:
            return GetOutcome.SHORT
        ctypes.memmove(target.address, part, target.size)
        return GetOutcome.READ

    def remove_prefix(self, prefix):
        self._enter("remove_prefix", ())
        with self.pool.lock:
            found = [key for key in self.pool.objects if key.startswith(prefix)]
            self.pool.lose(found)
        return len(found)

    def close(self):
        self.calls["close"] += 1
        self._closed = True

    def _enter(self, method, keys, buffers=()):
        with self.pool.lock:
            self.calls[method] += 1
            self.keys[method] += len(keys)
        if method in self.hold:
            self.waiting.set()
            assert self._released.wait(60), f"nobody released {method}"
        if self._closed or self.pool.down:
            raise StoreError("the fake store is closed" if self._closed else "the pool is down")
        for key in keys:
            assert _KEY.fullmatch(key), f"no store takes the key {key!r}"
            assert len(key) <= MAX_KEY_LENGTH, f"no store takes so long a key: {key!r}"
        for buffer in buffers:
            assert any(
                known.address <= buffer.address
                and buffer.address + buffer.size <= known.address + known.size
                for known in self._memory
            ), f"{buffer} was not registered"
