"""Streams and hosts that take their turns in any order that is allowed, and who sees that.

Work is queued on virtual streams by virtual hosts, and done when a seeded scheduler picks it. A
stream keeps its order, an operation runs after those that it waits for, a host goes on after what
it blocks for, and nothing else orders anything: streams and hosts, also those of different ranks,
fall behind each other as much as the seed likes.

Two detectors watch. The model on top checks the bytes that it reads. ``Shadow`` knows for every
byte who wrote and read it last, and asks whether each new access is ordered after them, which holds
or fails for all schedules of a program alike, not only for the one that is run.
"""

from collections import deque
from itertools import accumulate
from math import inf
from random import Random

from simulated_shadow import Shadow

SPEEDS = (0.001, 0.1, 1)
MOODS = (10, 50, 200)  # turns until others are the slow ones
BURSTS = (1, 1, 4, 16)  # operations or steps in a turn


class DeadlockError(AssertionError):
    """Nobody can go on, and not everything is done."""


class Operation:
    """A piece of work: ``run`` is called once, after everything in ``after`` and ``meets``.

    What is in ``meets`` it has to wait for as well, but by an accident of the hardware: nobody may
    rely on that order. ``reads`` and ``writes`` are the tensors that it touches, or say which when
    it runs. ``relevant`` are the only cells whose bytes anybody needs, if it reads more.
    ``done_before`` is a bit mask of the operations that are ordered before it.
    """

    def __init__(self, number, name, run, *, reads=(), writes=(), relevant=None):
        self.number = number
        self.name = name
        self.run = run
        self.after = []
        self.meets = []
        self.may_start = None
        self.reads = reads
        self.writes = writes
        self.relevant = relevant
        self.done = False
        self.done_before = 0

    def can_run(self):
        for other in self.after:
            if not other.done:
                return False
        for other in self.meets:
            if not other.done:
                return False
        return self.may_start is None or self.may_start()


class Stream:
    """An order of work. ``waits`` come before whatever is queued next."""

    def __init__(self, machine, name):
        self._machine = machine
        self.name = name
        self.queue = deque()
        self.waits = []
        self._last = None

    def add(self, operation):
        before = self.waits if self._last is None else [*self.waits, self._last]
        operation.after += [other for other in before if not other.done]
        for other in before:
            if other.done:
                operation.done_before |= other.done_before | 1 << other.number
        operation.done_before |= self._machine.running.seen
        self.waits = []
        self.queue.append(operation)
        self._last = operation
        return operation

    def mark(self):
        """What is done when all that was given until now is done; ``None`` if that is nothing."""
        if self.waits:
            self.add(self._machine.operation(f"{self.name} mark"))
        return self._last

    def can_go(self):
        return bool(self.queue) and self.queue[0].can_run()

    def go(self):
        self._machine.execute(self.queue.popleft())


class Host:
    """A thread, as a generator: where it yields others have their turns, until what it gives holds.

    ``seen`` is a bit mask of the operations that it knows to be done.
    """

    def __init__(self, machine, name, steps=(), *, in_step=False):
        self._machine = machine
        self.name = name
        self._steps = iter(steps)
        self.in_step = in_step
        self.steps_done = 0
        self.seen = 0
        self.doing = ""
        self.current = None  # stream, where it is not the device's own choice
        self.owes = None  # an operation that it has yet to wait for
        self.blocked = None
        self.is_inside = False  # a call that blocks
        self.ended = False

    def can_go(self):
        if self.ended or self.is_inside:
            return False
        if self.in_step and self.steps_done > self._machine.most_steps:
            return False
        return self.blocked is None or self.blocked()

    def go(self):
        machine = self._machine
        before, machine.running = machine.running, self
        self.steps_done += 1
        try:
            self.blocked = next(self._steps)
        except StopIteration:
            self.ended = True
        machine.running = before

    def knows(self, operation):
        self.seen |= operation.done_before | 1 << operation.number


