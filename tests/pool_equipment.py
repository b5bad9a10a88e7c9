"""Real servers of pool stores for tests: on loopback ports, ended by pid."""

import ctypes
import importlib.util
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvpp_connect.connectors.ascend_store.backends.base import Buffer
from kvpp_connect.demo.ports import LOOPBACK, free_ports

START_S = 60


class ServerProcess:
    """A server that can be killed, started again on the same ports, stopped and continued."""

    def __init__(self, name, command, port, *, cwd=None):
        self.address = f"{LOOPBACK}:{port}"
        self._name = name
        self._command = command
        self._port = port
        self._cwd = cwd
        self._process = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.kill()
        self._log.close()

    @property
    def pid(self):
        return self._process.pid

    def start(self):
        """Returns when the server answers on its port."""
        self._process = subprocess.Popen(
            self._command, stdout=self._log, stderr=subprocess.STDOUT, cwd=self._cwd
        )
        limit = time.monotonic() + START_S
        while not self._answers():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > limit:
                self.kill()
                raise RuntimeError(f"{self._name} does not start:\n{self.log()[-2000:]}")
            time.sleep(0.02)

    def kill(self):
        """SIGKILL; nothing happens where it has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)

    def restart(self):
        self.kill()
        self.start()

    def stop(self):
        """SIGSTOP: takes connections and answers nothing. Returns when no thread runs."""
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)

    def cont(self):
        self._process.send_signal(signal.SIGCONT)

    def log(self):
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _answers(self):
        try:
            socket.create_connection((LOOPBACK, self._port), timeout=0.5).close()
        except OSError:
            return False
        return True


def mooncake_master(**flags):
    """A ``mooncake_master`` with flags as its ``--help`` names them (``client_ttl=5``)."""
    package = importlib.util.find_spec("mooncake").submodule_search_locations[0]
    rpc_port, metrics_port = free_ports(2)
    flags = {
        "rpc_address": LOOPBACK,
        "rpc_port": rpc_port,
        "rpc_thread_num": 2,
        "metrics_host": LOOPBACK,
        "metrics_port": metrics_port,
        "client_ttl": 30,  # seconds: tests share slow machines
        **flags,
    }
    command = [
        f"{package}/mooncake_master",
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    return ServerProcess("mooncake_master", command, rpc_port)


class Memory:
    """Memory of this process, cut into ranges."""

    def __init__(self, size):
        self._bytes = (ctypes.c_ubyte * size)()
        self._used = 0
        self.whole = Buffer(ctypes.addressof(self._bytes), size)

    def take(self, size):
        """A range that nobody else has."""
        buffer = Buffer(self.whole.address + self._used, size)
        self._used += size
        assert self._used <= self.whole.size, "the test needs more memory"
        return buffer

    def holding(self, content):
        """A range with this content."""
        buffer = self.take(len(content))
        ctypes.memmove(buffer.address, content, len(content))
        return buffer

    @staticmethod
    def read(buffer):
        return ctypes.string_at(buffer.address, buffer.size)

    @staticmethod
    def write(buffer, content):
        ctypes.memmove(buffer.address, content, buffer.size)


class StoreNode(ServerProcess):
    """A process that lends memory to a Mooncake pool, so that objects outlive the engines."""

    def __init__(self, master, size):
        port = free_ports(1)[0]
        code = (
            "import os, socket, sys, time\n"
            "os.environ.update(MC_FORCE_TCP='1', MC_TCP_BIND_ADDRESS='127.0.0.1')\n"
            "from mooncake.store import MooncakeDistributedStore\n"
            "store = MooncakeDistributedStore()\n"
            "code = store.setup('127.0.0.1', 'P2PHANDSHAKE', int(sys.argv[2]), 1 << 24, 'tcp', '',"
            " sys.argv[1])\n"
            "assert code == 0, code\n"
            "ready = socket.create_server(('127.0.0.1', int(sys.argv[3])))\n"
            "time.sleep(86400)\n"
        )
        super().__init__(
            "store node", [sys.executable, "-c", code, master.address, str(size), str(port)], port
        )
