"""A checkpoint's config.json, and the part of it that describes the language model.

Reads one file and nothing else: no weights, no tokenizer, no network.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvpp_connect.errors import ConfigError

CONFIG_NAME = "config.json"
_MAX_BYTES = 64 * 2**20  # a config is some kilobytes; a weight file is not read into memory
# Where Transformers looks for the language model of a composite checkpoint, and two older names
# that vLLM's own config classes know.
_TEXT_KEYS = ("text_encoder", "decoder", "generator", "text_config")
_OLDER_TEXT_KEYS = ("llm_config", "language_config")
# Wrappers whose text config may leave its model type out; their config classes fill it in.
_TEXT_MODEL_TYPES = {
    "deepseek_vl_v2": "deepseek_v2",
    "glm5_next": "glm5_next_text",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_linear",
    "kimi_vl": "deepseek_v2",
}
# vLLM lifts a nested object of these to the top level, except for its model type.
_LIFTED = {"deepseek_v41": "text_config", "eagle": "model"}
_ARCHITECTURE_MODEL_TYPES = {
    "LongcatFlashForCausalLM": "longcat_flash",
    "LongcatFlashNgramForCausalLM": "longcat_flash",
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a config.json says.

    Attributes:
        path: the file.
        name: for tables; the directory's name.
        config: the whole document.
        text: the language model's part; ``config`` itself where nothing is nested.
        text_key: where ``text`` lies in ``config``; empty where nothing is nested.
        model_type: the language model's type, empty where the file does not say.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    text: Mapping[str, Any]
    text_key: str
    model_type: str

    def where(self, key: str) -> str:
        """A key of ``text`` for error messages: file and dotted name."""
        return f"{self.path}: {self.text_key}{'.' if self.text_key else ''}{key}"

    def number(self, key: str, *, least: int = 1) -> int | None:
        """A whole number of ``text``; ``None`` where the key is absent or null.

        Raises:
            ConfigError: anything else, or a number below ``least``.
        """
        value = self.text.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"{self.where(key)} is {_short(value)}; expected a whole number of at least {least}"
            )
        return value

    def needed_number(self, key: str, *other_keys: str) -> int:
        """The first of several keys that is there.

        Raises:
            ConfigError: none is there, or it is no number of at least 1.
        """
        for name in (key, *other_keys):
            value = self.number(name)
            if value is not None:
                return value
        others = f", and so are {', '.join(other_keys)}" if other_keys else ""
        raise ConfigError(f"{self.where(key)} is absent{others}")


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint directory or a bare config.json.

    Raises:
        ConfigError: no such file, no JSON, no object, or a text config that cannot be told.
    """
    file = _config_file(path)
    config = _read_object(file)
    text, text_key = _text_config(config, file)
    return Checkpoint(
        path=file,
        name=_name(path, file),
        config=config,
        text=text,
        text_key=text_key,
        model_type=_model_type(config, text, text_key, file),
    )


def _config_file(path: Path) -> Path:
    try:
        if path.is_dir():
            if not (path / CONFIG_NAME).exists():
                raise ConfigError(f"{path}: this directory holds no {CONFIG_NAME}")
            path = path / CONFIG_NAME
        if not path.exists():
            raise ConfigError(f"{path}: no such file or directory")
        if not path.is_file():
            raise ConfigError(f"{path}: not a regular file")
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path}: too large for a {CONFIG_NAME}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    return path


def _read_object(file: Path) -> Mapping[str, Any]:
    try:
        value: object = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{file}: line {error.lineno}, column {error.colno}: not JSON ({error.msg})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: holds {_kind(value)}, expected an object")
    return cast("dict[str, Any]", value)


def _text_config(config: Mapping[str, Any], file: Path) -> tuple[Mapping[str, Any], str]:
    lifted_key = _LIFTED.get(str(config.get("model_type")), "")
    if config.get(lifted_key) is not None:
        lifted = _object(config[lifted_key], file, lifted_key)
        return {**{k: v for k, v in lifted.items() if k != "model_type"}, **config}, ""
    if config.get("thinker_config") is not None:
        thinker = _object(config["thinker_config"], file, "thinker_config")
        text, key = _text_config(thinker, file)
        return text, f"thinker_config.{key}" if key else "thinker_config"
    present = [key for key in _TEXT_KEYS if config.get(key) is not None]
    if len(present) > 1:
        raise ConfigError(
            f"{file}: holds {' and '.join(present)}, and vLLM takes exactly one text config"
        )
    present = present or [key for key in _OLDER_TEXT_KEYS if config.get(key) is not None][:1]
    if not present:
        return config, ""
    return _object(config[present[0]], file, present[0]), present[0]


def _object(value: object, file: Path, key: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: {key} is {_kind(value)}, expected an object")
    return cast("dict[str, Any]", value)


def _model_type(
    config: Mapping[str, Any], text: Mapping[str, Any], text_key: str, file: Path
) -> str:
    value = text.get("model_type")
    if value is None and text_key:
        value = _TEXT_MODEL_TYPES.get(str(config.get("model_type")))
    if value is None:
        architectures = config.get("architectures")
        if isinstance(architectures, list) and architectures:
            value = _ARCHITECTURE_MODEL_TYPES.get(str(cast("list[object]", architectures)[0]))
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError(f"{file}: model_type is {_short(value)}, expected a string")
    return value


def _name(path: Path, file: Path) -> str:
    if path != file:  # a directory was named
        return path.resolve().name or str(path)
    return file.resolve().parent.name if file.name == CONFIG_NAME else file.stem


def _kind(value: object) -> str:
    kinds: dict[type, str] = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")


def _short(value: object) -> str:
    """A value for a message of one line."""
    if isinstance(value, dict | list):
        return _kind(cast("object", value))
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
