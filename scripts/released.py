"""Released packages as source: fetch a wheel, keep its Python files, and read symbols from them.

Nothing of a package is imported, so a release for another device can be read anywhere.
"""

import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Read = Callable[[str], str | None]
"""Text of a file of the package by its path; ``None`` where it has none."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Fact:
    """What a symbol looks like; ``place`` is its file and line.

    ``parameters`` are those of a function, ``fields`` the annotated names of a class.
    """

    place: str
    parameters: tuple[str, ...] | None = None
    fields: tuple[str, ...] | None = None
    is_dataclass: bool = False


class Source:
    """Symbols of a package, found as Python would: through imports and base classes."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._modules: dict[str, tuple[str, ast.Module] | None] = {}

    def fact(self, target: str) -> Fact | None:
        """What ``module:qualified.name`` looks like; ``None`` where it is not."""
        module, _, qualified = target.partition(":")
        found = self._resolve(module, qualified.split("."))
        if found is None:
            return None
        where, node = found
        path, _ = self._module(where) or ("", None)
        place = f"{path}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, _Function):
            return Fact(place, parameters=_parameters(node))
        if isinstance(node, ast.ClassDef):
            fields = tuple(self._fields(where, node))
            return Fact(place, fields=fields, is_dataclass=self._is_dataclass(where, node))
        return Fact(place)

    def _module(self, name: str) -> tuple[str, ast.Module] | None:
        if name not in self._modules:
            base = name.replace(".", "/")
            paths = (f"{base}.py", f"{base}/__init__.py")
            texts = ((path, self._read(path)) for path in paths)
            known = next(((path, text) for path, text in texts if text is not None), None)
            self._modules[name] = (known[0], ast.parse(known[1])) if known else None
        return self._modules[name]

    def _resolve(self, module: str, parts: list[str]) -> tuple[str, ast.AST] | None:
        """Where a symbol is defined, and its definition."""
        known = self._module(module)
        path, node = (known[0], _find(known[1].body, parts[0])) if known else ("", None)
        if isinstance(node, ast.ImportFrom):
            name = next(a.name for a in node.names if parts[0] in (a.asname, a.name))
            source = _imported_module(module, path, node)
            return self._resolve(source, [name, *parts[1:]])
        if node is None:
            inner = f"{module}.{parts[0]}"  # a module of the package
            return self._resolve(inner, parts[1:]) if parts[1:] and self._module(inner) else None
        if len(parts) == 1:
            return module, node
        return self._member(module, node, parts[1:])

    def _member(self, module: str, node: ast.AST, parts: list[str]) -> tuple[str, ast.AST] | None:
        """A class's member, its own or that of a base."""
        if not isinstance(node, ast.ClassDef):
            return None
        own = _find(node.body, parts[0])
        if own is not None:
            return (module, own) if len(parts) == 1 else self._member(module, own, parts[1:])
        for where, base in self._bases(module, node):
            if (found := self._member(where, base, parts)) is not None:
                return found
        return None

    def _bases(self, module: str, node: ast.ClassDef) -> list[tuple[str, ast.AST]]:
        names = [ast.unparse(base).partition("[")[0].split(".") for base in node.bases]
        found = (self._resolve(module, name) for name in names if name != [node.name])
        return [base for base in found if base is not None]

    def _is_dataclass(self, module: str, node: ast.ClassDef) -> bool:
        names = [ast.unparse(d).partition("(")[0].split(".")[-1] for d in node.decorator_list]
        if {"dataclass", "config"} & set(names):  # the second one is vLLM's own
            return True
        return any(
            isinstance(base, ast.ClassDef) and self._is_dataclass(where, base)
            for where, base in self._bases(module, node)
        )

    def _fields(self, module: str, node: ast.ClassDef) -> list[str]:
        found: list[str] = []
        for where, base in self._bases(module, node):
            if isinstance(base, ast.ClassDef):
                found += self._fields(where, base)
        for item in node.body:
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            if "ClassVar" not in ast.unparse(item.annotation):
                found.append(item.target.id)
        return list(dict.fromkeys(found))


def _find(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """The last definition of a name, as Python has it; of branches the first that has one."""
    for node in reversed(body):
        if isinstance(node, _Function | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            return node
        if isinstance(node, ast.Assign) and name in {ast.unparse(t) for t in node.targets}:
            return node
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return node
        for branch in _branches(node):
            if (found := _find(branch, name)) is not None:
                return found
    return None


def _branches(node: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(node, ast.If):
        return [node.body, node.orelse]
    if isinstance(node, ast.Try):
        return [node.body, *(handler.body for handler in node.handlers), node.orelse]
    return []


def _imported_module(module: str, path: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = path.endswith("__init__.py")
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *filter(None, [node.module])])


def _parameters(node: _Function) -> tuple[str, ...]:
    """Names in the order of ``inspect.signature``."""
    given = node.args
    before = [*given.posonlyargs, *given.args, *filter(None, [given.vararg])]
    return tuple(a.arg for a in (*before, *given.kwonlyargs, *filter(None, [given.kwarg])))


def read_wheel(wheel: Path) -> Read:
    """Read a package out of its wheel."""
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    return lambda path: archive.read(path).decode() if path in names else None


def read_folder(folder: Path) -> Read:
    """Read packages that are unpacked in a folder."""

    def read(path: str) -> str | None:
        file = folder / path
        return file.read_text() if file.is_file() else None

    return read


def newest_release(package: str) -> str:
    """Number of the newest release on the configured index."""
    answer = _pip("index", "versions", package, capture=True)
    match = re.match(rf"{re.escape(package)} \(([^)]+)\)", answer)
    if match is None:
        raise SystemExit(f"pip names no release of {package}: {answer[:200]!r}")
    return match[1]


def fetch(package: str, version: str, cache: Path) -> Path:
    """Bring a release's Python files into the cache, unless they are there; answer the folder."""
    folder = cache / f"{package}-{version}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    print(f"{package} {version}: downloading the wheel (its Python files stay in {folder})")
    with tempfile.TemporaryDirectory(dir=cache) as room:
        _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", room,
             f"{package}=={version}")  # fmt: skip
        (wheel,) = Path(room).glob("*.whl")
        unpacked = Path(room) / "unpacked"
        count = unpack(wheel, unpacked)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.0f} MB, {count} Python files kept")
        unpacked.rename(folder)  # last, so that a folder that is there is complete
    return folder


def unpack(wheel: Path, folder: Path) -> int:
    """Write a wheel's Python files to a folder; answer how many."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        archive.extractall(folder, names)
    return len(names)


def _pip(*arguments: str, capture: bool = False) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, check=False, text=True, stdout=subprocess.PIPE if capture else None
    )
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    return done.stdout or ""
