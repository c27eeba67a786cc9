"""Variables are named for the thing, not for its part in the sentence."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLEANED = (
    "launchers",
    "dash_app",
    "benchmarks",
    "examples",
    "docs",
    "tests",
    "traceml_ray",
)
"""Packages without such variables; new ones are added, none is removed."""

STORED = {"profiles.py", "summary_shape.py"}
"""Modules whose fields have the names that files have."""
VAGUE = frozenset({"found", "each", "at", "own", "of", "told", "said"})


def test_no_variable_or_parameter_is_called_found_each_at_own_or_of() -> None:
    vague = [line for package in CLEANED for path in sources(package) for line in vague_names(path)]
    assert not vague, "name the thing itself (CONTRIBUTING.md, Habits):\n" + "\n".join(vague)


def test_vague_names_are_seen_wherever_python_binds_one(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "def f(of, *, own=1):\n"
        "    found = [each for each in of]\n"
        "    for at, _ in enumerate(found): pass\n"
        "    with open('x') as said: pass\n"
        "    if (told := own): return lambda each: each\n"
        "class C:\n"
        "    at: int\n"
        "    def __init__(self): self.each = 1\n"
    )
    lines = [line.rpartition(":")[2] for line in vague_names(path)]
    assert {"7 `at`", "8 `each`"} <= set(lines)
    named = sorted({line.rpartition(" ")[2] for line in lines})
    assert named == ["`at`", "`each`", "`found`", "`of`", "`own`", "`said`", "`told`"]


def test_every_cleaned_package_has_sources() -> None:
    assert all(sources(package) for package in CLEANED)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def vague_names(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    fields = {
        id(statement.target)
        for cls in (ast.walk(tree) if path.name in STORED else ())
        if isinstance(cls, ast.ClassDef)
        for statement in cls.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        if name in VAGUE and id(node) not in fields:
            yield f"{path}:{node.lineno} `{name}`"
