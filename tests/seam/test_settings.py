"""Refusals: each names the setting and the way out. One test each."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from builders import bundle_stage
from vllm.config import CUDAGraphMode

from kvpp_connect.config import KvppConfig
from kvpp_connect.errors import ConfigError
from kvpp_connect.seam import install
from kvpp_connect.seam.settings import (
    KVPP_SCHEDULERS,
    ModeChoice,
    check_connector,
    check_supported,
    choose_mode,
    settle_mode,
)
from kvpp_connect.seam.worker import KvppWorkerMixin

OURS = "kvpp_connect.connectors"


def connector(name, path=OURS):
    return SimpleNamespace(kv_connector=name, kv_connector_module_path=path)


def multi(*names, path=None):
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    return SimpleNamespace(
        kv_connector="MultiConnector",
        kv_connector_module_path=path,
        kv_connector_extra_config={"connectors": children} if names else {},
    )


OWN = ("MooncakeConnectorV2", "AscendStoreConnector")


def speculation(method="mtp", *, dynamic=False, adaptive=False, mla=None):
    return SimpleNamespace(
        method=method,
        draft_model_config=None if mla is None else SimpleNamespace(use_mla=mla),
        uses_dynamic_speculative_decoding=lambda: dynamic,
        enable_adaptive_verification=adaptive,
    )


def deployment(**changes):
    """A supported deployment; changes are written ``part__setting=value``."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="m",
            is_hybrid=False,
            use_mla=True,
            max_model_len=1024,
            original_max_model_len=1024,
        ),
        cache_config=SimpleNamespace(block_size=16, kv_offloading_size=None),
        scheduler_config=SimpleNamespace(
            scheduler_cls=None, async_scheduling=False, max_num_seqs=4
        ),
        use_v2_model_runner=False,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            enable_dbo=False,
            enable_elastic_ep=False,
            worker_cls="auto",
        ),
        speculative_config=None,
        kv_transfer_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
        attention_config=SimpleNamespace(hisparse_config=None),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    for name, value in changes.items():
        part, _, setting = name.partition("__")
        if setting:
            setattr(getattr(config, part), setting, value)
        else:
            setattr(config, part, value)
    return config


def test_a_supported_deployment_passes():
    check_supported(deployment())
    check_supported(deployment(parallel_config__prefill_context_parallel_size=2))
    check_supported(deployment(kv_transfer_config=connector("MooncakeConnectorV2")))
    check_supported(deployment(kv_transfer_config=multi(*OWN)))
    check_supported(deployment(kv_transfer_config=multi(*reversed(OWN))))
    check_supported(deployment(compilation_config__cudagraph_mode=CUDAGraphMode.PIECEWISE))
    check_supported(deployment(speculative_config=speculation()))
    check_supported(deployment(speculative_config=speculation(), use_v2_model_runner=True))
    check_supported(deployment(speculative_config=speculation("eagle", mla=True)))


def test_a_worker_refuses_a_connector_that_came_into_the_configuration_later():
    """As with --kv-offloading-size, which vLLM turns into one when all checks are over."""
    check_connector(deployment(kv_transfer_config=connector("MooncakeConnectorV2")))
    worker = KvppWorkerMixin()
    worker.vllm_config = deployment(kv_transfer_config=connector("OffloadingConnector", None))
    with pytest.raises(ConfigError, match=r"connector 'OffloadingConnector'.*garbage"):
        worker._kvpp_runtime()  # noqa: SLF001 - what every entry asks for first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_config": None}, "there is no model_config"),
        ({"model_config__use_mla": False}, "does not use MLA.*Turn enable_kvpp off"),
        ({"model_config__is_hybrid": True}, "is hybrid.*Turn enable_kvpp off"),
        ({"parallel_config__tensor_parallel_size": 1}, "has 1 rank.*--tensor-parallel-size 2"),
        (
            {"parallel_config__decode_context_parallel_size": 2},
            "decode_context_parallel_size is 2.*--decode-context-parallel-size 1",
        ),
        (
            {"speculative_config": speculation(dynamic=True)},
            "num_speculative_tokens_per_batch_size.*Set num_speculative_tokens alone",
        ),
        (
            {"speculative_config": speculation("extract_hidden_states")},
            "'extract_hidden_states'.*remove --speculative-config",
        ),
        ({"parallel_config__enable_dbo": True}, "enable_dbo.*Remove --enable-dbo"),
        ({"parallel_config__ubatch_size": 2}, "ubatch_size is 2.*Remove --ubatch-size"),
        ({"parallel_config__enable_elastic_ep": True}, "enable_elastic_ep.*Remove"),
        (
            {"compilation_config__cudagraph_mode": CUDAGraphMode.FULL},
            "cudagraph_mode FULL.*PIECEWISE",
        ),
        (
            {"compilation_config__cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE},
            "FULL_AND_PIECEWISE",
        ),
        ({"attention_config__hisparse_config": object()}, "HiSparse.*Remove"),
        ({"cache_config__kv_offloading_size": 4.0}, "Remove --kv-offloading-size"),
        (
            {"speculative_config": speculation("eagle3", mla=False)},
            "draft model of method 'eagle3' does not use MLA.*remove --speculative-config",
        ),
        ({"kv_transfer_config": connector("NixlConnector", None)}, "'NixlConnector'.*garbage"),
        (
            {"kv_transfer_config": connector("MooncakeConnectorV2", "vllm_ascend.distributed")},
            "'MooncakeConnectorV2' of 'vllm_ascend.distributed'",
        ),
        ({"kv_transfer_config": multi()}, "connectors of MultiConnector is None.*one object"),
        (
            {"kv_transfer_config": multi(*OWN, "ExampleConnector")},
            r"'ExampleConnector' .*connectors\[2\].*garbage. Remove it",
        ),
        (
            {"kv_transfer_config": multi(*OWN, path="elsewhere")},
            "'MultiConnector' of 'elsewhere'.*Use one of these",
        ),
        ({"kv_transfer_config": multi("MultiConnector")}, "'MultiConnector' .*connectors.0."),
    ],
)
def test_what_is_not_supported_is_refused_with_the_way_out(changes, message):
    with pytest.raises(ConfigError, match=f"enable_kvpp: .*{message}"):
        check_supported(deployment(**changes))


