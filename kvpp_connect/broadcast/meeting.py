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
from pathlib import Path

from kvpp_connect.broadcast.links import Link, Staging
from kvpp_connect.errors import PeerError

Gather = Callable[[bytes], list[bytes]]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HELLO = struct.Struct("<I32s")  # rank of the sender, token of the receiver
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
        staging_bytes: memory that each rank shares with its peers.
        limit_s: seconds for which a peer may be silent.

    Returns:
        This rank's memory, and the links by the ranks of the peers.

    Raises:
        NotOneMachineError: on all ranks, with the same reasons.
        PeerError: a rank died.
    """
    with contextlib.closing(_Meeting(rank, staging_bytes, limit_s)) as meeting:
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
        return meeting.staging, links


def _gathered(gather: Gather, value: bytes) -> list[bytes]:
    try:
        return gather(value)
    except RuntimeError as error:
        raise PeerError(f"a rank of the KVPP group failed while they met: {error}") from error


class _Card:
    """What a rank tells the others before they meet."""

    def __init__(self, machine: str, name: str, token: str) -> None:
        self.machine = machine
        self.name = name  # of the abstract socket on which the rank listens
        self.token = token  # to be shown by those who connect

    def encode(self) -> bytes:
        return f"{self.machine} {self.name} {self.token}".encode()

    @classmethod
    def parse(cls, card: bytes) -> "_Card":
        return cls(*card.decode().split())


class _Meeting:
    """One rank's side of the first contact."""

    def __init__(self, rank: int, staging_bytes: int, limit_s: float) -> None:
        self._rank = rank
        self._limit_s = limit_s
        self._staging_bytes = staging_bytes
        self._deadline = 0.0  # set when all ranks have gathered
        self.card = _Card(machine_id(), f"kvpp-{secrets.token_hex(16)}", secrets.token_hex(16))
        self._memory = os.memfd_create("kvpp-staging", os.MFD_CLOEXEC)
        os.posix_fallocate(self._memory, 0, staging_bytes)
        self.staging = Staging(self._memory, staging_bytes)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.card.name}")
        self._listener.listen(128)

    def close(self) -> None:
        """Stop listening. The memory stays mapped and the connections stay open."""
        self._listener.close()
        os.close(self._memory)

    def connect(self, cards: list[_Card]) -> dict[int, Link]:
        """Call the lower ranks and answer the higher ones; returns the links by rank."""
        self._deadline = time.monotonic() + min(self._limit_s, _MEETING_LIMIT_S)
        links: dict[int, Link] = {}
        with contextlib.ExitStack() as opened:
            calls = [opened.enter_context(self._call(card)) for card in cards[: self._rank]]
            while len(links) < len(cards) - 1 - self._rank:
                self._listener.settimeout(self._remaining_s())
                caller = opened.enter_context(self._listener.accept()[0])
                if _same_user(caller):
                    rank, memory = self._hear(caller)
                    self._greet(caller, cards[rank])
                    links[rank] = Link(rank, caller, memory, self._limit_s)
            for rank, call in enumerate(calls):
                answered, memory = self._hear(call)
                if answered != rank:
                    raise PeerError(f"rank {answered} answered in the place of rank {rank}")
                links[rank] = Link(rank, call, memory, self._limit_s)
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

    def _greet(self, connection: socket.socket, card: _Card) -> None:
        hello = _HELLO.pack(self._rank, card.token.encode())
        socket.send_fds(connection, [hello], [self._memory])

    def _hear(self, connection: socket.socket) -> tuple[int, Staging]:
        """The peer's rank and memory."""
        connection.settimeout(self._remaining_s())
        hello, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
        try:
            if len(hello) != _HELLO.size or len(descriptors) != 1:
                raise PeerError("a peer hung up, or is not one")
            rank, token = _HELLO.unpack(hello)
            if token != self.card.token.encode():
                raise PeerError(f"what calls itself rank {rank} does not know the token")
            return rank, Staging(descriptors[0], self._staging_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)


def _same_user(connection: socket.socket) -> bool:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(packed)[1] == os.geteuid()
