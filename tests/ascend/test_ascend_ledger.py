"""The symbols of vllm-ascend that the adapter leans on, and what it refuses there."""

import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent


def run(code):
    """Lines that a fresh process prints behind a mark."""
    script = f"import sys; sys.path.insert(0, {str(HERE)!r})\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line[2:] for line in done.stdout.splitlines() if line.startswith("> ")]


def test_the_released_vllm_ascend_fits_the_ledger_and_a_changed_one_does_not():
    assert run("""
        import ascend_vllm; ascend_vllm.prepare()
        from dataclasses import replace
        from kvpp_connect.errors import SeamError
        from kvpp_connect.seam.ascend_ledger import ASCEND_LEDGER, SUPPORTED_ASCEND
        from kvpp_connect.seam.ledger import verify
        verify(ASCEND_LEDGER, SUPPORTED_ASCEND)
        print(">", len(ASCEND_LEDGER) > 20)
        for entry in ASCEND_LEDGER:
            changed = (
                replace(entry, parameters=(*entry.parameters, "more"))
                if entry.parameters is not None
                else replace(entry, fields=(*entry.fields, "more"))
            )
            try:
                verify((changed,), SUPPORTED_ASCEND)
                print("> passed:", entry.target)
            except SeamError as error:
                assert entry.target in str(error) and SUPPORTED_ASCEND in str(error), error
    """) == ["True"]


def test_plugins_may_be_called_in_any_order_and_none_of_ours_takes_a_name():
    """Also for a vllm-ascend that has a connector of our name, as its main branch does."""
    assert run("""
        import ascend_vllm; ascend_vllm.set_environment()
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
        import kvpp_connect.plugin
        import vllm_ascend
        before = set(factory._registry)
        kvpp_connect.plugin.register()
        print(">", sorted(set(factory._registry) - before))
        vllm_ascend.register_connector()
        factory.register_connector("MooncakeConnectorV2", "vllm_ascend.some", "Theirs")
        kvpp_connect.plugin.register()
        theirs = {"AscendStoreConnector", "MultiConnector", "MooncakeConnectorV1"}
        print(">", theirs <= set(factory._registry))
        ours = [name for name, load in factory._registry.items()
                if "kvpp_connect" in str([cell.cell_contents for cell in load.__closure__])]
        print(">", ours)
    """) == ["[]", "True", "[]"]


REFUSALS = """
    import pathlib, tempfile
    import ascend_vllm; ascend_vllm.prepare()
    import vllm.plugins; vllm.plugins.load_general_plugins()
    import ascend_chain
    model = ascend_chain.write_model(pathlib.Path(tempfile.mkdtemp()) / "m", "mla")

    def said(ranks=2, **options):
        try:
            config = ascend_chain.engine_config(model, ranks, **options)
        except Exception as error:
            return " ".join(str(error).split())
        return config.parallel_config.worker_cls
"""


def test_what_cannot_work_is_refused_by_name_with_the_configuration():
    on = '{"enable_kvpp": True'
    assert (
        run(
            textwrap.dedent(REFUSALS)
            + textwrap.dedent(f"""
        ours = "kvpp_connect.seam.ascend_worker.KvppNPUWorker"
        print(">", said() == ours)
        print(">", said(worker_cls=ours) == ours)
        print(">", "worker_cls is 'my.Worker'" in said(worker_cls="my.Worker"))
        print(">", "has 1 rank" in said(ranks=1))
        compact = {on}, "kvpp": {{"mode": "compact"}}}}
        print(">", said(additional_config=compact) == ours)
        optimised = compact | {{"c8_enable_reshape_optim": True}}
        print(">", "compact is not possible: additional_config.c8_enable_reshape_optim" in
              said(additional_config=optimised))
        jobs = {{"scheduler_config": {{"batch_job_sched_config": {{"enabled": True}}}}}}
        print(">", "compact is not possible: scheduler_cls is 'vllm_ascend" in
              said(additional_config=compact | jobs))
        print(">", said(additional_config={on}}} | jobs) == ours)
        print(">", "connector 'MooncakeConnectorV1'" in said(transfer=dict(
            kv_connector="MooncakeConnectorV1", kv_role="kv_producer")))
        print(">", "'MooncakeConnectorV2' is not known by its name" in said(transfer=dict(
            kv_connector="MooncakeConnectorV2", kv_role="kv_producer")))
        import os; os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        print(">", "VLLM_USE_V2_MODEL_RUNNER=0" in said())
    """)
        )
        == ["True"] * 11
    )


def test_the_platform_chooses_all_that_comes_with_the_worker_even_where_ours_is_given():
    assert (
        run(
            textwrap.dedent(REFUSALS)
            + textwrap.dedent("""
        ours = "kvpp_connect.seam.ascend_worker.KvppNPUWorker"
        for worker in ("auto", ours):
            config = ascend_chain.engine_config(model, 2, worker_cls=worker)
            print(">", config.parallel_config.worker_cls == ours)
            print(">", config.parallel_config.all2all_backend)
    """)
        )
        == ["True", "flashinfer_all2allv"] * 2
    )


def test_a_vllm_ascend_with_a_kvpp_of_its_own_keeps_its_worker(tmp_path):
    """Stood for by an empty module where its planner would be."""
    assert run(
        textwrap.dedent(REFUSALS)
        + textwrap.dedent("""
        import importlib.machinery, sys, types
        name = "vllm_ascend.core.kv_cache_placement"
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        print(">", said(additional_config={"enable_kvpp": True}))
        options = {"enable_kvpp": True, "kvpp": {"mode": "full"}}
        print(">", "a KVPP of its own, which does not read them" in said(additional_config=options))
    """)
    ) == ["vllm_ascend.worker.worker.NPUWorker", "True"]
