"""One run of a session: the newest answers about its steps, ranks, nodes and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import asdict

from traceml_ray.analysis.labels import DEATHS
from traceml_ray.analysis.shapes import StepTimes
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict_shapes import TimedEpisode
from traceml_ray.signals.nodes.records import NodeSample
from traceml_ray.signals.view import SLOW_RANKS
from traceml_ray.signals.views import POLLED
from traceml_ray.store import query
from traceml_ray.store.query import Request
from traceml_ray.store.rank_processes import RankProcess, node_key, reporting, world_size
from traceml_ray.store.results import EventRow, LiveVerdict, NodeInfo
from traceml_ray.store.step_shapes import VerdictChange

from .values import as_dict

MAX_EVENTS = 2000
SLOW_S = 5.0
"""From `SLOW_RANKS` ranks on, ranks and nodes are polled only every `SLOW_S` seconds."""


LOADS = 60
"""Number of newest loads kept per node."""
_FIRST_LOADS = 24
"""Number of samples of each node in the first request. Later requests ask for the newest sample only."""


class NodeLoad(NamedTuple):
    """How loaded and how full a node was, and the temperature of its hottest GPU. None: unknown."""

    t_ns: int
    cpu_pct: float | None
    mem_pct: float | None
    gpu_util_pct: float | None
    gpu_temperature_c: float | None


class RunState:
    """The newest answers about one run: its step times, ranks, nodes, events and verdicts."""

    def __init__(self, run: str, limits: Thresholds) -> None:
        self.id = run
        self.viewed_at = 0.0
        self.times: StepTimes | None = None
        """Step times of the run, see `analysis.step_numbers.times`."""
        self.signals: dict[str, Any] = {}
        """The newest answer of each signal that is polled, by name."""
        self.verdict: LiveVerdict | None = None
        self.ranks: dict[int, RankProcess] = {}
        self.world = 0
        """Number of ranks of the job, as far as it is known."""
        self._reporting: frozenset[int] = frozenset()
        self.nodes: list[NodeInfo] = []
        self.labels: dict[str, str] = {}
        """Label of each node, by id."""
        self.samples: dict[str, dict[str, Any]] = {}
        """Newest sample of each node, by id."""
        self.loads: dict[str, deque[NodeLoad]] = {}
        """Loads of each node, by node id, received by polling. The newest is last."""
        self.events: deque[EventRow] = deque(maxlen=MAX_EVENTS)
        self.verdicts: deque[VerdictChange] = deque(maxlen=MAX_EVENTS)
        self._patience_ns = int(limits.report_timeout_s * 1e9)
        self._seen = 0, 0
        """Cursors of the newest event and of the newest change of verdict that were read."""
        self._asked_ranks = float("-inf")
        self._asked_signals: dict[str, float] = {}
        """When each polled signal was last requested, in the time of `questions`."""

    @property
    def is_read_to_end(self) -> bool:
        """Whether all stored rows have been read."""
        return self.times is not None and self.times.whole

    @property
    def last_step(self) -> int | None:
        """The newest step that all ranks have reported."""
        return self.times.last_step if self.times else None

    def questions(self, now: float, over: bool = False) -> list[Request[Any]]:
        """Return the questions to ask. `update` receives their answers. `over`: the run has ended."""
        asked: list[Request[Any]] = [query.GetVerdict(self.id), query.GetTimes(self.id)]
        asked += self._questions_of_signals(now, over)
        asked.append(query.GetEvents(self.id, self._seen[0], brief=True, most=MAX_EVENTS))
        asked.append(query.GetVerdicts(self.id, self._seen[1]))
        many = len(self.ranks) >= SLOW_RANKS
        if not self.ranks or not many or now - self._asked_ranks > SLOW_S:
            self._asked_ranks = now
            node_ids = tuple(node.node_id for node in self.nodes)
            asked += [
                query.GetRanks(self.id),
                query.GetNodes(self.id),
                query.GetNodeSamples(node_ids, last=1 if self.samples or many else _FIRST_LOADS),
            ]
        return asked

    def _questions_of_signals(self, now: float, over: bool) -> list[Request[Any]]:
        """Return the questions of polled signals that are due. Once the run is over, all are."""
        asked: list[Request[Any]] = []
        for view in POLLED:
            pause_s = view.polls_s(self.ranks, self.world)
            asked_at = self._asked_signals.get(view.name, float("-inf"))
            if over or (pause_s is not None and now - asked_at >= pause_s):
                self._asked_signals[view.name] = now
                asked.append(view.question(self.id))
        return asked

    def update(self, asked: list[Request[Any]], answers: list[Any]) -> bool:
        """Apply the answers to `questions`. Return whether anything is new."""
        answer_to = {type(request): answer for request, answer in zip(asked, answers, strict=True)}
        events, verdicts = answer_to[query.GetEvents], answer_to[query.GetVerdicts]
        self._seen = events.cursor, verdicts.cursor
        self.events.extend(events.items)
        self.verdicts.extend(verdicts.items)
        verdict = answer_to[query.GetVerdict]
        if verdict is None and self.verdicts:
            verdict = _as_verdict(self.verdicts[-1])
        new = bool(events.items or verdicts.items or verdict != self.verdict)
        self.verdict = verdict
        if query.GetRanks in answer_to:
            ranks, nodes = answer_to[query.GetRanks], answer_to[query.GetNodes]
            new |= (ranks, nodes) != (self.ranks, self.nodes)
            self.ranks, self.nodes = ranks, nodes
            self.world = world_size(ranks, None)
            self._reporting = frozenset(reporting(ranks, self._patience_ns))
            self.labels = {node.node_id: node.label for node in nodes}
            self._add_samples(answer_to[query.GetNodeSamples])
        self.signals |= {view.name: answer_to[view.question] for view in POLLED if view.question in answer_to}
        return self.update_times(answer_to[query.GetTimes]) or new

    def _add_samples(self, samples: Sequence[tuple[str, NodeSample]]) -> None:
        """
        Apply samples of nodes; the samples of one node are in order of time. A known sample adds
        nothing.
        """
        self.samples = {node: as_dict(sample) for node, sample in dict(samples).items()}
        for node, sample in samples:
            loads = self.loads.setdefault(node, deque(maxlen=LOADS))
            if not loads or sample.t_ns > loads[-1].t_ns:
                load = load_of(as_dict(sample))
                loads.append(NodeLoad(sample.t_ns, *(load[name] for name in NodeLoad._fields[1:])))

    def update_times(self, times: StepTimes) -> bool:
        """Replace the step times of the run. Return whether there are new ones."""
        before, self.times = self.times, times
        return before is None or _state(before) != _state(times)

    @property
    def died(self) -> bool:
        """Whether the verdict names a rank that died."""
        return self.verdict is not None and self.verdict.label in DEATHS

    @property
    def named(self) -> dict[str, Sequence[Any]]:
        """The `ranks` and `nodes` that the verdict names."""
        if self.verdict is None or self.verdict.label == "healthy":
            return {"ranks": (), "nodes": ()}
        return {"ranks": self.verdict.ranks, "nodes": self.verdict.nodes}

    @property
    def episodes(self) -> Sequence[TimedEpisode]:
        """Episodes of the run, the costliest first. Empty if they are not known."""
        return (self.verdict.episodes if self.verdict else None) or ()

    def reporting(self) -> frozenset[int]:
        """
        Ranks that may still deliver. Ended ranks, and ranks silent for long while others report, are
        excluded.
        """
        return self._reporting

    def node_of(self, rank: int | None) -> str | None:
        """Return the label of the node on which a rank runs. None: unknown."""
        process = self.ranks.get(rank) if rank is not None else None
        return self.labels.get(node_key(process), node_key(process)) if process and process.identity else None


def _as_verdict(change: VerdictChange) -> LiveVerdict:
    fields = {name: value for name, value in asdict(change).items() if name != "t_ns"}
    return LiveVerdict(**fields, episodes=None, brief=None)


def _state(times: StepTimes) -> tuple[object, ...]:
    return times.version, times.last_step, times.steps, times.whole, times.world


def load_of(sample: Mapping[str, Any]) -> dict[str, float | None]:
    """
    Return how loaded and full a node and its GPUs are: the value of the hottest GPU, and the
    total power.
    """
    gpus = sample.get("gpus") or []
    used, heat, power = (_known(gpus, name) for name in ("util_pct", "temperature_c", "power_w"))
    return {
        "cpu_pct": sample.get("cpu_pct"),
        "mem_pct": _memory_pct([sample]),
        "gpus": len(gpus) if sample.get("gpus") is not None else None,
        "gpu_util_pct": sum(used) / len(used) if used else None,
        "gpu_mem_pct": _memory_pct(gpus),
        "gpu_temperature_c": max(heat, default=None),
        "gpu_power_w": sum(power) if power else None,
    }


def _known(gpus: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [gpu[name] for gpu in gpus if gpu[name] is not None]


def _memory_pct(samples: Sequence[Mapping[str, Any]]) -> float | None:
    pairs = [(sample.get("mem_used_bytes"), sample.get("mem_total_bytes")) for sample in samples]
    measured = [(used, total) for used, total in pairs if used is not None and total]
    return 100 * sum(used for used, _ in measured) / sum(total for _, total in measured) if measured else None
