"""Where the threads of this process stand, as its agent tells it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from traceml_ray.agent import stacks
from traceml_ray.stages import SYNC_WAIT
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

OPEN = wire.OpenStage(3, SYNC_WAIT, 7)


@contextmanager
def stuck(
    code: str, path: str = "/jobs/train.py", library: str = "", where: str = stacks._LIBRARIES[0]
) -> Iterator[int]:
    """A thread named `trainer` that is stuck in `wait()` of `code`, the file `path`; its ident."""
    inside, release = threading.Event(), threading.Event()
    space: dict[str, Any] = {"here": inside.set, "release": release.wait}
    exec(compile("def wait():\n    here()\n    release(240)", "<string>", "exec"), space)
    exec(compile(library, f"{where}/torch/distributed/distributed_c10d.py", "exec"), space)
    exec(compile(code, path, "exec"), space)
    thread = threading.Thread(target=space["main"], name="trainer", daemon=True)
    thread.start()
    try:
        assert inside.wait(240)
        assert thread.ident is not None
        yield thread.ident
    finally:
        release.set()
        thread.join(240)


def test_training_thread_comes_first_with_its_position() -> None:
    with stuck("def evaluate():\n    wait()\ndef main():\n    evaluate()\n") as owner:
        event = stacks.event(owner, OPEN, "h1")
    assert (event.kind, event.step, event.stage, event.data["dump"]) == ("stacks", 3, SYNC_WAIT, "h1")
    first, *others = event.message.split("\nthread ")
    assert first.startswith("thread trainer, training:\n")
    assert first.index("train.py:4 in main") < first.index("train.py:2 in evaluate")
    assert not any("agent/stacks.py" in other for other in others), "not who asks"


@pytest.mark.parametrize(
    "where", [stacks._LIBRARIES[0], "/other/lib/site-packages", "/usr/lib/dist-packages"]
)
def test_torch_distributed_call_is_separated_from_the_code_of_the_caller(where: str) -> None:
    library = "def all_reduce(x):\n    wait()\ndef wrapper(*args):\n    all_reduce(*args)\n"
    code = "def mean(x):\n    wrapper(x)\ndef main():\n    mean(1)\n"
    with stuck(code, library=library, where=where) as owner:
        event = stacks.event(owner, OPEN, "h1")
    assert (event.data["where"], event.data["call"]) == ("mean (train.py:2)", "all_reduce")
    with stuck("def main():\n    wait()\n") as owner:
        event = stacks.event(owner, OPEN, "h1")
    assert (event.data["where"], event.data["call"]) == ("main (train.py:2)", None)


@contextmanager
def nested(*files: str) -> Iterator[int]:
    """A thread that is stuck in functions f0, f1, …, one in each file, the outermost first."""
    parts = [f"def f{i}():\n    f{i + 1}()\n" for i in range(len(files))]
    space: dict[str, Any] = {}
    for part, path in zip(parts, files, strict=True):
        exec(compile(part, path, "exec"), space)
    inside, release = threading.Event(), threading.Event()
    space.update(here=inside.set, release=release.wait)
    exec(compile(f"def f{len(files)}():\n    here()\n    release(240)", "<string>", "exec"), space)
    thread = threading.Thread(target=space["f0"], daemon=True)
    thread.start()
    try:
        assert inside.wait(240) and thread.ident is not None
        yield thread.ident
    finally:
        release.set()
        thread.join(240)


@pytest.mark.parametrize(
    ("files", "call"),
    [
        (["torch/distributed/fsdp/api.py", "hf/model.py", "torch/nn/functional.py"], None),
        (["torch/distributed/fsdp/api.py", "torch/distributed/distributed_c10d.py"], "f2"),
        (["torch/distributed/checkpoint/state_dict_saver.py", "torch/serialization.py"], None),
        (["torch/distributed/checkpoint/filesystem.py"], None),
        (["torch/distributed/checkpoint/api.py", "torch/distributed/distributed_c10d.py"], "f2"),
        (["torch/distributed/_functional_collectives.py", "torch/_ops.py"], "f1"),
        (["torch/distributed/tensor/_api.py", "torch/distributed/_functional_collectives.py"], "f2"),
        (["torch/distributed/pipelining/schedules.py"], "f1"),
    ],
)
def test_stack_that_passes_through_torch_distributed_waits_in_no_collective(
    files: list[str], call: str | None
) -> None:
    with nested("/jobs/train.py", *(f"{stacks._LIBRARIES[0]}/{file}" for file in files)) as owner:
        event = stacks.event(owner, OPEN, "h1")
    assert event.data["call"] == call


def test_rank_that_a_call_names_is_reported() -> None:
    library = (
        "def recv(x, src=None, group=None, group_src=None):\n    wait()\n"
        "def reduce(x, dst=None, group=None, group_dst=None):\n    wait()\n"
    )
    for call, expected in {"recv(1, 3)": 3, "recv(1)": None, "reduce(1, group_dst=2)": 2}.items():
        with stuck(f"def main():\n    src = 7\n    {call}\n", library=library) as owner:
            event = stacks.event(owner, OPEN, "h1")
        assert (event.data["call"], event.data["peer"]) == (call.partition("(")[0], expected)
    with stuck("def main():\n    src = 7\n    wait()\n") as owner:
        assert stacks.event(owner, OPEN, "h1").data["peer"] is None, "a variable of the user"


COLLECTING = """
import gc, threading, time
from traceml_ray.agent import stacks
from traceml_ray.wire import messages as wire

class Node: pass

for _ in range(8):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
for allocations in range(1, 120):  # a collection at each place where one can begin
    gc.disable()
    gc.collect()
    node = Node()
    node.me, node.own = node, threading.local()
    node.own.x = 1
    del node
    gc.set_threshold(allocations, 1000, 1000)
    gc.enable()
    stacks.event(None, wire.OpenStage(1, 2, 3), "x")
    assert gc.isenabled()
gc.disable()
stacks.event(None, wire.OpenStage(1, 2, 3), "x")
assert not gc.isenabled()
"""


def test_garbage_collection_during_the_walk_does_not_stop_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTING], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("owner", [None, 12345678])
def test_main_thread_is_taken_without_a_training_thread(owner: int | None) -> None:
    events: list[wire.Event] = []
    asking = threading.Thread(target=lambda: events.append(stacks.event(owner, OPEN, "h1")))
    asking.start()
    asking.join(240)
    assert events[0].message.startswith("thread MainThread, training:\n")
    assert "test_stacks.py" in str(events[0].data["where"])


def test_text_is_bounded_and_fits_the_wire_for_any_file_name() -> None:
    deep = "def f(n):\n    wait() if n == 0 else f(n - 1)\ndef main():\n    f(200)\n"
    with stuck(deep, "/jobs/ä\udc80" + "x" * 400 + ".py") as owner:
        event = stacks.event(owner, OPEN, "h1")
    assert len(event.message.encode()) <= stacks.MAX_BYTES
    assert event.message.splitlines()[1] == "  …"
    assert codec.size_of(event)
