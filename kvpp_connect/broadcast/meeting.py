"""How ranks that share a machine find each other, or find out that they do not.

Every rank tells the others, through a gather that they bring along, which machine it runs on and
where it listens. If it is one machine, they connect with each other and hand over their memory.
Then they tell each other how that went, so that all of them come to the same conclusion.

Nothing gets a name in the file system: sockets are abstract and memory is passed by descriptor, so
nothing is left behind, whenever a rank dies.
"""

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpp_connect.broadcast.links import COUNTERS_BYTES, SPIN_S, Bell, Link, Staging
from kvpp_connect.errors import PeerError

Gather = Callable[[bytes], list[bytes]]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HELLO = struct.Struct("<I32s")  # rank of the sender, token of the receiver; with memory and bell
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MEETING_LIMIT_S = 30.0  # all ranks are there already: they have just gathered


class NotOneMachineError(PeerError):
    """The ranks cannot reach each other's memory. Raised on all of them alike."""


def machine_id() -> str:
    """The same in all processes of a running machine, containers included, and nowhere else."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return secrets.token_hex(16)  # unknown, so shared with nobody


def connect_group(
    rank: int, gather: Gather, staging_bytes: int, limit_s: float
) -> tuple[Staging, dict[int, Link]]:
    """Connect every rank of a group with every other one. Collective.

    Args:
        rank: this process's rank in the group.
        gather: exchanges bytes inside the group; the answer is ordered by rank. Raises
            RuntimeError where a rank is gone.
        staging_bytes: that each rank shares with its peers, beside the counters.
        limit_s: seconds for which a peer may be silent.

    Returns:
        This rank's memory, and the links by the ranks of the peers.

    Raises:
        NotOneMachineError: on all ranks, with the same reasons.
        PeerError: a rank died.
    """
    with contextlib.ExitStack() as failed:
        meeting = _Meeting(rank, staging_bytes, limit_s)
        failed.callback(meeting.bell.close)
        failed.callback(meeting.close)
        cards = [_Card.parse(card) for card in _gathered(gather, meeting.card.encode())]
        machines = len({card.machine for card in cards})
        if machines > 1:
            raise NotOneMachineError(f"the ranks run on {machines} machines")
        links: dict[int, Link] = {}
        problem = ""
        try:
            links = meeting.connect(cards)
        except (OSError, ValueError, PeerError) as error:
            problem = f"rank {rank} does not reach the others: {error}"
        problems = [row.decode() for row in _gathered(gather, problem.encode()) if row]
        if problems:
            for link in links.values():
                link.close()
            raise NotOneMachineError("; ".join(problems))
        failed.pop_all()
        meeting.close()
        return meeting.staging, links


def _gathered(gather: Gather, value: bytes) -> list[bytes]:
    try:
        return gather(value)
    except RuntimeError as error:
        raise PeerError(f"a rank of the KVPP group failed while they met: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """What a rank tells the others before they meet.

    ``name`` is of the abstract socket on which the rank listens, ``token`` is to be shown by those
    who connect, ``cores`` are those that the rank may use.
    """

    machine: str
    name: str
    token: str
    cores: frozenset[int]

    @classmethod
    def make(cls) -> "_Card":
        return cls(
            machine=machine_id(),
            name=f"kvpp-{secrets.token_hex(16)}",
            token=secrets.token_hex(16),
            cores=frozenset(os.sched_getaffinity(0)),
        )

    def encode(self) -> bytes:
        cores = ",".join(map(str, sorted(self.cores)))
        return f"{self.machine} {self.name} {self.token} {cores}".encode()

    @classmethod
    def parse(cls, card: bytes) -> "_Card":
        machine, name, token, cores = card.decode().split()
        numbers = frozenset(map(int, cores.split(",")))
        return cls(machine=machine, name=name, token=token, cores=numbers)


class _Meeting:
    """One rank's side of the first contact."""

    def __init__(self, rank: int, staging_bytes: int, limit_s: float) -> None:
        self._rank = rank
        self._limit_s = limit_s
        self._staging_bytes = staging_bytes
        self._deadline = 0.0  # set when all ranks have gathered
        self._spin_s = 0.0  # likewise
        self.card = _Card.make()
        self._memory = os.memfd_create("kvpp-staging", os.MFD_CLOEXEC)
        os.posix_fallocate(self._memory, 0, COUNTERS_BYTES + staging_bytes)
        self.staging = Staging(self._memory, staging_bytes)
        self.bell = Bell.make()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.card.name}")
        self._listener.listen(128)

    def close(self) -> None:
        """Stop listening. The memory stays mapped, bell and connections are the links'."""
        self._listener.close()
        os.close(self._memory)

    def connect(self, cards: list[_Card]) -> dict[int, Link]:
        """Call the lower ranks and answer the higher ones; returns the links by rank."""
        # Where ranks outnumber cores, one that looks and does not sleep is in the others' way.
        cores = frozenset[int]().union(*(card.cores for card in cards))
        self._spin_s = SPIN_S if len(cards) <= len(cores) else 0.0
        self._deadline = time.monotonic() + _MEETING_LIMIT_S
        links: dict[int, Link] = {}
        with contextlib.ExitStack() as opened:
            calls = [opened.enter_context(self._call(card)) for card in cards[: self._rank]]
            while len(links) < len(cards) - 1 - self._rank:
                self._listener.settimeout(self._remaining_s())
                caller = opened.enter_context(self._listener.accept()[0])
                if _same_user(caller):
                    rank, memory, bell = self._hear(caller)
                    opened.callback(bell.close)
                    self._greet(caller, cards[rank])
                    links[rank] = self._link(rank, caller, memory, bell)
            for rank, call in enumerate(calls):
                answered, memory, bell = self._hear(call)
                opened.callback(bell.close)
                if answered != rank:
                    raise PeerError(f"rank {answered} answered in the place of rank {rank}")
                links[rank] = self._link(rank, call, memory, bell)
            opened.pop_all()
        return dict(sorted(links.items()))

    def _call(self, card: _Card) -> socket.socket:
        call = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            call.connect(f"\0{card.name}")
            self._greet(call, card)
        except OSError:
            call.close()
            raise
        return call

    def _link(self, rank: int, connection: socket.socket, memory: Staging, bell: Bell) -> Link:
        bells = (self.bell, bell)
        return Link(rank, connection, memory, bells, self._limit_s, self._spin_s)

    def _greet(self, connection: socket.socket, card: _Card) -> None:
        hello = _HELLO.pack(self._rank, card.token.encode())
        socket.send_fds(connection, [hello], [self._memory, self.bell.descriptor])

    def _hear(self, connection: socket.socket) -> tuple[int, Staging, Bell]:
        """The peer's rank, memory and bell."""
        connection.settimeout(self._remaining_s())
        hello, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 2)
        with contextlib.ExitStack() as unused:
            for descriptor in descriptors:
                unused.callback(os.close, descriptor)
            if len(hello) != _HELLO.size or len(descriptors) != 2:
                raise PeerError("a peer hung up, or is not one")
            rank, token = _HELLO.unpack(hello)
            if token != self.card.token.encode():
                raise PeerError(f"what calls itself rank {rank} does not know the token")
            staging = Staging(descriptors[0], self._staging_bytes)
            return rank, staging, Bell(os.dup(descriptors[1]))

    def _remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)


def _same_user(connection: socket.socket) -> bool:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(packed)[1] == os.geteuid()
