"""Releases over a real loopback socket."""

import time
from dataclasses import replace

import pytest

from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import ControlServer
from kvpp_connect.connectors.mooncake_v2.metadata import RemotePrefill
from kvpp_connect.connectors.mooncake_v2.releases import LeaseReleaser


def remote(port, request_id="r"):
    return RemotePrefill(
        engine_id="p",
        host="127.0.0.1",
        port=port,
        lease=wire.LeaseRef(incarnation="i", request_id=request_id, generation=1),
        block_ids=(),
        prompt_tokens=1,
        prompt_digest="",
    )


@pytest.fixture
def producer():
    """A server that notes released requests; ``fail`` many questions are answered with a bug."""
    released = []
    failures = []

    def answer(question):
        if failures:
            raise failures.pop()
        released.append(question.lease.request_id)
        return wire.LeaseAnswer(wire.LeaseState.RELEASED)

    server = ControlServer("127.0.0.1", 0, answer)
    server.released, server.failures = released, failures
    yield server
    server.close()


def wait_for(released, expected, timeout_s=5):
    deadline = time.monotonic() + timeout_s
    while released != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert released == expected


def test_releases_arrive_in_order(producer):
    releaser = LeaseReleaser(timeout_s=2)
    for name in ("a", "b", "c"):
        releaser.release(remote(producer.port, name))
    wait_for(producer.released, ["a", "b", "c"])
    releaser.close()


def test_a_failed_release_is_tried_again(producer):
    producer.failures += [ZeroDivisionError("x"), ZeroDivisionError("y")]
    releaser = LeaseReleaser(timeout_s=2)
    releaser.release(remote(producer.port))
    wait_for(producer.released, ["r"])
    releaser.close()


def test_a_producer_that_is_gone_delays_nobody_else(producer, free_port):
    releaser = LeaseReleaser(timeout_s=1)
    releaser.release(remote(free_port, "lost"))
    releaser.release(remote(producer.port, "prompt"))
    wait_for(producer.released, ["prompt"], timeout_s=0.8)
    releaser.close()


def test_closing_sends_what_is_queued_and_ends_in_time(producer, free_port):
    releaser = LeaseReleaser(timeout_s=0.5)
    releaser.release(replace(remote(free_port), engine_id="gone"))
    releaser.release(remote(producer.port))
    began = time.monotonic()
    releaser.close()
    assert time.monotonic() - began < 5
    assert producer.released == ["r"]


def test_a_delayed_release_comes_later_and_holds_nothing_up(producer):
    releaser = LeaseReleaser(timeout_s=2)
    began = time.monotonic()
    releaser.release(remote(producer.port, "late"), delay_s=0.3)
    releaser.release(remote(producer.port, "now"), delay_s=-1.0)
    wait_for(producer.released, ["now"])
    assert time.monotonic() - began < 0.3
    wait_for(producer.released, ["now", "late"])
    assert time.monotonic() - began >= 0.3
    releaser.close()


def test_closing_does_not_wait_for_delayed_releases(producer):
    releaser = LeaseReleaser(timeout_s=2)
    releaser.release(remote(producer.port), delay_s=60)
    began = time.monotonic()
    releaser.close()
    assert time.monotonic() - began < 5
    assert producer.released == []
