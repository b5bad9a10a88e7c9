"""vLLM's own judgement before a launch, for `kvpp audit --verify` and `kvpp doctor`.

vLLM is imported inside the functions, so that its absence is an answer and not a traceback. It
raises whatever its libraries raise; here that becomes one line.
"""

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Any, NoReturn

from kvpp_connect.config import ENABLE_KEY, KvppConfig, parse_additional_config
from kvpp_connect.errors import ConfigError, KvppError
from kvpp_connect.planning.audit import Model
from kvpp_connect.planning.checkpoint import CONFIG_NAME
from kvpp_connect.planning.geometry import ParallelSizes, refusal
from kvpp_connect.seam import install, ledger, multi, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import ModelConfig, VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The arithmetic here against the installed vLLM.

    Attributes:
        vllm: its version.
        differences: what does not agree; empty where all does.
        server_says: vLLM's own words about the sizes; empty where it accepts them.
    """

    vllm: str
    differences: tuple[str, ...]
    server_says: str

    @property
    def summary(self) -> str:
        """One line."""
        verdict = "; ".join(self.differences) if self.differences else "agrees"
        return f"{verdict}; it says: {self.server_says}" if self.server_says else verdict

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "vllm": self.vllm,
            "agrees": not self.differences,
            "differences": list(self.differences),
            "server_says": self.server_says or None,
        }


def compare_with_vllm(model: Model, sizes: ParallelSizes, model_impl: str) -> Comparison:
    """Let vLLM read the same config and judge the same sizes.

    Raises:
        ConfigError: vLLM is not installed, or cannot read the config.
    """
    quiet_vllm()
    with _directory_of(model.checkpoint.path) as directory:
        theirs = _read_model_config(directory, model_impl)
    attention = model.attention
    facts = (
        ("MLA", attention.is_mla, theirs.use_mla),
        ("KV heads", attention.kv_heads, 1 if theirs.use_mla else theirs.get_total_num_kv_heads()),
        (
            "attention heads",
            attention.attention_heads,
            theirs.model_arch_config.total_num_attention_heads,
        ),
        ("longest sequence", model.max_model_tokens, theirs.max_model_len),
    )
    differences = [
        f"{name}: {ours} here, {vllm} there" for name, ours, vllm in facts if ours != vllm
    ]
    said = _refusal_of(theirs, sizes)
    ours = refusal(sizes, attention)
    if bool(said) != (ours is not None):
        differences.append(f"sizes: {'refused' if ours else 'accepted'} here, not there")
    return Comparison(vllm=ledger.vllm_version(), differences=tuple(differences), server_says=said)


def deployment_problems(
    checkpoint: Path,
    arguments: Sequence[str],
    additional_config: dict[str, Any],
    kv_transfer_config: dict[str, Any],
) -> tuple[str, ...]:
    """What a server would refuse, by the same code: vLLM's configuration, then all of our checks.

    vLLM stops at its first problem; ours are complete.

    Args:
        arguments: further arguments of `vllm serve`.
        additional_config, kv_transfer_config: as for the server; empty where not given.
    """
    quiet_vllm()
    try:
        config = parse_additional_config(additional_config)
        with (
            _directory_of(checkpoint) as directory,
            install.settling_defaults(always=config.enabled),
        ):
            vllm_config = _engine_config(
                [
                    f"--model={directory}",
                    *(_json_argument("--kv-transfer-config", kv_transfer_config)),
                    # Without the switch, so that KVPP's checks are all made below.
                    *(_json_argument("--additional-config", _switched_off(additional_config))),
                    *arguments,
                ]
            )
    except KvppError as error:
        return (str(error),)
    found = [*_connector_problems(vllm_config)]
    if config.enabled:
        found += _kvpp_problems(vllm_config, config)
    return tuple(found)


def host_address() -> str:
    """vLLM's choice of this machine's address; empty where vLLM does not load."""
    quiet_vllm()
    try:
        from vllm.utils.network_utils import get_ip
    except (ImportError, OSError):
        return ""
    return get_ip()


def quiet_vllm() -> None:
    """Keep vLLM from talking: stdout belongs to the command's own answer."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # On machines without Triton torch warns of that as soon as vLLM defines an op.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def _read_model_config(directory: Path, model_impl: str) -> "ModelConfig":
    try:
        from vllm.config import ModelConfig
    except (ImportError, OSError) as error:
        raise ConfigError(f"vLLM is not installed, or does not load ({error})") from error
    try:
        return ModelConfig(
            model=str(directory),
            skip_tokenizer_init=True,
            model_impl=model_impl if model_impl == "transformers" else "auto",
        )
    except Exception as error:
        raise ConfigError(f"vLLM cannot read {directory}: {_first_reason(error)}") from error


