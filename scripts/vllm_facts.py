"""Write what the seam's ledger needs to know of a vLLM release, read from its wheel.

    python scripts/vllm_facts.py WHEEL OUT.json

The wheel is parsed, never imported, so a release for another device can be read anywhere. Its
facts let the tests check the ledger against releases that cannot be installed here.
"""

import ast
import json
import sys
import zipfile

from kvpp_connect.seam.ledger import LEDGER
from kvpp_connect.seam.runner_v2_ledger import RUNNER_V2_LEDGER


def _find(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            return node
        if isinstance(node, ast.If):
            found = _find([*node.body, *node.orelse], name)
            if found is not None:
                return found
    return None


def _fields(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[str]:
    """Annotated names of a class and of its bases in the same module."""
    found: list[str] = []
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found += _fields(classes[base.id], classes)
    names = [
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    return found + [name for name in names if name not in found]


def _fact(archive: zipfile.ZipFile, target: str) -> dict[str, list[str]] | None:
    """What a symbol looks like; ``None`` where it is not."""
    module, _, qualified = target.partition(":")
    path = module.replace(".", "/") + ".py"
    if path not in archive.namelist():
        return None
    tree = ast.parse(archive.read(path))
    node: ast.AST | None = tree
    for part in qualified.split("."):
        node = _find(getattr(node, "body", []), part)
    if node is None:
        return None
    if isinstance(node, ast.ImportFrom):  # imported into the module by the same name
        return _fact(archive, f"{node.module}:{qualified}")
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        names += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
        return {"parameters": [argument.arg for argument in names]}
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    return {"fields": _fields(node, classes)} if isinstance(node, ast.ClassDef) else {}


def _facts(archive: zipfile.ZipFile) -> dict[str, dict[str, list[str]]]:
    """The facts of all entries of the ledgers, by target."""
    facts: dict[str, dict[str, list[str]]] = {}
    for entry in (*LEDGER, *RUNNER_V2_LEDGER):
        found = [_fact(archive, t) for t in (entry.target, entry.elsewhere) if t is not None]
        known = next((fact for fact in found if fact is not None), None)
        if known is None:
            raise SystemExit(f"{entry.target} is not in the wheel")
        facts[entry.target] = known
    return facts


def main() -> None:
    """Read the wheel named first into the file named second."""
    wheel, out = sys.argv[1:]
    with zipfile.ZipFile(wheel) as archive:
        facts = _facts(archive)
    with open(out, "w") as file:
        json.dump(facts, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
