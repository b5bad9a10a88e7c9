"""A machine of several ranks whose devices run late, in any order that their events allow.

Work is queued on virtual streams and done when a seeded scheduler picks it. A stream keeps its
order, a wait keeps to the mark that the event had when it was called, and nothing else orders work:
streams, also those of different ranks, fall behind each other as much as the seed likes.

Two detectors watch. The model on top checks the bytes that it reads. ``Shadow`` knows for every
byte who wrote and read it last, and asks whether the events order each new access after them, which
holds or fails for all schedules alike, not only for the one that is run.
"""

from collections import deque
from contextlib import contextmanager
from random import Random

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TRANSFER_PIECES = 3


class RaceError(AssertionError):
    """Two accesses to a byte, one of them a write, that no event orders."""


class Operation:
    """A piece of work: ``run`` is called once, after everything in ``after`` is done.

    ``reads`` and ``writes`` are the tensors that it touches. ``done_before`` is a bit mask of the
    operations that the events order before it.
    """

    def __init__(self, number, name, run, after, reads=(), writes=()):
        self.number = number
        self.name = name
        self.run = run
        self.after = after
        self.reads = reads
        self.writes = writes
        self.done = False
        self.done_before = 0


class Host:
    """The thread that queues one rank's work, after the operation that it waited for last."""

    def __init__(self):
        self.waited_for = None


class Stream:
    def __init__(self, name, host):
        self.name = name
        self.host = host
        self.queue = deque()
        self.last = None


class Machine:
    """The scheduler and all streams."""

    def __init__(self, seed, *, find_races=True):
        self._random = Random(f"machine {seed}")
        self._streams = []
        self._speeds = []
        self._next_mood = 0
        self._operations = 0
        self._shadow = Shadow() if find_races else None
        self.steps = 0

    def stream(self, name, host):
        self._streams.append(Stream(name, host))
        return self._streams[-1]

    def operation(self, name, run=lambda: None, after=(), reads=(), writes=()):
        self._operations += 1
        return Operation(self._operations, name, run, list(after), reads, writes)

    def queue(self, stream, operation):
        operation.after += filter(None, (stream.last, stream.host.waited_for))
        stream.queue.append(operation)
        stream.last = operation
        return operation

    def step(self):
        """Run one operation; says whether there was one that could."""
        if self.steps >= self._next_mood:  # now and then other streams are the slow ones
            self._next_mood = self.steps + self._random.choice((20, 100, 500))
            self._speeds = [self._random.choice((0.001, 0.1, 1)) for _ in self._streams]
        ready = [
            (stream, speed)
            for stream, speed in zip(self._streams, self._speeds, strict=True)
            if stream.queue and all(before.done for before in stream.queue[0].after)
        ]
        if not ready:
            return False
        streams, speeds = zip(*ready, strict=True)
        self._run(self._random.choices(streams, speeds)[0].queue.popleft())
        self.steps += 1
        return True

    def some_steps(self):
        for _ in range(self._random.choice((0, 0, 1, 5, 50))):
            self.step()

    def run_until(self, operation):
        while not operation.done:
            if not self.step():
                raise AssertionError(f"deadlock: {operation.name} never runs; {self._stuck()}")

    def run_all(self):
        while self.step():
            pass
        assert not any(stream.queue for stream in self._streams), f"deadlock: {self._stuck()}"

    def _run(self, operation):
        for before in operation.after:
            operation.done_before |= before.done_before | 1 << before.number
        if self._shadow is not None:
            self._shadow.check(operation)
        operation.run()
        operation.run, operation.done = None, True

    def _stuck(self):
        heads = [stream.queue[0] for stream in self._streams if stream.queue]
        return [(head.name, [b.name for b in head.after if not b.done]) for head in heads]


class Shadow:
    """Last writer and later readers of every byte."""

    def __init__(self):
        self._writer = {}
        self._readers = {}

    def check(self, operation):
        for address in _addresses(operation.reads):
            self._ordered(self._writer.get(address), operation, "wrote", "reads")
            self._readers.setdefault(address, []).append(operation)
        for address in _addresses(operation.writes):
            self._ordered(self._writer.get(address), operation, "wrote", "writes")
            for reader in self._readers.pop(address, ()):
                self._ordered(reader, operation, "read", "writes")
            self._writer[address] = operation

    def _ordered(self, before, operation, did, does):
        if before is None or before is operation or operation.done_before >> before.number & 1:
            return
        raise RaceError(f"{before.name} {did} what {operation.name} {does} in no order")


def _addresses(tensors):
    for tensor in tensors:
        assert tensor.is_contiguous()
        start = tensor.data_ptr()
        yield from range(start, start + tensor.numel() * tensor.element_size())


