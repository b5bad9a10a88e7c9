"""What processes of a node are changed to do: a transfer engine at its worst, negative controls."""

import dataclasses
import os
import random
import threading
import time

from chaos_spec import LATE_WRITE_S, NodeSpec
from chaos_store import hurt_stores


def apply_patches(spec: NodeSpec, part: str) -> None:
    """Change this process as its node's description says.

    Args:
        part: which process of the node this is.
    """
    os.environ["MC_RPC_TIMEOUT_MS"] = str(spec.rpc_timeout_ms)
    if spec.late_reads:
        _fail_and_write_late(spec.late_reads)
    if spec.connector == "AscendStoreConnector" or spec.pool:
        hurt_stores(spec, part, noted)
    match spec.sabotage:
        case "confirm_anything":
            _confirm_anything()
        case "one_shard_will_do":
            _one_shard_will_do()
        case "no_pins":
            _no_pins()
        case "puts_at_once":
            _puts_at_once()


noted: list[tuple[str, str]] = []
"""What happened in this process: ("fault", kind) for what was done to it, ("seen", kind)."""


def take_noted():
    """What happened since the last call, as events for the harness."""
    taken = noted[:]
    del noted[: len(taken)]
    return taken


def _fail_and_write_late(share: float) -> None:
    """A share of all reads fails at once, and is carried out all the same a little later.

    That is what a transfer engine may do that gives up on a connection (see
    ``TransferEngine.read``); Mooncake does it rarely.
    """
    from kvpp_connect.connectors.mooncake_engine import MooncakeEngine
    from kvpp_connect.errors import PeerError

    read = MooncakeEngine.read

    def unreliable(self, *arguments):
        if random.random() >= share:
            read(self, *arguments)
            return

        failed = time.monotonic()

        def write_late():
            time.sleep(random.uniform(0.1, LATE_WRITE_S))
            if time.monotonic() - failed > LATE_WRITE_S + 0.5:
                return  # the machine paused: no engine writes that late
            try:
                read(self, *arguments)
            except PeerError:
                return  # the source is gone meanwhile

        noted.append(("fault", "read fails and writes late"))
        threading.Thread(target=write_late, daemon=True).start()
        raise PeerError("given up, but not forgotten")

    MooncakeEngine.read = unreliable


def _confirm_anything() -> None:
    """A reader that takes each of its leases for held, without asking."""
    from kvpp_connect.connectors.mooncake_v2 import wire
    from kvpp_connect.connectors.mooncake_v2.control import ControlClient

    ask = ControlClient.ask

    def confident(self, question, **more):
        if isinstance(question, wire.Confirm):
            return wire.LeaseAnswer(wire.LeaseState.HELD)
        return ask(self, question, **more)

    ControlClient.ask = confident


def _one_shard_will_do() -> None:
    """A look-up that takes a block for complete when it finds the first of its objects."""
    from kvpp_connect.connectors.ascend_store.lookups import LookupService

    ask_about = LookupService.ask_about
    LookupService.ask_about = lambda self, shards: ask_about(self, shards[:1])


def _no_pins() -> None:
    """A scheduler side that lets requests' blocks go while they are being stored."""
    from kvpp_connect.seam.api import PoolPins

    PoolPins.pin = PoolPins.unpin = lambda self, block_ids: None


def _puts_at_once() -> None:
    """A scheduler side that stores what a step has computed whatever that step could not load."""
    from kvpp_connect.connectors.ascend_store.scheduler_side import SchedulerSide

    take_orders = SchedulerSide.take_orders

    def take(self, step):
        return take_orders(self, dataclasses.replace(step, has_sync_loads=False))

    SchedulerSide.take_orders = take
