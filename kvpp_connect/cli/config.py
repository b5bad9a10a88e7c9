"""`kvpp config`: what a node's server is started with, checked as the server will check it."""

import json
import shlex
from typing import Annotated

import typer

from kvpp_connect.cli.nodes import (
    Kind,
    Node,
    Side,
    additional_config,
    check_node,
    transfer_config,
)
from kvpp_connect.cli.output import AsJson, Pp, print_json


def config(
    kind: Annotated[Kind, typer.Argument(help="What the node does; multi: P/D and a pool.")],
    model: Annotated[str, typer.Argument(help="For the command line.")] = "MODEL",
    *,
    side: Annotated[
        Side | None, typer.Option(help="With multi: the node's part in P/D. Default: prefill.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size.")] = 1,
    pp: Pp = 1,
    kvpp: Annotated[
        bool | None,
        typer.Option(help="KVPP. Default: on with --tp 2 or more, but not on a decode node."),
    ] = None,
    mode: Annotated[str, typer.Option(help="kvpp.mode: auto, full or compact.")] = "",
    host: Annotated[str, typer.Option(help="Address at which peers reach this node.")] = "",
    protocol: Annotated[str, typer.Option(help="Of transfers: tcp, rdma or ascend.")] = "",
    control_port: Annotated[
        int | None, typer.Option(help="Port at which decode nodes ask a prefill node.")
    ] = None,
    secret_file: Annotated[str, typer.Option(help="Secret that P/D nodes share.")] = "",
    backend: Annotated[str, typer.Option(help="The pool's store.")] = "mooncake",
    master_address: Annotated[str, typer.Option(help="HOST:PORT of the mooncake_master.")] = "",
    segment_size: Annotated[
        str, typer.Option(help="Memory that each rank lends to the pool, as 4GB.")
    ] = "",
    namespace: Annotated[
        str, typer.Option(help="In the pool; nodes of another one share nothing.")
    ] = "",
    store_decoded: Annotated[
        bool, typer.Option("--store-decoded", help="Let a decode node put blocks into the pool.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print what to start a node's server with, checked as the server checks it.

    To be run on the node itself: files that options or the environment name are read.

    \b
    Example: a prefill node
      $ kvpp config prefill /models/DeepSeek-R1 --tp 8 --control-port 7000
    Example: a decode node with a pool beside P/D that stores what it decoded
      $ kvpp config multi /models/DeepSeek-R1 --side decode --tp 8 \\
          --master-address 10.0.0.5:50051 --store-decoded
    """
    node = Node(
        kind=kind,
        side=side,
        tp=tp,
        pp=pp,
        kvpp=kvpp,
        mode=mode,
        host=host,
        protocol=protocol,
        control_port=control_port,
        secret_file=secret_file,
        backend=backend,
        master_address=master_address,
        segment_size=segment_size,
        namespace=namespace,
        store_decoded=store_decoded,
    )
    check_node(node)
    arguments = _arguments(node)
    if as_json:
        document = {
            "arguments": [word for pair in arguments for word in pair],
            "additional_config": additional_config(node),
            "kv_transfer_config": transfer_config(node),
        }
        print_json("config", document)
    else:
        lines = [f"vllm serve {shlex.quote(model)}"]
        lines += [f"{flag} {shlex.quote(value)}" for flag, value in arguments]
        typer.echo(" \\\n    ".join(lines))


def _arguments(node: Node) -> list[tuple[str, str]]:
    """Flags of `vllm serve` and their values."""
    additional = additional_config(node)
    return [
        ("--tensor-parallel-size", str(node.tp)),
        *([("--pipeline-parallel-size", str(node.pp))] if node.pp > 1 else []),
        *([("--additional-config", json.dumps(additional))] if additional else []),
        ("--kv-transfer-config", json.dumps(transfer_config(node))),
    ]
