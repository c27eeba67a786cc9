"""What the search box of every page finds: ranks, nodes, steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from traceml_ray.views.run_state import RunState
from traceml_ray.views.values import natural, whole

from .route import Route

_MOST = 20


def places(run: RunState, route: Route, asked: str) -> dict[str, str]:
    """Return the pages that `asked` may mean ("5", "rank 5", "host-1", "step 9"), by name, the best first."""
    wanted = asked.casefold().split()
    return dict(islice(_found(run, route, wanted), _MOST)) if wanted else {}


def _found(run: RunState, route: Route, wanted: list[str]) -> Iterator[tuple[str, str]]:
    number = whole(wanted[-1])
    if number is not None and wanted[0] != "step" and number in run.ranks:
        yield _rank(run, number), route.to("rank", number)
    for node in sorted(run.nodes, key=lambda node: natural(node["label"])):
        names = f"node {node['label']} {node['hostname']} {node['address']}".casefold()
        if all(word in names for word in wanted):
            yield f"node {node['label']}", route.to("node", node["node_id"])
    for rank in run.ranks:
        name = _rank(run, rank)
        if rank != number and all(word in name.casefold() for word in wanted):
            yield name, route.to("rank", rank)
    if number is not None and wanted[0] != "rank" and number <= (run.last_step or -1):
        yield f"step {number:,}", route.to("step", number)


def _rank(run: RunState, rank: int) -> str:
    return f"rank {rank} on {run.node_of(rank)}"
