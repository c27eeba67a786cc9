"""Tables of what profiles hold, as a terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence

from traceml_ray import text
from traceml_ray.reports.layout import Columns, table
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
