"""What `kvpp doctor` says about NPUs, with packages, commands and files played by the test."""

import pytest

pytest.importorskip("vllm")

from kvpp_connect.cli import ascend_probes

GOOD = {
    "vllm-ascend": "0.26.0rc1",
    "torch": "2.10.0",
    "torch-npu": "2.10.0.post2",
    "mooncake-transfer-engine-npu": "0.3.13",
}
ROW = (
    "| {}     910B3               | OK              | 93.4        36                0    / 0   |\n"
)
SMI = (
    "| npu-smi 25.2.0                   Version: 25.2.0                                |\n"
    "| NPU   Name                | Health          | Power(W)    Temp(C)  Hugepages-Usage(page)|\n"
    "| Chip                      | Bus-Id          | AICore(%)   Memory-Usage(MB)              |\n"
    + "".join(
        ROW.format(number) + "| 0    | 0000:C1:00.0    | 0     0 / 0     3373 / 65536 |\n"
        for number in range(8)
    )
)


@pytest.fixture
def found(tmp_path, monkeypatch):
    """States and words by topic, on a machine where nothing is wrong but what a test says."""
    monkeypatch.setattr(ascend_probes.ascend, "has_own_kvpp", lambda: False)
    cann = tmp_path / "cann"
    (cann / "aarch64-linux").mkdir(parents=True)
    (cann / "aarch64-linux" / "ascend_toolkit_install.info").write_text(
        "package_name=Ascend-cann-toolkit\nversion=8.5.0\n"
    )
    hccn = tmp_path / "hccn.conf"
    hccn.write_text("".join(f"address_{n}=10.1.0.{n}\nnetmask_{n}=255.255.0.0\n" for n in range(8)))

    def look(*, smi=SMI, ranks=8, without=(), more=None, files=True, **environment):
        installed = {k: v for k, v in (GOOD | (more or {})).items() if k not in without}
        cann_home = {"ASCEND_HOME_PATH": str(cann if files else tmp_path / "none")}
        return {
            finding.topic: finding
            for finding in ascend_probes.probe(
                installed,
                ranks,
                transfers=True,
                run={"npu-smi info": smi}.__getitem__,
                environment=cann_home | environment,
                hccn=hccn if files else tmp_path / "none",
            )
        }

    return look


def test_on_a_good_machine_nothing_would_fail_and_the_situation_is_stated(found):
    good = found()
    assert {finding.state for finding in good.values()} == {"ok"}
    assert "no KVPP of its own: kvpp-connect serves the layers" in good["vllm-ascend"].said
    assert good["CANN"].said.startswith("8.5.0 in ")
    assert good["NPUs"].said == "8 x 910B3"
    assert good["HCCN"].said.startswith("8 addresses")


def test_a_vllm_ascend_with_a_kvpp_of_its_own_is_told_apart(found, monkeypatch):
    monkeypatch.setattr(ascend_probes.ascend, "has_own_kvpp", lambda: True)
    own = found(more={"vllm-ascend": "0.30.0rc2"})["vllm-ascend"]
    assert (own.state, own.said) == (
        "ok",
        "0.30.0rc2 has a KVPP of its own, which serves the layers",
    )


@pytest.mark.parametrize(
    ("topic", "state", "said", "way_out", "settings"),
    [
        ("vllm-ascend", "fail", "not installed", "[ascend]", {"without": ["vllm-ascend"]}),
        ("vllm-ascend", "note", "known is", "by name", {"more": {"vllm-ascend": "0.23.0"}}),
        ("torch-npu", "fail", "not installed", "names", {"without": ["torch-npu"]}),
        ("torch-npu", "fail", "another torch than 2.9.1", "2.10.0", {"more": {"torch": "2.9.1"}}),
        ("CANN", "fail", "not found", "set_env.sh", {"files": False}),
        ("NPUs", "fail", "shows none", "davinci", {"smi": ""}),
        ("NPUs", "fail", "for 16 tensor parallel", "size 8", {"ranks": 16}),
        ("NPUs", "note", "not healthy: 3", "VISIBLE", {"smi": SMI.replace(
            ROW.format(3), ROW.format(3).replace("OK    ", "Critical")
        )}),
        ("HCCN", "fail", "no address", "hccn_tool", {"files": False}),
        ("environment", "fail", "HCCL_BUFFSIZE is '200MB'", "unset", {"HCCL_BUFFSIZE": "200MB"}),
        (
            "environment",
            "fail",
            "with enable_kvpp HCCL_OP_EXPANSION_MODE is 'AIV'",
            "unset HCCL_OP_EXPANSION_MODE",
            {"HCCL_OP_EXPANSION_MODE": "AIV"},
        ),
        ("mooncake for NPUs", "fail", "is not installed", "pip install", {
            "without": ["mooncake-transfer-engine-npu"]
        }),
        ("mooncake for NPUs", "fail", "same folder", "uninstall", {
            "more": {"mooncake-transfer-engine-non-cuda": "0.3.13"}
        }),
    ],
)  # fmt: skip
def test_what_is_wrong_has_a_way_out(found, topic, state, said, way_out, settings):
    finding = found(**settings)[topic]
    assert finding.state == state
    assert said in finding.said
    assert way_out in finding.way_out


def test_an_environment_that_selects_model_runner_v2_is_worth_a_note():
    finding = next(
        f for f in ascend_probes.probe(
            GOOD, 1, transfers=False, run=lambda command: SMI,
            environment={"VLLM_USE_V2_MODEL_RUNNER": "1"},
        ) if f.topic == "environment"
    )  # fmt: skip
    assert (finding.state, finding.way_out) == ("note", "VLLM_USE_V2_MODEL_RUNNER=0")
