"""What can be said about vllm-ascend without having it."""

import subprocess
import sys
import textwrap
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
from builders import bundle_stage
from noting_engine import NotingEngine

pytest.importorskip("vllm")

import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from kvpp_connect.config import KvppConfig
from kvpp_connect.errors import ConfigError, SeamError
from kvpp_connect.layout import CacheComponent, place_rank, plan_group, stage_layers, tensor_name
from kvpp_connect.platforms.ascend import group_options
from kvpp_connect.seam import api, ascend
from kvpp_connect.seam.ascend_caches import PlacedCaches, tensor_bytes, with_indexers
from kvpp_connect.seam.ascend_hooks import AscendLayerHooks

pytestmark = pytest.mark.timeout(300)  # a fresh process imports vLLM

MAIN, INDEXER = "model.layers.{}.self_attn.attn", "model.layers.{}.self_attn.indexer.k_cache"


def test_where_vllm_ascend_is_installed_the_plugin_takes_no_connector_name(tmp_path):
    (tmp_path / "vllm_ascend").mkdir()
    (tmp_path / "vllm_ascend" / "__init__.py").touch()
    code = f"""
        import sys
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
        import kvpp_connect.plugin
        before = set(factory._registry)
        sys.path.insert(0, {str(tmp_path)!r})
        kvpp_connect.plugin.register()
        print(sorted(set(factory._registry) - before))
        sys.path.pop(0)
        kvpp_connect.plugin.register()
        print(sorted(set(factory._registry) - before))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    both = "['AscendStoreConnector', 'MooncakeConnectorV2']"
    assert done.stdout.splitlines()[-2:] == ["[]", both]


def test_options_of_our_runtime_are_refused_where_the_host_serves_the_layers():
    ascend.leave_to_host(KvppConfig(enabled=True))
    with pytest.raises(ConfigError, match=r"additional_config.kvpp.*Remove them"):
        ascend.leave_to_host(KvppConfig(enabled=True, mode="full"))


@pytest.mark.parametrize("mode", ["AIV", "AIV_ONLY", "aiv"])
def test_collectives_on_vector_cores_are_refused(mode):
    said = ascend.expansion_problem({"HCCL_OP_EXPANSION_MODE": mode})
    assert f"HCCL_OP_EXPANSION_MODE is {mode!r}" in said
    assert "Unset it" in said


def test_collectives_elsewhere_pass():
    assert ascend.expansion_problem({"HCCL_OP_EXPANSION_MODE": "AI_CPU"}) == ""
    assert ascend.expansion_problem({}) == ""


@pytest.mark.parametrize(
    ("own_kvpp", "asked", "settled"),
    [
        (False, None, CUDAGraphMode.PIECEWISE),
        (False, CUDAGraphMode.FULL, CUDAGraphMode.FULL),  # refused later
        (True, None, None),
    ],
)
def test_graphs_that_the_user_left_open_leave_attention_out(monkeypatch, own_kvpp, asked, settled):
    monkeypatch.setattr(ascend, "has_own_kvpp", lambda: own_kvpp)
    compilation = SimpleNamespace(cudagraph_mode=asked)
    ascend.settle_defaults(SimpleNamespace(compilation_config=compilation, optimization_level=2))
    assert compilation.cudagraph_mode is settled


def loading(device, steps):
    """A prefill node whose pool loads."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role="kv_producer"),
        device_config=SimpleNamespace(device_type=device),
        max_concurrent_batches=steps,
    )


def test_the_role_by_which_vllm_ascend_chooses_kernels_is_left_to_the_user():
    config = loading("cpu", 2)
    api.expect_loads(config, "C")
    assert config.kv_transfer_config.kv_role == "kv_both"
    config = loading("npu", 1)
    api.expect_loads(config, "C")
    assert config.kv_transfer_config.kv_role == "kv_producer"
    with pytest.raises(ConfigError, match=r'C loads KV.*Set "kv_role": "kv_both"'):
        api.expect_loads(loading("npu", 2), "C")


