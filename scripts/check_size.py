"""Fails when a file under kvpp_connect/ or a function in it has outgrown a reviewer."""

import ast
import sys
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


def oversized(path: Path) -> list[str]:
    """Says for each thing in `path` that is too long where it is and how long."""
    text = path.read_text(encoding="utf-8")
    found: list[str] = []
    file_lines = len(text.splitlines())
    if file_lines > MAX_FILE_LINES:
        found.append(f"{path}: {file_lines} lines, at most {MAX_FILE_LINES}: split it by noun")
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                where = f"{path}:{node.lineno}: {node.name}()"
                found.append(f"{where}: {lines} lines, at most {MAX_FUNCTION_LINES}")
    return found


def main() -> int:
    package = Path(__file__).resolve().parent.parent / "kvpp_connect"
    found = [line for path in sorted(package.rglob("*.py")) for line in oversized(path)]
    for line in found:
        sys.stderr.write(f"{line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