def _refusal_of(model_config: "ModelConfig", sizes: ParallelSizes) -> str:
    from vllm.config import ParallelConfig

    try:
        parallel = ParallelConfig(
            tensor_parallel_size=sizes.tensor,
            pipeline_parallel_size=sizes.pipeline,
            prefill_context_parallel_size=sizes.prefill_context,
            decode_context_parallel_size=sizes.decode_context,
            distributed_executor_backend="mp",  # named, so that local devices are not counted
        )
        model_config.verify_with_parallel_config(parallel)
    except (ValueError, AssertionError, NotImplementedError) as error:
        return _first_reason(error)
    return ""


def _engine_config(arguments: Sequence[str]) -> "VllmConfig":
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except (ImportError, OSError) as error:
        raise ConfigError(f"vLLM is not installed, or does not load ({error})") from error

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"vllm serve: {message}")

    try:
        parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm serve"))
        parsed: Any = parser.parse_args([*arguments])
        engine = AsyncEngineArgs.from_cli_args(parsed)
        return engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except KvppError:
        raise
    except Exception as error:
        raise ConfigError(f"vLLM refuses the deployment: {_first_reason(error)}") from error


def _connector_problems(vllm_config: "VllmConfig") -> "Iterator[str]":
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    wanted: list[KVTransferConfig | dict[str, Any]] = [transfer]
    if multi.is_multi(transfer.kv_connector, transfer.kv_connector_module_path):
        wanted += [dict(child) for child in multi.children(transfer.kv_connector_extra_config)]
    for one in wanted:
        name = one["kv_connector"] if isinstance(one, dict) else one.kv_connector
        try:
            made = KVTransferConfig(**one) if isinstance(one, dict) else one
            KVConnectorFactory.get_connector_class(made)
        except (ImportError, AttributeError, OSError, TypeError, ValueError) as error:
            yield (
                f"connector {name!r} does not load: {_first_reason(error)}; check kv_connector "
                "and kv_connector_module_path"
            )


def _kvpp_problems(vllm_config: "VllmConfig", config: KvppConfig) -> list[str]:
    found = [*settings.problems(vllm_config)]
    if found:
        return found
    try:
        install.enable(vllm_config, config, vllm_config.parallel_config.worker_cls)
    except KvppError as error:
        return [str(error)]
    return []


def _switched_off(additional_config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in additional_config.items() if key != ENABLE_KEY}


def _json_argument(flag: str, value: dict[str, Any]) -> list[str]:
    return [f"{flag}={json.dumps(value)}"] if value else []


@contextmanager
def _directory_of(config: Path) -> "Iterator[Path]":
    """A directory whose config.json is ``config``, since vLLM takes no bare file."""
    if config.name == CONFIG_NAME:
        yield config.resolve().parent
        return
    with tempfile.TemporaryDirectory(prefix="kvpp-") as folder:
        copyfile(config, Path(folder) / CONFIG_NAME)
        yield Path(folder)


def _first_reason(error: BaseException) -> str:
    """One line of an error; of pydantic's, the first reason without its frame."""
    details = getattr(error, "errors", None)
    if callable(details):
        first: Any = details()
        if first and isinstance(first, list):
            where = ".".join(str(part) for part in first[0].get("loc", ()))
            said = " ".join(str(first[0].get("msg", "")).removeprefix("Value error, ").split())
            return f"{where}: {said}" if where else said
    return " ".join(str(error).split()) or type(error).__name__
