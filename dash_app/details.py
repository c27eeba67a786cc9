"""The pages of one node and of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from traceml_ray.analysis.quantities import GPU, NODE, PROCESS, Quantity, series
from traceml_ray.analysis.step_sums import MAX_BINS
from traceml_ray.reports.hangs import hangs
from traceml_ray.stages import SEGMENT_BITS, STAGES
from traceml_ray.store import query
from traceml_ray.store.nodes import node_key
from traceml_ray.store.streams import Stream

from .events import node_of
from .overview import nodes, unheard
from .values import as_dict, by_stage, natural, number, told

if TYPE_CHECKING:
    from .followed import Run
    from .session_cache import SessionCache

_BUSY_SPARK = 120
_RARE = 5
"""What NVML is asked for in each so manieth sample only is as it was until it is asked for again."""
_SAMPLES, _WITH_PROCESSES = 170, 6


def node(cache: SessionCache, run: Run | None, node: str) -> dict[str, Any]:
    """Return the page of a node, by id or label."""
    cards = nodes(run, run.times) if run else []
    card = next((card for card in cards if node in (card["key"], card["label"])), None)
    by_name = sorted(cards, key=lambda card: natural(card["label"]))
    found: dict[str, Any] = {"node": None, "nodes": by_name, "ranks": [], "samples": {}, "gpus": []}
    if run is None or card is None:
        return found
    known: Mapping[str, Any] = next(
        (n for n in run.nodes if n["node_id"] == card["key"]), unheard(run, card["label"])
    )
    streams = {run.ranks[rank].id: rank for rank in card["ranks"] if rank in run.ranks}
    processes = cache.ask(query.ProcessSamples(tuple(streams), last=1)) or []
    memory = {streams[stream]: sample.rss_bytes for stream, sample in processes}
    samples = _samples(cache, query.NodeSamples((card["key"],), _SAMPLES))
    ranks = sorted(streams.values())
    times = run.times or {"ranks": (), "busy_ms": ()}
    median = dict(zip(times["ranks"], times["busy_ms"], strict=True))
    drawn = cache.ask(query.Busy(run.id, tuple(ranks), _BUSY_SPARK)) or {"ranks": (), "busy_ms": ()}
    busy = dict(zip(drawn["ranks"], drawn["busy_ms"], strict=True))
    rows = [
        {
            **_about(run, rank, samples),
            "median_ms": number(median.get(rank)),
            "busy": told(busy.get(rank, ())),
            "rss_bytes": memory.get(rank),
        }
        for rank in ranks
    ]
    about = {**card, **{name: known[name] for name in ("hostname", "address", "node_id")}}
    return {
        **found,
        "node": about,
        "ranks": rows,
        "samples": _timed(samples, NODE),
        "gpus": _gpus(card["key"], samples, run.events),
    }


def _about(run: Run, rank: int, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the identity and position of a rank; `samples` are of its node."""
    stream = run.ranks[rank]
    identity, opened = stream.identity, stream.open_stage
    return {
        "rank": rank,
        "local_rank": identity.local_rank if identity else None,
        "gpu": _gpu_of(identity.pid, samples) if identity else None,
        "last_step": None if stream.last_key is None else stream.last_key >> SEGMENT_BITS,
        "open_stage": None if opened is None or stream.ended else STAGES[opened],
        "state": _state(run, rank, stream),
    }


def _state(run: Run, rank: int, stream: Stream) -> str:
    if stream.exit_code:
        return f"exit code {stream.exit_code}"
    if stream.ended:
        return "finished" if stream.final else "lost"
    return "running" if rank in run.reporting() else "silent"


