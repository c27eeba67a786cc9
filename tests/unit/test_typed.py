"""Two threads decode to one class for the first time; nothing is decoded to a type but through `ready`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TWO_THREADS = """
import threading
import msgspec
from traceml_ray.wire.codec import ready

described, decoding = threading.Event(), threading.Event()

def slow():
    described.set()
    decoding.wait(1)
    return int

class Inner(msgspec.Struct):
    x: "slow()"

class Outer(msgspec.Struct):
    inner: Inner

first = threading.Thread(target=lambda: ready(Outer))
first.start()
described.wait()
threading.Timer(0.1, decoding.set).start()
print(msgspec.msgpack.decode(msgspec.msgpack.encode({"inner": {"x": 1}}), type=ready(Outer)))
first.join()
"""


def test_a_class_is_not_decoded_to_while_another_thread_describes_it() -> None:
    done = subprocess.run([sys.executable, "-c", _TWO_THREADS], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, "Outer(inner=Inner(x=1))"), done.stderr


def _types(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the types that are given to decoders of msgspec; not in `ready` itself, which describes them."""
    describing = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "ready"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in describing or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not ast.unparse(node.func).startswith("msgspec."):
            continue
        yield from (given.value for given in node.keywords if given.arg == "type")
        if node.func.attr in ("Decoder", "convert"):
            yield from node.args[node.func.attr == "convert" :][:1]


def test_all_that_is_decoded_to_a_type_waits_for_its_description() -> None:
    undescribed = {
        f"{path.relative_to(ROOT)}:{kind.lineno}: {ast.unparse(kind)}"
        for place in ("traceml_ray", "dash_app", "launchers")
        for path in (ROOT / place).rglob("*.py")
        for kind in _types(ast.parse(path.read_text()))
        if not ast.unparse(kind).startswith("ready(")
    }
    assert undescribed == set(), "write type=ready(…), see traceml_ray/wire/codec.py"
