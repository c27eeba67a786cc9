"""Tables of what profiles hold, as a terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence

from traceml_ray import text
from traceml_ray.reports.layout import Columns, page, table
from traceml_ray.traces.difference import Difference
from traceml_ray.traces.key_averages import Operation


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else text.size(nbytes)


def _ms(value: float | None) -> str:
    return "" if value is None else text.number(value, 3)


OPERATIONS: Columns = {
    "Node ID": lambda each: each.node or each.node_id or "",
    ">Rank": lambda each: text.plain(each.rank),
    "Name": lambda each: each.name,
    "Kind": lambda each: each.kind,
    "Input shapes": lambda each: each.input_shapes or "",
    ">Self CPU ms": lambda each: _ms(each.self_cpu_ms),
    ">CPU ms": lambda each: _ms(each.cpu_ms),
    ">Self device ms": lambda each: _ms(each.self_device_ms),
    ">Device ms": lambda each: _ms(each.device_ms),
    ">Self CPU memory": lambda each: _size(each.self_cpu_bytes),
    ">Self device memory": lambda each: _size(each.self_device_bytes),
    ">Calls": lambda each: f"{each.calls:,}",
}


def render_operations(title: str, operations: Sequence[Operation]) -> str:
    """Return a table of operations; columns of what was not recorded are left out."""
    return "\n".join(table(title, OPERATIONS, operations) or [f"{title}: none"]) + "\n"


def _more(value: float) -> str:
    return text.number(value, 3, sign=True)


COMPARED: Columns = {
    "Operation": lambda each: each.name,
    "Kind": lambda each: each.kind,
    ">More ms": lambda each: _more(each.more_ms),
    "On": lambda each: "device" if each.on_device else "",
    ">Self CPU ms": lambda each: _ms(each.self_cpu_ms),
    ">Others": lambda each: _ms(each.other_self_cpu_ms),
    ">Self device ms": lambda each: _ms(each.self_device_ms),
    "> Others": lambda each: _ms(each.other_self_device_ms),
    ">Calls": lambda each: text.number(each.calls),
    ">  Others": lambda each: text.number(each.other_calls),
}


def render_difference(found: Difference, top: int = 15) -> str:
    """Return what one rank does more of than others: sentences, then the operations that explain most."""
    than = text.ranks(found.others) if len(found.others) == 1 else f"the median of {text.ranks(found.others)}"
    per = f"per step, of {text.count(found.steps, 'step')}" if found.steps else "in all of the trace"
    stage = f", `{found.stage}` alone" if found.stage else ""
    title = f"Rank {found.rank} beside {than}, {per}{stage}:"
    waits = "Waiting for other ranks, or for a device (time that no work hides):"
    return page(
        [
            [each[0].upper() + each[1:] for each in found.sentences],
            table(title, COMPARED, found.operations[:top]),
            table(waits, COMPARED, found.waits[:top]),
        ]
    )
