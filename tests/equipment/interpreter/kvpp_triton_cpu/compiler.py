"""What Triton asks of a backend's compiler; under the interpreter nothing calls it."""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend


class NoCompiler(BaseBackend):
    """Refuses to compile."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict) -> object:
        raise NotImplementedError("set TRITON_INTERPRET=1")

    def add_stages(self, stages: dict, options: object, language: Any) -> None:
        raise NotImplementedError("set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        raise NotImplementedError("set TRITON_INTERPRET=1")

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
