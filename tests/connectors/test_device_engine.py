"""Threads that read make the device theirs."""

import threading

import torch

from kvpp_connect.connectors.device_engine import DeviceEngine


class NotingEngine:
    session = "127.0.0.1:1"

    def __init__(self, log):
        self.log = log

    def register(self, address, length_bytes):
        self.log.append(("register", address, length_bytes))

    def read(self, session, local_addresses, remote_addresses, lengths_bytes):
        self.log.append((threading.current_thread().name, "read"))


def test_each_thread_sets_the_device_once_before_its_first_read():
    log = []

    def set_device(device):
        log.append((threading.current_thread().name, device))

    device = torch.device("meta")
    engine = DeviceEngine(NotingEngine(log), device, set_device)

    def read_twice():
        engine.read("peer", [0], [0], [1])
        engine.read("peer", [0], [0], [1])

    for name in ("one", "two"):
        thread = threading.Thread(target=read_twice, name=name)
        thread.start()
        thread.join()
    assert log == [
        step for name in ("one", "two") for step in [(name, device), (name, "read"), (name, "read")]
    ]
    engine.register(1, 2)
    assert log[-1] == ("register", 1, 2)
    assert engine.session == NotingEngine.session
