import pytest
from planning_tools import MLA, write_config

R1 = ("plan", "DeepSeek-R1", "--tp", "8", "--kv-memory", "40GiB")


def test_all_layouts_stand_side_by_side(kvpp):
    document = kvpp(*R1, "--json").document
    assert [entry["variant"] for entry in document["capacities"]] == [
        "plain",
        "dcp",
        "full",
        "compact",
    ]
    plain, dcp, full, compact = document["capacities"]
    assert plain["blocks"] == 40 * 2**30 // (61 * 64 * 1152)
    assert dcp["tokens"] == pytest.approx(8 * plain["tokens"], rel=1e-3)
    assert full["formula"] == pytest.approx(61 / (8 + 2))
    assert full["tokens"] < compact["tokens"] < 8 * plain["tokens"]
    assert document["owned_layers"] == [[8, 8, 8, 8, 8, 7, 7, 7]]
    assert document["limit"] == 8


def test_the_table_says_what_the_document_says(kvpp):
    document, text = kvpp(*R1, "--json").document, kvpp(*R1).stdout
    for entry in document["capacities"]:
        assert f"{entry['blocks']:,}" in text
        assert f"{entry['tokens']:,}" in text
        assert f"x{entry['ratio']:.2f}" in text
    assert "8 8 8 8 8 7 7 7" in text


def test_the_servers_of_the_demo(kvpp, tmp_path):
    """14,464 tokens plain and 17,360 with KVPP is what they log."""
    done = kvpp(
        *("plan", write_config(tmp_path, MLA), "--tp", "2", "--kv-memory", "200000000"),
        *("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8", "--json"),
    )
    tokens = {entry["variant"]: entry["tokens"] for entry in done.document["capacities"]}
    assert tokens["plain"] == 14_464
    assert tokens["full"] == 17_360


def test_broadcasts_against_a_link(kvpp):
    step = ("--batch", "16", "--context", "8192")
    link = ("--link", "50GB/s", "--layer-time", "5ms")
    full, compact = kvpp(*R1, *step, *link, "--json").document["broadcasts"]
    assert compact["blocks"] == 16 * 128
    assert compact["layer_bytes"] == 16 * 128 * 64 * 1152
    assert compact["step_bytes"] == 61 * compact["layer_bytes"]
    assert compact["hidden"] is True
    assert full["hidden"] is False
    assert full["step_bytes"] > compact["step_bytes"]
    assert "all but the first" in kvpp(*R1, *step, *link).stdout
    assert "all but the first" not in kvpp(*R1, *step).stdout


def test_a_step_that_does_not_run_at_once_is_said(kvpp):
    done = kvpp(*R1, "--batch", "100000", "--context", "8192")
    assert "run at once; the rest waits" in done.stdout


def test_the_plot_is_drawn(kvpp):
    text = kvpp(*R1, "--plot").stdout
    assert "########" in text
    assert "full mode by ranks in the group, 61 equal layers" in text
    assert "full mode by ranks" not in kvpp(*R1).stdout


def test_stages_and_mtp_layers(kvpp):
    document = kvpp(*R1, "--pp", "2", "--mtp", "1", "--json").document
    assert document["owned_layers"] == [
        [4, 4, 4, 4, 4, 4, 4, 3],
        [4, 4, 4, 4, 4, 4, 3, 3],
    ]
    assert [entry["name"] for entry in document["components"]] == ["attn", "attn (MTP)"]
    text = kvpp(*R1, "--pp", "2", "--mtp", "1").stdout
    assert "61 layers and 1 MTP, 2 stages" in text
    assert "stage 1: layers owned per rank" in text


def test_a_layout_that_does_not_start_is_said(kvpp):
    done = kvpp("plan", "DeepSeek-R1", "--tp", "8", "--kv-memory", "100MB")
    assert done.code == 0
    assert "plain does not start: one request of 163840 tokens needs 2560 blocks" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "DeepSeek-R1", "--tp", "7", "--kv-memory", "1GiB"), "does not divide the 128"),
        (("plan", "DeepSeek-R1", "--tp", "8", "--kv-memory", "0"), "--kv-memory is '0'"),
        ((*R1, "--link", "1GB/s"), "--link and --layer-time belong together"),
        ((*R1, "--link", "1GB/s", "--layer-time", "1s"), "--link needs --batch and --context"),
        ((*R1, "--batch", "1"), "--batch and --context belong together"),
        ((*R1, "--batch", "0", "--context", "1"), "--batch is 0"),
        ((*R1, "--c8", "main"), "add --device npu"),
        ((*R1, "--running-tokens", "5"), "running_tokens is 5"),
        ((*R1, "--max-model-len", "-1"), "--max-model-len is -1"),
        (("plan", "absent", "--tp", "8", "--kv-memory", "1GiB"), "absent: no such file"),
    ],
)
def test_bad_input_is_one_line(kvpp, arguments, message):
    done = kvpp(*arguments)
    assert done.code == 1
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
