"""A test's clock is seen by the module and the thread it is made for, and by nobody else."""

from __future__ import annotations

import ast
import re
import threading
import time
from pathlib import Path

import pytest
from module_time import replace_time

from traceml_ray.agent import rank_agent

TESTS = Path(__file__).parents[1]


def test_other_threads_and_modules_keep_the_real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_time(monkeypatch, rank_agent, monotonic=lambda: -5.0)
    elsewhere = list[float]()
    thread = threading.Thread(target=lambda: elsewhere.append(rank_agent.time.monotonic()))
    thread.start()
    thread.join(240)
    assert rank_agent.time.monotonic() == -5.0
    assert elsewhere[0] > 0 and time.monotonic() > 0 and rank_agent.time.time() > 0


def _shared_clocks(tree: ast.AST) -> list[int]:
    """Return the lines in which `setattr` is called for a function of `time`, as every thread sees it."""
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        if node.func.attr == "setattr":
            target = ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ""
            parts = str(target).split(".")[:-1] or ast.unparse(node.args[0]).split(".")
            if parts[-1] == "time":
                lines.append(node.lineno)
    return lines


def test_no_test_replaces_the_clock_of_all_threads() -> None:
    code = (
        'm.setattr(agent.time, "sleep", f)\n'
        'm.setattr("a.b.time.monotonic", f)\n'
        'm.setattr(time, "time", f)\n'
        'm.setattr(agent, "time", f)\n'
        'm.setattr("a.b.time", f)\n'
    )
    assert _shared_clocks(ast.parse(code)) == [1, 2, 3], "this test sees it"
    mentions = re.compile(r"setattr\(\s*[^,]*\btime\b")  # to parse 400 files takes seconds
    assert len(mentions.findall(code)) == 4 and mentions.search("m.setattr(\n    time, 1)")
    texts = {path: path.read_text() for path in TESTS.rglob("*.py")}
    places = [
        f"{path.relative_to(TESTS)}:{line}"
        for path, text in texts.items()
        if mentions.search(text)
        for line in _shared_clocks(ast.parse(text))
    ]
    assert places == [], "use `module_time.replace_time`"