def test_the_first_npu_is_chosen_where_a_process_has_none(monkeypatch):
    chosen, in_use = [], False
    npu = SimpleNamespace(
        set_device=chosen.append, current_device=lambda: 3, is_initialized=lambda: in_use
    )
    monkeypatch.setattr(torch, "get_device_module", {"npu": npu}.__getitem__)
    for device, index in (("cpu", 0), ("npu", 3)):
        api.choose_first_device(loading(device, 1))
        assert api.device_index(loading(device, 1)) == index
    assert chosen == [0]
    in_use = True
    api.choose_first_device(loading("npu", 1))
    assert chosen == [0]


@pytest.mark.parametrize(
    ("asked", "buffer_mb"), [(None, 200), ("1024", 200), ("64", 64), ("x", 200)]
)
def test_the_kvpp_group_takes_no_more_buffer_than_it_needs(monkeypatch, asked, buffer_mb):
    """HCCL_BUFFSIZE is for the group that exchanges tokens of experts."""
    if asked is None:
        monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    else:
        monkeypatch.setenv("HCCL_BUFFSIZE", asked)
    hccl = SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=SimpleNamespace))
    package = ModuleType("torch_npu")
    package._C = SimpleNamespace(_distributed_c10d=hccl)  # noqa: SLF001 - where the vendor has it
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    options = group_options(timedelta(seconds=7))
    assert options.hccl_config == {"hccl_buffer_size": buffer_mb}
    assert options._timeout == timedelta(seconds=7)  # noqa: SLF001 - torch's name


def test_an_indexer_of_a_draft_layer_is_a_draft_as_well():
    names = [form.format(i) for i in (6, 60, 61) for form in (MAIN, INDEXER)]
    found = with_indexers({MAIN.format(6)}, names)
    assert found == {MAIN.format(6), INDEXER.format(6)}
    assert with_indexers(frozenset(), names) == frozenset()


class FakeRunner:
    """Allocates like vllm-ascend's: each tensor by itself."""

    device = torch.device("cpu")

    def __init__(self, sizes):
        self.sizes = sizes

    def _allocate_int8_cache_tensor(self, numel, alignment):
        raise AssertionError("sizes are measured without the device's memory")

    def _allocate_kv_cache_tensors(self, kv_cache_config):
        del kv_cache_config
        make = self._allocate_int8_cache_tensor
        return {n: tuple(make(s, 1) for s in sizes) for n, sizes in self.sizes.items()}


@pytest.fixture
def measure(monkeypatch):
    from kvpp_connect.seam import ascend_caches

    monkeypatch.setattr(ascend_caches, "planner_groups", lambda config, specs: [])
    monkeypatch.setattr(ascend_caches, "one_block_each", lambda groups, specs: None)

    def run(runner, pages):
        specs = {name: SimpleNamespace(page_size_bytes=page) for name, page in pages.items()}
        return tensor_bytes(runner, None, specs)

    return run


def test_sizes_are_the_runners_own(measure):
    runner = FakeRunner({"a": (64, 8), "b": (32,)})
    assert measure(runner, {"a": 72, "b": 32}) == {"a": (64, 8), "b": (32,)}
    with pytest.raises(AssertionError, match="without the device's"):
        runner._allocate_kv_cache_tensors(None)  # noqa: SLF001 - the runner is as it was


def test_a_split_that_loses_bytes_is_refused(measure):
    with pytest.raises(SeamError, match=r"splits the 72 bytes of a block of a into \(63, 8\)"):
        measure(FakeRunner({"a": (63, 8)}), {"a": 72})


def placement(rank=0, blocks=3):
    """Four layers of two tensors and a draft, over two ranks."""

    def parts(name, *sizes):
        return [
            CacheComponent(layer_name=tensor_name(name, i), page_bytes=s)
            for i, s in enumerate(sizes)
        ]

    stage = stage_layers(
        targets={i: parts(MAIN.format(i), 64, 16) for i in range(4)},
        drafts=parts("draft.attn", 32),
    )
    return place_rank(plan_group(stage, 2, 256), rank, blocks)


