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


def _find(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
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


def _fact(tree: ast.Module, qualified: str) -> dict[str, list[str]]:
    node: ast.AST | None = tree
    for part in qualified.split("."):
        node = _find(getattr(node, "body", []), part)
        if node is None:
            raise SystemExit(f"{qualified} is not in the wheel")
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        names += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
        return {"parameters": [argument.arg for argument in names]}
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    return {"fields": _fields(node, classes)} if isinstance(node, ast.ClassDef) else {}


def main() -> None:
    """Read the wheel named first into the file named second."""
    wheel, out = sys.argv[1:]
    facts: dict[str, dict[str, list[str]]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for entry in LEDGER:
            module, _, qualified = entry.target.partition(":")
            source = archive.read(module.replace(".", "/") + ".py")
            facts[entry.target] = _fact(ast.parse(source), qualified)
    with open(out, "w") as file:
        json.dump(facts, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
