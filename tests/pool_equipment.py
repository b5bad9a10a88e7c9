"""Real servers of pool stores for tests: on loopback ports, ended by pid."""

import contextlib
import ctypes
import importlib.util
import os
import random
import re
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
            self._command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self._cwd,
            preexec_fn=end_with_parent,
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
        wait_until_stopped(self.pid)

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


def end_with_parent():
    """Has Linux kill this process with the tests: a native client may crash them."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


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


_META_SERVICE = """
import sys
import memcache_hybrid
config = memcache_hybrid.MetaConfig()
config.meta_service_url, config.config_store_url, config.metrics_url, config.log_path = sys.argv[1:]
memcache_hybrid.MetaService.setup(config)
memcache_hybrid.MetaService.main()
"""


def memcache_meta_service(folder):
    """A MetaService, of which there may be one on a machine, with logs in ``folder``.

    Its ``config_store`` is the second address that clients need.
    """
    meta, config, metrics = free_ports(3)
    urls = f"tcp://{LOOPBACK}:{meta}", f"tcp://{LOOPBACK}:{config}", f"http://{LOOPBACK}:{metrics}"
    command = [sys.executable, "-c", _META_SERVICE, *urls, str(folder)]
    server = ServerProcess("memcache MetaService", command, meta)
    server.config_store = f"{LOOPBACK}:{config}"
    return server


class YuanrongWorker:
    """A datasystem worker with a metadata store of its own, as ``dscli`` starts it."""

    def __init__(self, *, memory_mb=256):
        worker, metadata = free_ports(2)
        self.address = f"{LOOPBACK}:{worker}"
        self._metadata = f"{LOOPBACK}:{metadata}"
        self._memory_mb = memory_mb
        # Holds Unix sockets, whose paths must be short.
        self._folder = tempfile.TemporaryDirectory(prefix="yr")
        self._pid = 0

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.kill()
        self._folder.cleanup()

    def start(self):
        """Returns when the worker answers, which takes some seconds."""
        begin = [
            sys.executable,
            "-c",
            "from yr.datasystem.cli.command import main; main()",
            "start",
        ]
        done = subprocess.run(
            [
                *begin,
                *("-w", "--worker_address", self.address),
                *("--metastore_address", self._metadata, "--start_metastore_service", "true"),
                *("--shared_memory_size_mb", str(self._memory_mb), "--log_dir", self._folder.name),
            ],
            cwd=self._folder.name,
            capture_output=True,
            text=True,
            timeout=START_S * 2,
            check=False,
        )
        started = re.search(r"PID: (\d+)", done.stdout)
        self._pid = int(started[1]) if started else 0
        if not re.search("OK .*success", done.stdout):
            self.kill()
            raise RuntimeError(f"the worker does not start:\n{done.stdout}{done.stderr}")

    def kill(self):
        """SIGKILL; nothing happens where it has ended."""
        if not self._pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
            while Path(f"/proc/{self._pid}").exists():  # it is no child of ours
                if state_of(self._pid) == "Z":
                    break
                time.sleep(0.02)
        self._pid = 0

    def restart(self):
        self.kill()
        self.start()

    def stop(self):
        """SIGSTOP: takes connections and answers nothing."""
        os.kill(self._pid, signal.SIGSTOP)
        wait_until_stopped(self._pid)

    def cont(self):
        os.kill(self._pid, signal.SIGCONT)


def state_of(pid):
    """The letter that Linux gives a process's state; "X" where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def wait_until_stopped(pid):
    while state_of(pid) not in "TX":
        time.sleep(0.01)


def content(seed, size=5000):
    """Bytes that look like no others."""
    return random.Random(seed).randbytes(size)


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
