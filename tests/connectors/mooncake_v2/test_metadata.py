import json

import pytest

from kvpp_connect.connectors.mooncake_v2.metadata import (
    handover_params,
    parse_remote_prefill,
    prompt_digest,
)
from kvpp_connect.connectors.mooncake_v2.wire import LeaseRef
from kvpp_connect.errors import PeerError

LEASE = LeaseRef(incarnation="inc", request_id="cmpl-1", generation=3)


def params():
    return handover_params(
        engine_id="e",
        host="h",
        port=5,
        lease=LEASE,
        lease_s=12.5,
        block_ids=[4, 2],
        prompt=[1, 2, 3],
    )


def test_the_existing_convention_is_kept():
    assert {key: value for key, value in params().items() if key != "kvpp_connect"} == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e",
        "remote_host": "h",
        "remote_port": 5,
        "remote_request_id": "cmpl-1",
        "remote_block_ids": [4, 2],
    }


def test_a_handover_survives_json():
    remote = parse_remote_prefill(json.loads(json.dumps(params())))
    assert (remote.lease, remote.lease_s) == (LEASE, 12.5)
    assert (remote.host, remote.port, remote.block_ids) == ("h", 5, (4, 2))
    assert (remote.prompt_tokens, remote.prompt_digest) == (3, prompt_digest([1, 2, 3]))


@pytest.mark.parametrize("key", ["remote_host", "remote_port", "remote_block_ids", "kvpp_connect"])
def test_a_missing_key_is_named(key):
    damaged = params()
    del damaged[key]
    with pytest.raises(PeerError, match=key):
        parse_remote_prefill(damaged)


def test_a_wrong_type_is_named():
    with pytest.raises(PeerError, match="remote_port"):
        parse_remote_prefill(params() | {"remote_port": "x"})


@pytest.mark.parametrize("lease_s", [0, -1, 1e9, float("nan"), float("inf"), "1", None])
def test_a_lease_of_no_sensible_length_is_named(lease_s):
    damaged = params()
    damaged["kvpp_connect"] |= {"lease_s": lease_s}
    with pytest.raises(PeerError, match="lease_s"):
        parse_remote_prefill(damaged)


def test_prompts_that_differ_in_one_token_differ_in_digest():
    assert prompt_digest([1, 2, 3]) != prompt_digest([1, 2, 4])
    assert prompt_digest([1, 2, 3]) != prompt_digest([1, 2])
