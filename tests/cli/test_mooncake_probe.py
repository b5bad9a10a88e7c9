"""What `kvpp doctor` says about a Mooncake that does not load."""

import ctypes
import importlib.metadata
import subprocess

import pytest

from kvpp_connect.cli import probes


@pytest.fixture
def installed(monkeypatch):
    """Mooncake's CPU build, with all libraries, and an engine that answers as told."""

    def version(name):
        if name == "mooncake-transfer-engine-non-cuda":
            return "0.3.13"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: None)

    def answer(code=0, stderr=""):
        done = subprocess.CompletedProcess((), code, "", stderr)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)

    answer()
    return answer


def probe(needed=True):
    (finding,) = probes.mooncake("127.0.0.1", "tcp", needed=needed)
    return finding


def test_an_engine_that_starts_is_well(installed):
    found = probe()
    assert found.state == "ok"
    assert "0.3.13, an engine starts on 127.0.0.1 with tcp" in found.said


def test_missing_libraries_are_named_with_their_debian_packages(installed, monkeypatch):
    def load(name):
        if name != "libcurl.so.4":
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    found = probe()
    assert found.state == "fail"
    assert found.said.endswith("needs libibverbs.so.1, libnuma.so.1")
    assert found.way_out == "as root: apt-get install libibverbs1 libnuma1"


@pytest.mark.parametrize(
    ("library", "way_out"),
    [
        ("librdmacm.so.1", "install librdmacm1 (Debian names)"),
        ("libcudart.so.12", "install mooncake-transfer-engine-cuda13 beside a torch for CUDA 13"),
        ("libcudart.so.13", "the CUDA runtime, or mooncake-transfer-engine-non-cuda"),
        ("libstrange.so.3", "install the package that holds libstrange.so.3"),
    ],
)
def test_libraries_that_only_the_loader_misses(installed, library, way_out):
    installed(1, f"KVPP cannot load ({library}: cannot open shared object file: No such file)")
    found = probe()
    assert found.state == "fail"
    assert found.said.startswith("cannot load")
    assert way_out in found.way_out


def test_an_engine_that_takes_its_process_along_is_reported(installed):
    installed(-11, "F1 glog: check failed")
    assert probe().said == "mooncake ends with code -11: F1 glog: check failed"


def test_an_engine_that_hangs_is_given_up(installed, monkeypatch):
    def hang(*_, timeout, **__):
        raise subprocess.TimeoutExpired((), timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "does not start on 127.0.0.1 within 60 s" in probe().said


def test_without_a_connector_it_is_only_worth_knowing(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert probe(needed=False).state == "note"
    assert probe(needed=True).state == "fail"
    assert "pip install mooncake-transfer-engine-non-cuda" in probe().way_out


@pytest.mark.distributed
def test_the_installed_mooncake():
    pytest.importorskip("mooncake", reason="needs Mooncake")
    assert probe().state == "ok"
