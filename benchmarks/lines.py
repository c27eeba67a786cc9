"""
Counts the lines of code of the package by subject, and finds files and functions that are too long.

A line of code is one that holds part of a statement: no blank line, comment or docstring. Imports count.
`--rev REV` also counts another commit for comparison. The exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("traceml_ray", "launchers", "dash_app")
FILE_LINES = 500
FUNCTION_LINES = 50


class Function(NamedTuple):
    """A function, and its number of lines of code without those of functions inside it."""

    where: str
    lines: int


class Count(NamedTuple):
    """The counts: lines of code by place, by file and by function."""

    code: Counter[str]
    files: dict[str, int]
    functions: list[Function]


def sources(rev: str | None) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of the package's files, from commit `rev` or from the working tree."""
    if rev is None:
        for path in sorted(path for folder in PLACES for path in (ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()
        return
    for name in _git("ls-tree", "-r", "--name-only", rev, *PLACES).split():
        if name.endswith(".py"):
            yield name, _git("show", f"{rev}:{name}")


def code_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that hold part of a statement of `tree`, except docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not _is_docstring(node):
            first = min(
                [node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]
            )
            inner = getattr(node, "body", None)
            last = inner[0].lineno - 1 if inner else node.end_lineno or node.lineno
            lines.update(range(first, max(first, last) + 1))
    return lines


def count(rev: str | None = None) -> Count:
    """Count the files of commit `rev`, or of the working tree."""
    code: Counter[str] = Counter()
    files, functions = {}, []
    for path, text in sources(rev):
        tree = ast.parse(text)
        blank = {number for number, line in enumerate(text.splitlines(), 1) if _says_nothing(line)}
        lines = code_lines(tree) - blank
        code[_subject(path)] += len(lines)
        files[path] = len(lines)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                function_lines = lines.intersection(range(node.lineno, (node.end_lineno or 0) + 1))
                inner = {line for sub in _functions_in(node) for line in _span(sub)}
                functions.append(Function(f"{path}:{node.lineno} {node.name}", len(function_lines - inner)))
    return Count(code, files, functions)


def report(now: Count, before: Count | None = None) -> str:
    """Return the table by subject as Markdown, and a summary of functions and files."""
    earlier = before.code if before else Counter[str]()
    lines = ["| subject | before | now |", "|---|---|---|"]
    for subject in sorted({*now.code, *earlier}):
        lines.append(f"| {subject} | {earlier.get(subject, '')} | {now.code[subject]} |")
    lines.append(f"| **all** | {earlier.total() or ''} | {now.code.total()} |")
    lengths = [function.lines for function in now.functions]
    lines.append(f"\n{len(lengths)} functions, median {statistics.median(lengths):g} lines of code")
    return "\n".join(lines)


def too_long(now: Count) -> list[str]:
    """Return everything that exceeds a limit, the longest first."""
    files = [(lines, path) for path, lines in now.files.items() if lines > FILE_LINES]
    functions = [
        (function.lines, function.where) for function in now.functions if function.lines > FUNCTION_LINES
    ]
    return [f"{lines} lines: {what}" for lines, what in sorted(files + functions, reverse=True)]


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _says_nothing(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _subject(path: str) -> str:
    parts = Path(path).parts
    return "/".join(parts[:2]) if parts[0] == "traceml_ray" and len(parts) > 2 else parts[0]


def _functions_in(node: ast.AST) -> list[ast.AST]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [inner for inner in ast.walk(node) if isinstance(inner, kinds) and inner is not node]


def _span(node: ast.AST) -> range:
    return range(node.lineno, (node.end_lineno or 0) + 1)  # type: ignore[attr-defined]


def _git(*args: str) -> str:
    return subprocess.check_output(["git", "-C", str(ROOT), *args], text=True)


def main() -> int:
    """Print the count; return 1 where a file or a function is too long."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rev", help="commit to compare with")
    rev = parser.parse_args().rev
    now = count()
    sys.stdout.write(report(now, count(rev) if rev else None) + "\n")
    problems = too_long(now)
    sys.stdout.write("".join(f"{line}\n" for line in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