def _gpu_of(pid: int, samples: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the device on which a process was seen last; not every sample tells of processes."""
    for sample in reversed(samples):
        for gpu in sample["gpus"] or ():
            if any(pid in (process["pid"], *process["parents"]) for process in gpu["processes"] or ()):
                return int(gpu["index"])
    return None


def _timed(samples: Sequence[Mapping[str, Any]], table: Sequence[Quantity]) -> dict[str, Any]:
    return {"t_ns": [sample["t_ns"] for sample in samples], **series(samples, table)}


def _samples(cache: SessionCache, request: query.NodeSamples | query.ProcessSamples) -> list[dict[str, Any]]:
    """Return samples of one node or process."""
    found: Sequence[tuple[Any, Any]] = cache.ask(request) or ()
    return [as_dict(sample) for _, sample in found]


def _gpus(
    node: str, samples: Sequence[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the series of each device, and its critical errors, the newest first (None: not known)."""
    by_device: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        for gpu in sample["gpus"] or ():
            by_device.setdefault(gpu["index"], []).append({**gpu, "t_ns": sample["t_ns"]})
    critical = [event["data"] for event in events if event["kind"] == "xid" and event["node_id"] == node]
    made = []
    for index, found in sorted(by_device.items()):
        known = series(found, GPU)
        known |= {each.name: _held(known[each.name]) for each in GPU if each.counter}
        xids = [xid for data in reversed(critical) if data.get("gpu") == index and (xid := data.get("xid"))]
        made.append(
            {
                "index": index,
                "name": found[-1]["name"],
                "t_ns": [gpu["t_ns"] for gpu in found],
                **known,
                "throttle": found[-1]["throttle"],
                "ecc": _held([gpu["ecc_uncorrected"] for gpu in found]),
                "xid": xids or (None if found[-1]["xid"] is None else []),
            }
        )
    return made


def _held(values: Sequence[Any] | None) -> list[Any] | None:
    """Fill the gaps between the samples in which something was asked for."""
    last, age, filled = None, 0, []
    for value in values or ():
        last, age = (last, age + 1) if value is None else (value, 0)
        filled.append(last if age < _RARE else None)
    return filled if any(value is not None for value in filled) else None


def rank(cache: SessionCache, run: Run | None, rank: int | str) -> dict[str, Any]:
    """Return the page of a rank."""
    rank = int(rank)
    found: dict[str, Any] = {"rank": None, "stages": {}, "median": {}, "parts": [], "process": {}}
    found |= {"stacks": [], "suspect": None}
    if run is None or rank not in run.ranks:
        return found
    stream = run.ranks[rank]
    node = node_key(stream) if stream.identity else ""
    samples = _samples(cache, query.NodeSamples((node,), _WITH_PROCESSES))
    found["rank"] = {
        **_about(run, rank, samples),
        "node": node_of(run, rank),
        "node_key": node or None,
        "pid": stream.identity.pid if stream.identity else None,
        "attempt": stream.identity.attempt if stream.identity else None,
        "exit": stream.exit_code,
        "errors": stream.errors,
        "missing": stream.missing,
    }
    suspects = (run.verdict or {}).get("suspects") or ()
    found["suspect"] = next((suspect for suspect in suspects if suspect["rank"] == rank), None)
    hung = hangs(run.verdicts)
    found["stacks"] = [{"ranks": list(s.ranks), "text": s.text} for s in hung[-1].stacks] if hung else []
    found["process"] = _timed(_samples(cache, query.ProcessSamples((stream.id,), _SAMPLES)), PROCESS)
    shown: Any = cache.ask(query.RankSteps(run.id, rank, MAX_BINS))
    if shown and len(shown["steps"]):
        steps = shown["steps"].tolist()
        found["stages"] = {"steps": steps, **by_stage(shown["stages"])}
        found["median"] = by_stage(shown["median"])
        parts = cache.ask(query.Spans(run.id, rank, steps[0], steps[-1])) or []
        mean = shown["mean"]
        found["parts"] = [{**part, "share": _of_stage(part["ms"], mean[part["stage"]])} for part in parts]
    return found


def _of_stage(ms: float, stage_ms: float) -> float | None:
    return min(1.0, ms / stage_ms) if stage_ms > 0 else None
