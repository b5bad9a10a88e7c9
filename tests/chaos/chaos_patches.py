"""What processes of a node are changed to do: a transfer engine at its worst, negative controls."""

import random
import threading
import time

from chaos_spec import LATE_WRITE_S, NodeSpec


def apply_patches(spec: NodeSpec) -> None:
    """Change this process as its node's description says."""
    if spec.late_reads:
        _fail_and_write_late(spec.late_reads)
    if spec.sabotage == "confirm_anything":
        _confirm_anything()


late_reads: list[None] = []
"""One entry for each read that failed and wrote later, in this process."""


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

        def write_late():
            time.sleep(random.uniform(0.1, LATE_WRITE_S))
            try:
                read(self, *arguments)
            except PeerError:
                return  # the source is gone meanwhile

        late_reads.append(None)
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
