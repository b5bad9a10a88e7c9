"""The plugin in a process of its own, since it wraps a class of vLLM's."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.timeout(300)  # a fresh process imports vLLM


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_register_twice_wraps_once_and_takes_the_free_name():
    assert run("""
        from vllm.platforms import current_platform
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        original = type(current_platform).__dict__["check_and_update_config"].__func__
        from kvpp_connect.plugin import register
        register(); once = type(current_platform).__dict__["check_and_update_config"].__func__
        register(); twice = type(current_platform).__dict__["check_and_update_config"].__func__
        print(once is twice, once.__wrapped__ is original)
        print(KVConnectorFactory.get_connector_class_by_name("MooncakeConnectorV2").__module__)
    """)[-3:] == ["True", "True", "kvpp_connect.connectors.mooncake_v2.connector"]


def test_with_kvpp_off_the_hook_changes_nothing():
    assert (
        run("""
        from vllm.config import VllmConfig
        from vllm.v1.worker.gpu_worker import Worker
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention
        before = (dict(vars(Worker)), dict(vars(MLAAttention)))
        plain = VllmConfig()
        from kvpp_connect.plugin import register
        register()
        for off in ({}, {"enable_kvpp": False}, {"enable_kvpp": "False"}):
            config = VllmConfig(additional_config=off)
            print(config.parallel_config == plain.parallel_config)
        print(before == (dict(vars(Worker)), dict(vars(MLAAttention))))
    """)[-4:]
        == ["True"] * 4
    )


def test_a_bad_switch_is_refused_by_name_before_anything_starts():
    assert run("""
        from vllm.config import VllmConfig
        from kvpp_connect.plugin import register
        from kvpp_connect.errors import ConfigError
        register()
        try:
            VllmConfig(additional_config={"enable_kvpp": "yes"})
        except ConfigError as error:
            print("enable_kvpp" in str(error) and "'yes'" in str(error))
    """)[-1:] == ["True"]


OURS = """
    from vllm.config import KVTransferConfig, VllmConfig
    from kvpp_connect.plugin import register
    from kvpp_connect.errors import ConfigError
    register()

    def said(**transfer):
        try:
            VllmConfig(kv_transfer_config=KVTransferConfig(**transfer))
        except ConfigError as error:
            return str(error)
        except Exception as error:
            return "vLLM: " + str(error)
        return "accepted"

    ours = {"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_producer"}
    wrong = {"kv_connector_extra_config": {"lease": 5}}
"""


def test_wrong_settings_of_our_connectors_are_refused_with_the_configuration():
    assert (
        run(
            textwrap.dedent(OURS)
            + textwrap.dedent("""
        named = {"kv_connector_module_path": "kvpp_connect.connectors"}
        multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        inside = {"kv_connector_extra_config": {"connectors": [ours | wrong]}}
        print(*("'lease_s'" in text for text in (
            said(**ours, **wrong), said(**ours, **named, **wrong), said(**multi, **inside),
        )))
        port = {"kv_connector_extra_config": {"control_port": 7000}}
        print("no meaning" in said(**(ours | {"kv_role": "kv_consumer"}), **port))
    """)
        )[-4:]
        == ["True"] * 4
    )


def test_right_settings_and_other_connectors_are_left_alone():
    assert run(
        textwrap.dedent(OURS)
        + textwrap.dedent("""
        print(said(**ours))
        right = {"kv_connector_extra_config": {"lease_s": 5}}
        print(said(**ours, **right))
        other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        print("lease" in said(**other, **wrong))
        print("nowhere" in said(**ours, kv_connector_module_path="nowhere.at_all"))
    """)
    )[-4:] == ["accepted", "accepted", "False", "True"]


def test_what_a_multi_connector_would_ignore_or_mix_up_is_refused():
    assert run(
        textwrap.dedent(OURS)
        + textwrap.dedent("""
        def multi(*children, **whole):
            extra = {"connectors": list(children)}
            given = {"kv_connector": "MultiConnector", "kv_role": "kv_both", **whole}
            return said(kv_connector_extra_config=extra, **given)

        example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        print(multi(ours, example))
        print("connectors[0].engine_id" in multi(ours | {"engine_id": "mine"}, example))
        print("connectors[1].kv_load_failure_policy" in multi(
            ours, example | {"kv_load_failure_policy": "recompute"}))
        print("connectors[0] has no kv_role" in multi({"kv_connector": "MooncakeConnectorV2"}))
        print("MooncakeConnectorV2 2 times" in multi(ours, ours))
        print("NixlConnector and MooncakeConnectorV2 each" in multi(
            example | {"kv_connector": "NixlConnector"}, ours))
        # Without one of ours all is vLLM's business.
        print("2 times" in multi(example, example))
    """)
    )[-7:] == ["accepted", *["True"] * 5, "False"]


def test_vllm_learns_that_a_child_loads_whatever_the_role_of_the_whole():
    assert run(
        textwrap.dedent(OURS)
        + textwrap.dedent("""
        def role(child):
            extra = {"connectors": [{"kv_connector": "MooncakeConnectorV2", "kv_role": child}]}
            whole = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_producer",
                                     kv_connector_extra_config=extra)
            return VllmConfig(kv_transfer_config=whole).kv_transfer_config.kv_role

        print(role("kv_consumer"), role("kv_producer"))
    """)
    )[-2:] == ["kv_both", "kv_producer"]
