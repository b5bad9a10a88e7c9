"""Collectives between simulated ranks: broadcasts, and the model's own all-reduces.

Eager ones send into the wire: the source is done whether or not anybody has received. Others meet:
nothing moves before all ranks have entered, as kernels that spin until they see their peers. The
order that this meeting brings about is one that nobody may rely on, and does not count as such.
"""

from dataclasses import dataclass, field

from simulated_shadow import CELL_BYTES

TRANSFER_PIECES = 2


@dataclass(frozen=True)
class Manners:
    """How collectives behave: ``meets``; ``alone``, only one at a time fits on a device; and
    ``in_order``, each begins after the one that its host launched before it has ended.
    """

    meets: bool = False
    alone: bool = False
    in_order: bool = False


class Wire:
    """Pairs the ranks' collectives by their number."""

    def __init__(self, machine, group_size, manners):
        self.machine = machine
        self.group_size = group_size
        self.manners = manners
        self._meetings = {}

    def meeting(self, kind, number, *facts):
        made = self._meetings.setdefault((kind, number), _Meeting(self, f"{kind} {number}", facts))
        assert made.facts == facts, "ranks are out of step"
        return made


class _Meeting:
    """One collective; its operations exist before anybody has started them."""

    def __init__(self, wire, name, facts):
        operation = wire.machine.operation
        self.name = name
        self.facts = facts
        self.pieces = [None] * TRANSFER_PIECES
        self.sent = [operation(f"a send of {name} that nobody started") for _ in self.pieces]
        ranks = range(wire.group_size if wire.manners.meets else 0)
        self.entered = [operation(f"a missing rank of {name}") for _ in ranks]


@dataclass
class Kernels:
    """The collectives on one device."""

    manners: Manners
    spins: object = None
    last: object = field(default=None)

    def launch(self, entered, last):
        if self.manners.in_order:
            entered.meets += filter(None, [self.last])
            self.last = last
        if self.manners.alone:
            entered.may_start = lambda: self.spins is None
            entered.run = lambda: setattr(self, "spins", last)
            work = last.run
            last.run = lambda: (work(), setattr(self, "spins", None))


class SimulatedTransport:
    """One rank's end of the wire. ``relevant`` are cells of sources that anybody needs, if set."""

    def __init__(self, wire, device, rank):
        self._wire = wire
        self._device = device
        self._rank = rank
        self._network = wire.machine.stream(f"{device.name} network")
        self._kernels = Kernels(wire.manners)
        self._reductions = self.started = 0
        self.relevant = None

    def start(self, data, source_rank, gather=None):
        device, machine = self._device, self._device.machine
        if gather is not None:
            gather.into(data)
        number, self.started = self.started, self.started + 1
        role = "owner" if source_rank == self._rank else "receiver"
        meeting = self._wire.meeting("broadcast", number, source_rank, data.numel())
        device.order(f"joined, {role}", self._network, device.current.mark())
        entered = self._enter(meeting, self._network)
        name = f"{device.name} {'sends' if source_rank == self._rank else 'gets'} {number}"
        for piece, part in enumerate(data.view(-1, CELL_BYTES).tensor_split(TRANSFER_PIECES)):
            if source_rank == self._rank:
                last = meeting.sent[piece]
                last.name, last.reads, last.relevant = f"{name}.{piece}", [part], self.relevant
                last.run = lambda p=piece, d=part: meeting.pieces.__setitem__(p, d.clone())
                last.meets += entered
            else:
                receive = lambda p=piece, d=part: d.copy_(meeting.pieces[p])  # noqa: E731
                last = machine.operation(f"{name}.{piece}", receive, writes=[part])
                last.after.append(meeting.sent[piece])
            self._network.add(last)
        if entered:
            self._kernels.launch(entered[self._rank], last)
        return _Pending(device, last, f"landed, {role}")

    def all_reduce(self):
        """One of the model's, on its own stream: nobody is through before all have entered."""
        if not self._wire.manners.meets:
            return
        number, self._reductions = self._reductions, self._reductions + 1
        meeting = self._wire.meeting("all-reduce", number)
        entered = self._enter(meeting, self._device.compute)
        left = self._device.machine.operation(f"{self._device.name} all-reduce {number}")
        left.meets += entered
        self._device.compute.add(left)
        self._kernels.launch(entered[self._rank], left)

    def _enter(self, meeting, stream):
        """Operations of all ranks that have to be done first; none on an eager wire."""
        if not self._wire.manners.meets:
            return []
        entered = meeting.entered[self._rank]
        entered.name = f"{self._device.name} enters {meeting.name}"
        stream.add(entered)
        return meeting.entered


class _Pending:
    """Waits like NCCL: the current stream, not the host."""

    def __init__(self, device, last, edge):
        self._device = device
        self._last = last
        self._edge = edge

    def wait(self):
        self._device.order(self._edge, self._device.current, self._last)

    def block(self):
        self._device.machine.wait_for(self._last)


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
