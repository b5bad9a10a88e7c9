"""One rank's device on the simulated machine: streams, events, and torch's work that runs late."""

from contextlib import contextmanager
from functools import cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class SimulatedDevice:
    """The model's stream, which several devices of a rank share, and a transfer stream.

    ``role_of`` says what the rank is, owner or receiver, in the bundle that an event is about. This
    names the edges, together with what the host is ``doing``.
    """

    def __init__(self, machine, name, compute, *, makes_tensors=False):
        """``makes_tensors`` allows new tensors on the transfer stream."""
        self.machine = machine
        self.name = name
        self.compute = compute
        self.transfer = machine.stream(f"{name} transfer")
        self.makes_tensors = makes_tensors
        self.kept = []  # new tensors, so that no two lie at one address
        self.role_of = lambda kind: ""
        self.events = 0

    @property
    def current(self):
        return self.machine.running.current or self.compute

    def event(self):
        self.events += 1
        return SimulatedEvent(self)

    @contextmanager
    def transfers(self):
        """Also queues what torch is asked to write, instead of doing it at once."""
        host = self.machine.running
        before, host.current = host.current, self.transfer
        with _QueueWrites(self):
            yield
        host.current = before

    def finish_transfers(self):
        """The host owes this wait: callers return at once after it, and it is made good there."""
        edge = {"gather": "stored", "scatter": "loaded"}[self.machine.running.doing]
        if self.machine.keeps(edge):
            self.machine.running.owes = self.transfer.mark()

    def queue(self, name, run, **touches):
        """Give work to the current stream."""
        return self.current.add(self.machine.operation(f"{self.name} {name}", run, **touches))

    def order(self, edge, stream, before):
        """Let later work of ``stream`` run after an operation, unless that edge is left out."""
        if self.machine.keeps(edge) and before is not None:
            stream.waits.append(before)


class SimulatedEvent:
    def __init__(self, device):
        self._device = device
        self._mark = None
        self._kind = ""

    def record(self):
        device = self._device
        self._mark = device.current.mark()
        kinds = {"arm": "ready", "release": "drained", "mark": "marked"}
        transfers = device.current is device.transfer
        self._kind = "arrived" if transfers else kinds[device.machine.running.doing]

    def wait(self):
        if self._mark is None:
            return
        edge = self._kind
        if edge in ("drained", "arrived"):
            edge += f", {self._device.role_of(edge)}"
        self._device.order(edge, self._device.current, self._mark)


class _QueueWrites(TorchDispatchMode):
    """Turns torch's writing operators into work on the current stream; views stay views."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names, written, makes = _facts(operator)
        if not written and not makes:
            return operator(*args, **kwargs)
        named = dict(zip(names, args, strict=False)) | kwargs
        targets = [named[name] for name in written if name in named]
        name = str(operator)
        if targets:
            self._queue(name, named, targets[0], lambda: operator(*args, **kwargs))
            return targets[0]
        if not self._device.makes_tensors:
            raise NotImplementedError(f"{name} makes a new tensor on the transfer stream")
        made = operator(*args, **kwargs)
        self._device.kept.append(made)
        late = made.copy_
        made.fill_(0)
        self._queue(name, named, made, lambda: late(operator(*args, **kwargs)))
        return made

    def _queue(self, name, named, target, run):
        reads = [v for v in named.values() if isinstance(v, torch.Tensor) and v is not target]
        touches = {"reads": reads, "writes": [target]}
        if name.startswith("aten.index_"):  # which rows it touches is known when it runs
            cache, index = named["self"], named["index"]
            rows = lambda: [cache[i] for i in index.tolist()]  # noqa: E731
            if target is cache:
                touches["writes"] = rows
            else:
                touches["reads"] = lambda: [index, *rows()]
        self._device.queue(name, run, **touches)


@cache
def _facts(operator):
    """Names of an operator's arguments, of those that it writes, and whether it makes tensors."""
    schema = operator._schema  # noqa: SLF001 - the only way to learn what it writes
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    makes = not all(result.alias_info is not None for result in schema.returns)
    return [a.name for a in schema.arguments], written, makes