class Machine:
    """The scheduler of all streams and hosts.

    Args:
        without: names the edge, something that orders two things, that is left out.
        hosts_first: hosts queue everything before a device begins.
    """

    def __init__(self, seed, *, without=None, find_races=True, hosts_first=False):
        self._random = Random(f"machine {seed}")
        self._actors = []
        self._hosts = []
        self._weights = []
        self._turns = self._next_mood = 0
        self._operations = 0
        self._shadow = Shadow() if find_races else None
        self._hosts_first = hosts_first
        self._without = without
        self.edges = set()
        self.most_steps = inf
        self.main = self.running = Host(self, "main")

    def keeps(self, edge):
        """Note an edge; says whether it is there."""
        self.edges.add(edge)
        return edge != self._without

    def stream(self, name):
        self._actors.append(Stream(self, name))
        return self._actors[-1]

    def host(self, name, steps, *, in_step=False):
        """Add a host.

        Args:
            in_step: while such a host is inside a call that blocks, no other one goes further than
                it is. For calls that wait for other hosts, since the last to block is the first
                to go on.
        """
        self._hosts.append(Host(self, name, steps, in_step=in_step))
        self._actors.append(self._hosts[-1])
        return self._hosts[-1]

    def operation(self, name, run=lambda: None, **touches):
        self._operations += 1
        return Operation(self._operations, name, run, **touches)

    def execute(self, operation):
        for before in operation.after:
            operation.done_before |= before.done_before | 1 << before.number
        if self._shadow is not None:
            self._shadow.check(operation)
        operation.run()
        operation.run, operation.done = None, True

    def block(self, ready, *, alone=False):
        """Hold the running host inside a call until something is so.

        Args:
            alone: no host that is in step has to do anything for it.
        """
        host, most_steps = self.running, self.most_steps
        host.is_inside = True
        if host.in_step:
            self.most_steps = -1 if alone else min(most_steps, host.steps_done - 1)
        while not ready():
            if not self._give_turn():
                raise DeadlockError(f"deadlock: {self.stuck()}")
        host.is_inside, self.most_steps = False, most_steps

    def wait_for(self, operation):
        """Hold the running host inside a call until an operation is done."""
        self.block(lambda: operation.done)
        self.running.knows(operation)

    def settled(self):
        """Steps that wait for what the running host owes."""
        host = self.running
        owed, host.owes = host.owes, None
        if owed is not None:
            yield lambda: owed.done
            host.knows(owed)

    def host_works(self, name, run, **touches):
        """The running host reads or writes memory itself, at once."""
        operation = self.operation(f"{self.running.name} {name}", run, **touches)
        operation.done_before = self.running.seen
        self.execute(operation)
        self.running.seen |= 1 << operation.number

    def run(self):
        """Give turns until everything is done.

        Raises:
            DeadlockError: nobody can go on before.
        """
        while self._give_turn():
            pass
        if self.stuck() or not all(host.ended for host in self._hosts):
            raise DeadlockError(f"deadlock: {self.stuck()}")

    def stuck(self):
        """First operation of each stream, with what it misses, and hosts that wait."""
        heads = [a.queue[0] for a in self._actors if isinstance(a, Stream) and a.queue]
        missing = [
            (head.name, [o.name for o in (*head.after, *head.meets) if not o.done])
            for head in heads
        ]
        return missing + [(host.name, host.doing) for host in self._hosts if not host.ended]

    def _give_turn(self):
        if self._hosts_first:
            host = next((host for host in self._hosts if not host.ended), None)
            if host is not None:
                assert host.can_go(), "a host has waited for a device"
                host.go()
                return True
        if self._turns >= self._next_mood or len(self._weights) < len(self._actors):
            self._next_mood = self._turns + self._random.choice(MOODS)
            self._weights = list(accumulate(self._random.choice(SPEEDS) for _ in self._actors))
        self._turns += 1
        actor = self._pick()
        if actor is None:
            return False
        for _ in range(self._random.choice(BURSTS)):
            actor.go()
            if not actor.can_go():
                break
        return True

    def _pick(self):
        for _ in range(3):  # cheaper than to ask all
            actor = self._random.choices(self._actors, cum_weights=self._weights)[0]
            if actor.can_go():
                return actor
        weights = zip(self._actors, [0, *self._weights], self._weights, strict=False)
        ready = [(actor, end - begin) for actor, begin, end in weights if actor.can_go()]
        if not ready:
            return None
        actors, speeds = zip(*ready, strict=True)
        return self._random.choices(actors, speeds)[0]
