"""How fast each transport broadcasts between local processes, beside a plain copy of the bytes.

Two figures for each transport. *Stream*: one owner sends one broadcast after the other, as for the
layers that it owns; time from the first start to the last rank's last wait, divided by their
number. *Latency*: the owner changes each time, and every rank needs the broadcast before to make
the next one; time for each.

The sources lie further apart than caches reach and the targets are two slots, as in the engine. A
plain copy, on one rank while the others wait, takes the same bytes from the same places. A device
has done its work when the clock stops. All of
them are measured in turn, again and again, so that other load on the machine hits all alike.
"""

import ctypes
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from kvpp_connect.bench.local_ranks import run_ranks
from kvpp_connect.bench.rounds import Spread, TransportName, make_transports, spread, timed
from kvpp_connect.bench.traffic import StepBytes, measure_step_bytes
from kvpp_connect.broadcast.collective import GroupBroadcast
from kvpp_connect.errors import KvppError
from kvpp_connect.platforms.local import LocalDevice, local_device

DEFAULT_SIZES = tuple(4096 * 4**power for power in range(8))  # 4 KiB to 64 MiB
SLOTS = 2
_SOURCE_BYTES = 64 << 20
_ROUND_BYTES = 64 << 20  # moved in one round, at most
_MAX_BROADCASTS, _MIN_BROADCASTS = 200, 4  # in one round


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpeed:
    """One transport with payloads of one size."""

    transport: TransportName
    stream: Spread
    latency: Spread
    bytes_per_s: float  # of the stream
    copy_ratio: float  # to the speed of the plain copy


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSpeed:
    """All that was measured with payloads of one size."""

    size_bytes: int
    copy: Spread
    copy_bytes_per_s: float
    transports: tuple[TransportSpeed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastReport:
    """The whole result.

    Attributes:
        device: what the ranks' memory is on; ``sharing`` ranks that have a device in common go
            through gloo.
        load: processes that wanted a core when the benchmark began, the ranks excluded.
    """

    ranks: int
    device: str
    sharing: bool
    cores: int
    load: float
    rounds: int
    sizes: tuple[SizeSpeed, ...]
    steps: tuple[StepBytes, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """Every step that moved other bytes than planned."""
        return tuple(failure for step in self.steps for failure in step.failures)


def measure_broadcast(
    ranks: int, sizes: tuple[int, ...], rounds: int, limit_s: float, device: str = "cpu"
) -> BroadcastReport:
    """Start local processes and measure.

    Args:
        sizes: bytes of the payloads.
        rounds: how often everything is measured.
        limit_s: seconds after which it is given up.
        device: where the payloads are: cpu, cuda or npu.

    Raises:
        KvppError: a process failed, the time is up, or bytes arrived wrong.
    """
    load = os.getloadavg()[0]
    speeds, steps, name, sharing = run_ranks(
        _measure_on_rank, ranks, limit_s, sizes, rounds, device
    )
    return BroadcastReport(
        ranks=ranks,
        device=name,
        sharing=sharing,
        cores=len(os.sched_getaffinity(0)),
        load=load,
        rounds=rounds,
        sizes=speeds,
        steps=steps,
    )


def _measure_on_rank(
    sizes: tuple[int, ...], rounds: int, device: str
) -> tuple[tuple[SizeSpeed, ...], tuple[StepBytes, ...], str, bool]:
    place = local_device(device, dist.get_rank(), dist.get_world_size())
    transports = make_transports(place.platform)
    memory = _Memory(max(sizes), place)
    speeds = tuple(_measure_size(size, rounds, transports, memory) for size in sizes)
    best = transports.get("shared_memory", transports["collective"])
    sharing = device != "cpu" and place.platform.collective_backend == "gloo"
    return speeds, measure_step_bytes(best, place), place.name, sharing


def _measure_size(
    size: int, rounds: int, transports: dict[TransportName, GroupBroadcast], memory: "_Memory"
) -> SizeSpeed:
    payloads = memory.payloads(size)
    copies: list[float] = []
    streams: dict[TransportName, list[float]] = {name: [] for name in transports}
    latencies: dict[TransportName, list[float]] = {name: [] for name in transports}
    number, finish = payloads.number, memory.place.finish
    for _ in range(rounds + 1):  # the first one warms up
        copies.append(timed(payloads.copy, number, alone=True, finish=finish))
        for name, transport in transports.items():
            taken = timed(lambda t=transport: payloads.stream(t), number, finish=finish)
            streams[name].append(taken)
            payloads.check()
            taken = timed(lambda t=transport: payloads.relay(t), number, finish=finish)
            latencies[name].append(taken)
    copy = spread(copies[1:])
    return SizeSpeed(
        size_bytes=size,
        copy=copy,
        copy_bytes_per_s=size / copy.median_s,
        transports=tuple(
            _speed(name, size, copy, spread(streams[name][1:]), spread(latencies[name][1:]))
            for name in transports
        ),
    )


class _Memory:
    """What is broadcast, and where to. Every rank knows what the owner's bytes look like."""

    def __init__(self, largest: int, place: LocalDevice) -> None:
        self.place = place
        source = torch.zeros(max(_SOURCE_BYTES, largest), dtype=torch.uint8)
        source.copy_(torch.arange(len(source)) * 40503 >> 8)
        self._sources = source.to(place.memory)
        self._slots = torch.zeros(SLOTS * largest, dtype=torch.uint8, device=place.memory)

    def payloads(self, size: int) -> "_Payloads":
        """As many payloads of a size as one round has."""
        number = max(_MIN_BROADCASTS, min(_MAX_BROADCASTS, _ROUND_BYTES // size))
        sources = self._sources[: len(self._sources) // size * size].view(-1, size)
        slots = self._slots[: SLOTS * size].view(-1, size)
        return _Payloads(
            [sources[index % len(sources)] for index in range(number)],
            [slots[index % SLOTS] for index in range(number)],
        )


class _Payloads:
    """The broadcasts of one round; all views are there before the clock runs."""

    def __init__(self, sources: list[torch.Tensor], slots: list[torch.Tensor]) -> None:
        self.number = len(sources)
        self._sources = sources
        self._slots = slots
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._copies = [
            (slot.data_ptr(), source.data_ptr(), len(source))
            for source, slot in zip(sources, slots, strict=True)
        ]

    def copy(self) -> None:
        """The yardstick: the bytes of ``stream``, by this process alone."""
        if self._sources[0].device.type != "cpu":
            for source, slot in zip(self._sources, self._slots, strict=True):
                slot.copy_(source)
            return
        for slot, source, size in self._copies:
            ctypes.memmove(slot, source, size)

    def stream(self, transport: GroupBroadcast) -> None:
        """One owner, one broadcast after the other."""
        for data in self._sources if self._rank == 0 else self._slots:
            transport.start(data, 0).wait()

    def relay(self, transport: GroupBroadcast) -> None:
        """Each rank in turn, when it has the broadcast before."""
        for index, data in enumerate(self._slots):
            transport.start(data, index % self._ranks).wait()

    def check(self) -> None:
        """Compare the last broadcasts of a stream with what the owner sent.

        Raises:
            KvppError: they differ.
        """
        for source, slot in zip(self._sources[-SLOTS:], self._slots[-SLOTS:], strict=True):
            if self._rank != 0 and not torch.equal(source, slot):
                raise KvppError(f"a broadcast of {len(source)} bytes arrived wrong")
            slot.zero_()


def _speed(
    name: TransportName, size: int, copy: Spread, stream: Spread, latency: Spread
) -> TransportSpeed:
    return TransportSpeed(
        transport=name,
        stream=stream,
        latency=latency,
        bytes_per_s=size / stream.median_s,
        copy_ratio=copy.median_s / stream.median_s,
    )
