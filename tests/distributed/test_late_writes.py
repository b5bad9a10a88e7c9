"""A read that Mooncake has given up writes its destination for a bounded time only."""

import os
import signal
import time

import numpy as np
import pytest

pytest.importorskip("mooncake")

from kvpp_connect.connectors.mooncake_engine import MooncakeEngine
from kvpp_connect.errors import PeerError

pytestmark = pytest.mark.distributed

# More pieces than Mooncake lets wait by itself.
PIECE_BYTES, PIECES = 9216, 2400
SIZE = PIECE_BYTES * PIECES
# One second to be admitted, and two time-outs of one second: four pieces are read, four are queued.
BOUND_S = 3.0
TIMEOUTS = {
    "MC_TCP_ADMISSION_TIMEOUT_MS": "1000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
}


def source(pipe):
    memory = np.full(SIZE, 7, dtype=np.uint8)
    engine = MooncakeEngine("127.0.0.1", "tcp")
    engine.register(memory.ctypes.data, SIZE)
    pipe.send((engine.session, memory.ctypes.data))
    pipe.recv()


def reader(pipe, session, remote, source_pid):
    """Read from a source that stands still; answers what the memory held when, after a failure."""
    os.environ.update(TIMEOUTS)
    memory = np.zeros(SIZE, dtype=np.uint8)
    engine = MooncakeEngine("127.0.0.1", "tcp")
    engine.register(memory.ctypes.data, SIZE)
    starts = range(0, SIZE, PIECE_BYTES)
    pieces = (
        [memory.ctypes.data + start for start in starts],
        [remote + start for start in starts],
        [PIECE_BYTES] * PIECES,
    )
    for first in range(0, PIECES, 200):  # few enough to be admitted in time on a busy machine
        engine.read(session, *(part[first : first + 200] for part in pieces))
    assert (memory == 7).all()
    memory[:] = 0
    os.kill(source_pid, signal.SIGSTOP)
    with pytest.raises(PeerError):
        engine.read(session, *pieces)
    time.sleep(BOUND_S + 1)
    before = int((memory == 7).sum())
    os.kill(source_pid, signal.SIGCONT)
    time.sleep(3)
    pipe.send((before, int((memory == 7).sum())))


def test_nothing_is_written_when_the_source_goes_on_later(spawn):
    stopped = spawn(source)
    session, remote = stopped.get()
    try:
        before, after = spawn(reader, session, remote, stopped.process.pid).get()
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)
    assert after == before