def test_enabling_selects_the_worker_and_may_be_repeated():
    config = deployment()
    for chosen in ("auto", "vllm.v1.worker.cpu_worker.CPUWorker", None):
        chosen = chosen or config.parallel_config.worker_cls
        install.enable(config, KvppConfig(enabled=True), chosen)
        assert config.parallel_config.worker_cls == "kvpp_connect.seam.cpu_worker.KvppCPUWorker"


def test_compact_is_the_default_and_brings_its_scheduler():
    config = deployment()
    assert choose_mode(config, KvppConfig(enabled=True)).mode == "compact"
    for asynchronous, scheduler in enumerate(KVPP_SCHEDULERS):
        config.scheduler_config.async_scheduling = bool(asynchronous)
        install.enable(config, KvppConfig(enabled=True), "auto")
        assert config.scheduler_config.scheduler_cls == scheduler
        assert choose_mode(config, KvppConfig(enabled=True)).mode == "compact"


def test_compact_is_the_default_with_model_runner_v2_as_well():
    config = deployment(use_v2_model_runner=True)
    assert choose_mode(config, KvppConfig(enabled=True)) == ModeChoice("compact")


def test_full_leaves_the_scheduler_alone():
    config = deployment()
    install.enable(config, KvppConfig(enabled=True, mode="full"), "auto")
    assert config.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"speculative_config": speculation("dspark", adaptive=True)},
            "adaptive draft verification.*set enable_adaptive_verification to false",
        ),
        ({"scheduler_config__scheduler_cls": "mine.S"}, "scheduler_cls is 'mine.S'.*remove"),
        ({"model_config__original_max_model_len": -1}, "max-model-len auto.*running_tokens"),
    ],
)
def test_where_compact_is_not_possible_auto_is_full_and_says_why(changes, reason):
    config = deployment(**changes)
    choice = choose_mode(config, KvppConfig(enabled=True))
    assert choice.mode == "full"
    assert re.search(reason, choice.reason)
    with pytest.raises(ConfigError, match=f"kvpp.mode compact is not possible: .*{reason}"):
        install.enable(config, KvppConfig(enabled=True, mode="compact"), "auto")


def test_a_length_that_is_not_known_needs_running_tokens():
    config = deployment(model_config__original_max_model_len=-1)
    asked = KvppConfig(enabled=True, running_tokens=4096)
    assert choose_mode(config, asked).mode == "compact"


def test_a_foreign_worker_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"worker_cls is 'mine\.Worker'.*Remove --worker-cls"):
        install.enable(deployment(), KvppConfig(enabled=True), "mine.Worker")


def test_a_device_without_support_is_refused_by_name():
    with pytest.raises(ConfigError, match="device type 'xpu' is not supported"):
        install.enable(
            deployment(device_config__device_type="xpu"), KvppConfig(enabled=True), "auto"
        )


THREE_COMPONENTS = bundle_stage([[4], [4, 2, 2]])


def test_layers_with_three_components_run_in_full_mode_with_one_line_that_says_why():
    choice, scratch = settle_mode(deployment(), KvppConfig(enabled=True), THREE_COMPONENTS)
    assert choice == ModeChoice(
        "full",
        "a layer has 3 cache components, the blocks of at most 2 form one range; running requests "
        "are held to compact's share of the blocks, kvpp.mode full lifts that",
    )
    assert scratch.blocks(1000) == 1000
    asked_full = KvppConfig(enabled=True, mode="full")
    assert settle_mode(deployment(), asked_full, THREE_COMPONENTS)[0] == ModeChoice("full")


def test_layers_with_three_components_are_refused_where_compact_is_asked_for():
    with pytest.raises(ConfigError, match="mode compact is not possible: a layer has 3 cache"):
        settle_mode(deployment(), KvppConfig(enabled=True, mode="compact"), THREE_COMPONENTS)


def test_layers_with_two_components_run_in_compact_mode():
    choice, scratch = settle_mode(
        deployment(), KvppConfig(enabled=True), bundle_stage([[4], [4, 2]])
    )
    assert choice == ModeChoice("compact")
    assert scratch.blocks(1000) == 250
