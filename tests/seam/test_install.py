"""The plugin in a process of its own, since it wraps a class of vLLM's."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("vllm")


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
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
