"""What the servers say to a deployment that KVPP cannot run, before any memory is allocated."""

import pytest

from kvpp_connect.demo.process import ServerError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def refusal(describe, run_servers, name, **settings):
    with pytest.raises(ServerError) as error, run_servers(describe(name, **settings)):
        pass
    return str(error.value)


def test_a_group_of_one_rank(describe, run_servers):
    text = refusal(describe, run_servers, "alone", ranks=1, kvpp={})
    assert "the KVPP group (tensor parallel x prefill context parallel) has 1 rank" in text


def test_a_connector_that_does_not_know_owners(describe, run_servers):
    kv = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    text = refusal(describe, run_servers, "stranger", ranks=2, kvpp={}, kv=kv)
    assert "connector 'ExampleConnector' does not know" in text


def test_a_misspelt_connector_key(describe, run_servers):
    kv = {
        "kv_connector": "MooncakeConnectorV2",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"lease": 5},
    }
    text = refusal(describe, run_servers, "misspelt", kv=kv)
    assert "unknown key 'lease'; did you mean 'lease_s'?" in text


def test_a_connector_that_vllm_would_put_in_after_all_checks(describe, run_servers):
    more = ("--kv-offloading-size", "1")
    text = refusal(describe, run_servers, "offloading", ranks=2, kvpp={}, args=more)
    assert "kv_offloading_size brings a connector that does not know" in text