def serve(placement, names):
    """Tensors that the runner would bind to the layers."""
    caches = PlacedCaches(placement, 256)
    runner = FakeRunner({})
    caches.serve(runner)
    groups = [SimpleNamespace(layer_names=names)]
    raw = runner._allocate_kv_cache_tensors(  # noqa: SLF001
        SimpleNamespace(kv_cache_groups=groups)
    )
    return caches, {name: SimpleNamespace(kv_cache=tensors) for name, tensors in raw.items()}


NAMES = [*(MAIN.format(i) for i in range(4)), "draft.attn"]


def test_caches_are_cut_from_one_allocation_as_planned_and_its_base_is_aligned():
    plan = placement()
    caches, layers = serve(plan, NAMES)
    caches.check(layers)
    assert caches.memory.numel() == plan.total_bytes
    assert caches.memory.data_ptr() % 256 == 0
    assert [t.numel() for t in layers[MAIN.format(3)].kv_cache] == [192, 48]
    base = caches.memory.data_ptr()
    for place in plan.components:
        name, _, number = place.component.layer_name.partition("/")
        assert layers[name].kv_cache[int(number or 0)].data_ptr() == base + place.offset


def test_caches_that_are_bound_elsewhere_or_in_another_size_are_refused():
    caches, layers = serve(placement(), NAMES)
    right = layers[NAMES[0]].kv_cache
    layers[NAMES[0]].kv_cache = (right[0].clone(), right[1])
    with pytest.raises(SeamError, match=f"bound the cache of {NAMES[0]} at byte"):
        caches.check(layers)
    layers[NAMES[0]].kv_cache = (right[0][:-1], right[1])
    with pytest.raises(SeamError, match=f"bound 191 bytes as {NAMES[0]}, planned 192"):
        caches.check(layers)
    layers[NAMES[0]].kv_cache = (*right, right[1])
    with pytest.raises(SeamError, match=f"bound 48 bytes as {NAMES[0]}/2, planned 0"):
        caches.check(layers)


def test_a_plan_for_other_layers_is_not_served():
    with pytest.raises(SeamError, match=r"planned for other layers: draft\.attn"):
        serve(placement(), NAMES[:-1])


def hooked(log):
    """Layers with an implementation that notes its calls, behind the hooks."""

    class Layer(MLAAttention):
        def __init__(self, name):
            torch.nn.Module.__init__(self)

            def forward(layer_name, hidden, kv_cache, attn_metadata, gather=False, output=None):
                log.append((layer_name, hidden, kv_cache, attn_metadata, gather, output))
                return output

            self.impl = SimpleNamespace(forward=forward)

    plan = placement()
    layers = {name: Layer(name) for name in NAMES}
    return AscendLayerHooks(plan, layers, NotingEngine(log, armed=True)), layers


def test_each_layer_asks_before_its_forward_and_passes_everything_on():
    log = []
    hooks, layers = hooked(log)
    for i, name in enumerate(NAMES):
        impl = layers[name].impl
        assert impl.forward(name, "hidden", "caches", "metadata", i == 0, output=i) == i
    hooks.finish()
    ours = [entry for entry in log if entry[0] != "draft.attn"]
    assert ours == [
        ("acquire", 0),
        (NAMES[0], "hidden", "caches", "metadata", True, 0),
        *(
            entry
            for i in range(1, 4)
            for entry in [
                ("release", i - 1),
                ("acquire", i),
                (NAMES[i], "hidden", "caches", "metadata", False, i),
            ]
        ),
        ("release", 3),
        "finish",
    ]


def test_dummy_runs_ask_for_nothing():
    log = []
    _, layers = hooked(log)
    layers[NAMES[0]].impl.forward(NAMES[0], "hidden", "caches", None, output=1)
    assert log == [(NAMES[0], "hidden", "caches", None, False, 1)]


def test_a_bundle_without_a_main_layer_is_refused():
    plan = place_rank(plan_group(bundle_stage([[8]]), 2), 0, 3)
    with pytest.raises(SeamError, match="0 MLA layers"):
        AscendLayerHooks(plan, {}, NotingEngine([]))
