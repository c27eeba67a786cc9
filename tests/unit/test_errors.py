"""What is swallowed is counted by place, told once, and raised where somebody debugs."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from traceml_ray.errors import MAX_PLACES, Errors
from traceml_ray.signals.collectors import COLLECTORS
from traceml_ray.signals.kinds import KINDS
from traceml_ray.wire.codec import WireError

ROOT = Path(__file__).parents[2]
BROAD = {"Exception", "BaseException"}
TELLS = {"note", "swallow", "failed", "_failed", "fail", "_fail", "_traceml_failed", "_lost", "set_exception"}
"""Calls that count an exception, or hand it on to who asked."""
SAYS = {"log", "warn", "warning", "write", "_inert"}
"""Calls that tell a person at once, where there is nothing to count in yet, or not any more."""
OTHERWISE = {
    "ray/actor_calls.py _find_actor": "handed to whoever polls, who counts it",
    "errors.py error_text": "its kind is in the text",
    "agent/patch/collectives.py _named": "only a prettier name is lost",
    "agent/site/sitecustomize.py _wait_for_torch": "said as soon as there is torch",
    "agent/rank_agent.py sample": "the value is null then, which says so",
    "signals/memory/agent.py _turn_on": "there is no record then, and `missing` has the reason",
    "signals/memory/samplers.py _try": "the value is null then, and `missing` has the reason",
    "signals/memory/samplers.py _of_torch": "the same",
    "signals/memory/samplers.py _read": "the same",
    "agent/activity.py _switches": "the value is not known then",
    "agent/activity.py _core_ns": "the same",
    "agent/activity.py _started": "a process that has ended is left out",
    "agent/activity.py _children": "the same",
    "agent/stacks.py _global_rank": "the rank is not known then",
    "agent/batch_size.py mark": "the size is not known then, and `missing` has the reason",
    "agent/bootstrap.py _traceback": "the value is null then; the error itself is in the event",
    "launchers/check_process.py check": "it is the answer",
    "launchers/guard.py run": "raised again by the thread that waits",
    "launchers/helper.py _attempt": "it is the answer",
    "monitor/offline.py main": "it is the answer",
    "signals/check/probes.py _made": "a sentence of the result has the reason",
    "signals/check/probes.py round": "the same",
    "signals/check/process.py do": "it is the answer",
    "signals/check/process.py _gpus": "no GPU is measured then",
    "signals/check/state.py _answer": "the values are null then",
    "signals/logged/agent.py log": "raised at the end, once the other values are noted",
    "ray/connection.py _refusal": "`ray.init`, which comes next, raises it",
    "sinks/process.py opened": "the state of the sink has the reason",
    "sinks/sink.py _run": "the state of the sink has the reason",
    "sinks/scraped.py _answer": "the state of the sink has the reason",
    "sinks/alerts/alerting.py _run": "the state of the sink has the reason",
    "sinks/alerts/send.py send": "raised again, without secrets, for the state of the sink",
    "sinks/alerts/send.py _post": "the same",
    "sinks/alerts/send.py _connected": "raised again, once the connection is closed",
    "sinks/trackers.py _finish": "raised at the end, once the other trackers have the report",
    "launchers/train_callback.py _failed": "counting itself has failed",
    "launchers/train_confirm.py check": "it is the answer, which becomes a note of the run",
    "launchers/train_confirm.py _leave": "the same",
}


def broad(handler: ast.AST) -> bool:
    """Whether it catches everything."""
    if not isinstance(handler, ast.ExceptHandler):
        return False
    names = (
        {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else BROAD
    )
    return bool(names & BROAD)


def handlers(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Give what catches everything, with the name of the innermost function around it."""
    where = f"{path.relative_to(ROOT)}".removeprefix("traceml_ray/")
    inside: dict[ast.AST, str] = {}
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            inside |= {node: function.name for node in ast.walk(function) if broad(node)}
    yield from ((f"{where} {name}", node) for node, name in inside.items())


def tells(handler: ast.AST) -> bool:
    """Whether somebody hears of it: it is raised again, counted, said, or the answer to who asked."""
    for node in ast.walk(handler):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Subscript) and "errors" in ast.unparse(node)):
            return True
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in TELLS | SAYS:
                return True
    return False


@pytest.mark.parametrize("package", ["traceml_ray", "launchers", "dash_app"])
def test_broad_exception_handlers_are_never_silent(package: str) -> None:
    all_handlers = [handler for path in (ROOT / package).rglob("*.py") for handler in handlers(path)]
    assert {where for where, handler in all_handlers if not tells(handler)} - OTHERWISE.keys() == set()


