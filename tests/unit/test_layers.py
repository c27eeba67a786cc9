"""Imports point one way: what runs in a training process needs neither Ray's actors nor the monitor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "traceml_ray"
AGENT = "traceml_ray.agent"
BELOW_AGENT = {
    *("traceml_ray", "traceml_ray.errors", "traceml_ray.identity", "traceml_ray.settings"),
    *("traceml_ray.spool", "traceml_ray.wire"),
}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py") if "site" not in path.parts}


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Give (module, name) of each import of ours, those inside functions and for types only among them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("traceml_ray"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in MODULES else (str(node.module), alias.name)


AGENT_IMPORTS = {
    name: [*imports(path)] for name, path in MODULES.items() if name == AGENT or name.startswith(f"{AGENT}.")
}


def test_agent_imports_nothing_above_it() -> None:
    found = {(name, module) for name, each in AGENT_IMPORTS.items() for module, _ in each}
    assert {(name, m) for name, m in found if m not in BELOW_AGENT and m not in AGENT_IMPORTS} == set()


def test_agent_has_no_import_circle() -> None:
    graph = {name: {module for module, _ in each} for name, each in AGENT_IMPORTS.items()}
    assert [*TopologicalSorter(graph).static_order()]  # it raises CycleError


def test_agent_imports_no_private_name() -> None:
    found = {(name, private) for name, each in AGENT_IMPORTS.items() for _, private in each}
    assert {(name, private) for name, private in found if private.startswith("_")} == set()
