import urllib.error

import pytest

from kvpp_connect.demo.client import CompletionClient, sum_samples
from kvpp_connect.demo.fleet import Fleet
from kvpp_connect.demo.local_http import get_text
from kvpp_connect.demo.ports import free_ports
from kvpp_connect.errors import PeerError

METRICS = """\
# HELP vllm:kvpp_pull_bytes_total bytes
# TYPE vllm:kvpp_pull_bytes_total counter
vllm:kvpp_pull_bytes_total{engine="0",rank="0"} 1.5e+06
vllm:kvpp_pull_bytes_total{engine="0",rank="1",note="a } b"} 500000.0
vllm:kvpp_pull_bytes_created{engine="0"} 1.79e+09
vllm:kvpp_pull_bytes_total_other 7
plain_total 3
"""


def test_counters_are_summed_over_all_label_sets():
    assert sum_samples(METRICS, "vllm:kvpp_pull_bytes_total") == 2_000_000
    assert sum_samples(METRICS, "plain_total") == 3


def test_an_absent_counter_is_not_zero():
    assert sum_samples(METRICS, "vllm:kvpp_pull_bytes") is None
    assert sum_samples("", "plain_total") is None


def test_a_time_out_while_connecting_is_one_too(monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError(TimeoutError("timed out"))

    monkeypatch.setattr("kvpp_connect.demo.local_http._OPENER.open", refuse)
    with pytest.raises(PeerError, match="did not answer within 3 s"):
        get_text("http://127.0.0.1:1/", timeout_s=3)


def test_a_server_that_is_not_there_is_a_peer_error():
    client = CompletionClient(url=f"http://127.0.0.1:{free_ports(1)[0]}", model="m")
    with pytest.raises(PeerError, match="gave no answer"):
        client.complete("A", max_tokens=1)


@pytest.mark.distributed
@pytest.mark.timeout(60)
def test_answers_come_in_the_order_of_the_prompts_whatever_the_concurrency(fake, tmp_path):
    prompts = ["A" * n for n in range(1, 20)]
    done = []
    with Fleet(tmp_path) as fleet:
        (server,) = fleet.start([fake(pull=1)], timeout_s=30)
        client = CompletionClient(url=server.url, model="m", timeout_s=10)
        alone = [client.complete(prompt, max_tokens=4) for prompt in prompts]
        together = client.complete_all(
            prompts, max_tokens=4, concurrency=4, done=lambda: done.append(1)
        )
        counters = client.counters(["vllm:kvpp_pull_tokens_total", "absent_total"])
    assert [x.token_ids for x in together] == [x.token_ids for x in alone]
    assert [x.prompt_tokens for x in together] == list(range(1, 20))
    assert len(done) == len(prompts)
    assert counters == {"vllm:kvpp_pull_tokens_total": 2 * sum(range(1, 20))}


@pytest.mark.distributed
@pytest.mark.timeout(60)
def test_a_server_that_dies_in_the_middle_of_the_requests_is_a_peer_error(fake, tmp_path):
    with Fleet(tmp_path) as fleet:
        (server,) = fleet.start([fake(die_after=3)], timeout_s=30)
        client = CompletionClient(url=server.url, model="m", timeout_s=10)
        with pytest.raises(PeerError):
            client.complete_all(["A"] * 10, max_tokens=4, concurrency=4)


@pytest.mark.distributed
@pytest.mark.timeout(60)
def test_an_answer_with_another_number_of_tokens_is_a_peer_error(fake, tmp_path):
    with Fleet(tmp_path) as fleet:
        (server,) = fleet.start([fake()], timeout_s=30)
        client = CompletionClient(url=server.url, model="m", timeout_s=10)
        with pytest.raises(PeerError, match="64 tokens, expected 65"):
            client.complete("A", max_tokens=65)