COUNTS, HANDED_ON = {"note", "count", "swallow"}, {"guard", "failed", "_guard"}
FIXED = {
    "agent/outbox.py _size_of": "the name of a field",
    "agent/rank_agent.py guard": "its callers' are looked at",
    "agent/rank_agent.py tick": "the name of a collector",
    "monitor/live_verdict.py judge": "the name of a signal that is judged live",
    "monitor/live_verdict.py resume": "the same",
    "monitor/live_steps.py _show_steps": "the same",
    "agent/rank_agent.py _lose": "one of six",
    "agent/device_use.py _count": "names fixed in device.py",
    "agent/patch/patcher.py failed": "its callers' are looked at",
    "agent/patch/patcher.py after": "the name of a patch of ours",
    "agent/patch/patcher.py make": "the name of a patch of ours",
    "agent/patch/patcher.py call": "the name of a patch of ours",
    "errors.py note": "place and the name of a class",
    "errors.py swallow": "place and the name of a class",
    "monitor/rank_intake.py receive": "one of two",
    "ray/aggregator.py _ask_relays": "the name of a method of ours",
    "monitor/aggregator.py _count_lost": "one of each table",
    "monitor/profile_files.py _run": "the name of its work, fixed by its caller",
    "monitor/bundling.py write_due": "one of a few reasons",
    "launchers/train_callback.py _failed": "the name of a hook of ours",
    "trackers/run_writer.py _run": "the name of a tracker of ours",
}
"""Places that are no literal, but one of a few all the same."""
LOST = {"kind.lost", "NODE.lost"}
"""What a kind of record is called: a literal where the kind is declared."""


def is_fixed(place: ast.expr) -> bool:
    """Whether it is a literal, or made of literals and of what a kind of record is called."""
    if isinstance(place, ast.JoinedStr):
        return all(is_fixed(part) for part in place.values)
    if isinstance(place, ast.FormattedValue):
        return is_fixed(place.value)
    return isinstance(place, ast.Constant) or ast.unparse(place) in LOST


def test_error_places_are_fixed_in_the_code() -> None:
    places = set()
    for path in [p for name in ("traceml_ray", "launchers", "dash_app") for p in (ROOT / name).rglob("*.py")]:
        where = f"{path.relative_to(ROOT)}".removeprefix("traceml_ray/")
        for function in ast.walk(ast.parse(path.read_text())):
            for call in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
                    continue
                called = call.func.attr
                counts = called in HANDED_ON or (called in COUNTS and "errors" in ast.unparse(call.func))
                if counts and not is_fixed(call.args[0]):
                    places.add(f"{where} {function.name}")
    assert places - FIXED.keys() == set()


def test_kinds_and_collectors_have_fixed_names_of_which_all_have_room_as_error_places() -> None:
    names: list[ast.expr | None] = []
    for path in (ROOT / "traceml_ray" / "signals").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Kind":
                names += [node.args[0], node.args[2]]
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "COLLECTORS":
                assert isinstance(node.value, ast.Dict)
                names += node.value.keys
    assert [name for name in names if not isinstance(name, ast.Constant)] == []
    assert 2 * len(KINDS) + len(COLLECTORS) == len(names) < MAX_PLACES


def test_error_source_is_in_the_message_and_takes_no_place() -> None:
    errors = Errors()
    for number in range(10 * MAX_PLACES):
        errors.note("packet", WireError("garbage", str(number)), f"pid {number}")
    assert errors == {"packet: garbage": 10 * MAX_PLACES}
    assert [cause.message for cause in errors.causes()] == [
        "swallowed in packet (pid 0): WireError: garbage: 0"
    ]


def test_errors_are_counted_by_place_and_kind_and_reported_once() -> None:
    errors = Errors()
    for _ in range(3):
        errors.swallow("backward", ValueError("torch moved"))
    errors.note("reply", WireError("garbage", "0 bytes"))
    assert errors == {"backward: ValueError": 3, "reply: garbage": 1}
    messages = [cause.message for cause in errors.causes()]
    assert messages == [
        "swallowed in backward: ValueError: torch moved",
        "swallowed in reply: WireError: garbage: 0 bytes",
    ]
    errors.swallow("backward", ValueError("again"))
    assert errors.causes() == []


def test_error_counts_survive_pickling() -> None:
    errors = Errors({"run: garbage": 2})
    errors.count("run: garbage")
    assert pickle.loads(pickle.dumps(errors)) == {"run: garbage": 3}


def test_error_names_from_elsewhere_are_bounded() -> None:
    errors = Errors()
    for number in range(10 * MAX_PLACES):
        errors.count(f"garbage from pid {number}")
    assert len(errors) == MAX_PLACES + 1
    assert errors.total() == 10 * MAX_PLACES


def test_debug_mode_raises_where_it_may_and_prints_where_it_must_go_on(capsys) -> None:
    errors = Errors(debug=True)
    with pytest.raises(ValueError, match="torch moved"):
        errors.swallow("backward", ValueError("torch moved"))
    errors.note("turn", ValueError("relay"))
    assert "ValueError: relay" in capsys.readouterr().err
    assert errors.total() == 2