class SimulatedDevice:
    """One rank's device: the model's stream, the transfer stream and the transport's own one.

    Whoever drives the engine sets ``calling``, the engine's method, and ``roles``, what the rank is
    in the bundle that the compute stream waits for and in the one that is transferred next. They
    name the edges. ``without`` is the edge that is left out.
    """

    def __init__(self, machine, rank, without=None):
        self.machine = machine
        self.name = f"rank {rank}"
        self.host = Host()
        self.compute = machine.stream(f"{self.name} compute", self.host)
        self.transfer = machine.stream(f"{self.name} transfer", self.host)
        self.network = machine.stream(f"{self.name} network", self.host)
        self.current = self.compute
        self.without = without
        self.edges = set()
        self.calling = ""
        self.roles = {}
        self.events = 0

    def event(self):
        self.events += 1
        return SimulatedEvent(self)

    @contextmanager
    def transfers(self):
        """Also queues what torch is asked to write, instead of doing it at once."""
        self.current = self.transfer
        with _QueueWrites(self):
            yield
        self.current = self.compute

    def queue(self, name, run, *, reads=(), writes=()):
        """Give work to the current stream."""
        operation = self.machine.operation(f"{self.name} {name}", run, (), reads, writes)
        return self.machine.queue(self.current, operation)

    def order(self, kind, stream, before):
        """Let later work of ``stream`` run after an operation, unless that edge is left out."""
        role = self.roles["compute" if stream is self.compute else "transfer"]
        edge = kind if kind == "ready" else f"{kind}, {role}"
        self.edges.add(edge)
        if edge != self.without:
            self.machine.queue(
                stream, self.machine.operation(f"{self.name} {edge}", after=[before])
            )


class SimulatedEvent:
    def __init__(self, device):
        self._device = device
        self._mark = None
        self._kind = ""

    def record(self):
        device = self._device
        self._mark = device.queue("mark", lambda: None)
        if device.current is device.transfer:
            self._kind = "arrived"
        else:
            self._kind = "ready" if device.calling == "arm" else "drained"

    def wait(self):
        if self._mark is not None:
            self._device.order(self._kind, self._device.current, self._mark)


class _QueueWrites(TorchDispatchMode):
    """Turns torch's writing operators into work on the current stream; views stay views."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = operator._schema  # noqa: SLF001 - the only way to learn what it writes
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        written = [
            named[a.name]
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name in named
        ]
        if written:
            reads = [
                value
                for value in named.values()
                if isinstance(value, torch.Tensor) and all(value is not w for w in written)
            ]
            self._device.queue(
                schema.name, lambda: operator(*args, **kwargs), reads=reads, writes=written
            )
            return written[0]
        if not all(result.alias_info is not None for result in schema.returns):
            raise NotImplementedError(f"{schema.name} makes a new tensor on the transfer stream")
        return operator(*args, **kwargs)


class SimulatedTransport:
    """Broadcasts between simulated ranks, piece by piece, on streams of their own.

    Sending is over when the wire has the bytes, whether or not anybody has received them.
    """

    def __init__(self, wire, device, rank):
        self._wire = wire
        self._device = device
        self._rank = rank
        self._count = 0

    def start(self, data, source_rank, gather=None):
        device = self._device
        if gather is not None:
            gather.into(data)
        number, self._count = self._count, self._count + 1
        passing = self._wire.passing(number, source_rank, data.numel())
        mark = device.queue("mark", lambda: None)
        device.order("joined", device.network, mark)
        for piece, part in enumerate(data.tensor_split(TRANSFER_PIECES)):
            sent = passing.sent[piece]
            if source_rank == self._rank:
                sent.name = f"{device.name} sends broadcast {number}.{piece}"
                sent.run = lambda p=piece, d=part: passing.pieces.__setitem__(p, d.clone())
                sent.reads = [part]
                last = device.machine.queue(device.network, sent)
            else:
                received = device.machine.operation(
                    f"{device.name} receives broadcast {number}.{piece}",
                    lambda p=piece, d=part: d.copy_(passing.pieces[p]),
                    [sent],
                    writes=[part],
                )
                last = device.machine.queue(device.network, received)
        return _Pending(device, last)


class _Pending:
    """Waits like NCCL: the current stream, not the host."""

    def __init__(self, device, last):
        self._device = device
        self._last = last

    def wait(self):
        self._device.order("landed", self._device.current, self._last)

    def block(self):
        self._device.machine.run_until(self._last)
        self._device.host.waited_for = self._last


class HostBlocking:
    """A transport whose wait makes the host wait, as gloo's does; nothing orders the streams."""

    def __init__(self, transport):
        self._transport = transport

    def start(self, data, source_rank, gather=None):
        return _BlockingPending(self._transport.start(data, source_rank, gather))


class _BlockingPending:
    def __init__(self, pending):
        self._pending = pending

    def wait(self):
        self._pending.block()


class Wire:
    """Pairs the ranks' broadcasts by their number."""

    def __init__(self, machine):
        self._machine = machine
        self._passing = {}

    def passing(self, number, source_rank, size):
        made = self._passing.setdefault(number, _Passing(self._machine, source_rank, size))
        assert (made.source_rank, made.size) == (source_rank, size), "ranks are out of step"
        return made


class _Passing:
    def __init__(self, machine, source_rank, size):
        self.source_rank = source_rank
        self.size = size
        self.pieces = [None] * TRANSFER_PIECES
        self.sent = [machine.operation("a send that nobody started") for _ in self.pieces]
