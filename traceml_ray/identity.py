"""
The identity of this process in the job: global rank, local rank, node rank, and their source. Also parses the
ranks that a person asks for: `all`, `0,2`, `0,4-7` (`rank_filter`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

MAX_RANKS = 1 << 20
ATTEMPT = "TRACEML_ATTEMPT"
"""Environment variable of a rank: number of its attempt, the same on all nodes."""
_IN_NAME = re.compile(r"(?<![a-z0-9])(?<!local[_-])rank[_-]?(\d{1,7})(?!\d)", re.IGNORECASE)

Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class IdentityError(ValueError):
    """Ranks that contradict each other. The message names the variable or keyword, and the contradiction."""


class RankIdentity(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """
    One rank of one attempt of one job, resolved once.

    `node_id` is Ray's id of the node, None until a relay has reported it. `job_id` names the run; a session
    may hold several runs. Two attempts of a rank (a restart by torchrun or Ray Train) are two identities.
    """

    global_rank: Rank
    local_rank: Rank
    node_rank: Rank
    world_size: Size
    local_world_size: Size
    nnodes: Size
    hostname: str
    node_id: str | None
    job_id: str
    attempt: Number
    pid: Number
    source: str
    """
    Source of the ranks: explicit, ray_train, torch.distributed, torchrun, openmpi, slurm, pmi, single; `ray`
    for a Ray process without ranks, which the aggregator numbers within its job; `v1` for a sender of
    TraceML's own format.
    """
    name: str = ""
    """Name of the Ray actor; "" if it has none."""


_FIELDS = ("global_rank", "world_size", "local_rank", "local_world_size", "node_rank", "nnodes")

# The variables that say what _FIELDS say, in that order; "" where a launcher has none.
# Not OMPI_COMM_WORLD_NODE_RANK: that is a rank *within* its node, over all jobs there.
# Not SLURM_NNODES and SLURM_NTASKS_PER_NODE: they say what the job was given, not what this step uses.
_ENVIRONMENTS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    "openmpi": (
        *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        "",
        "",
    ),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", ""),
}

# (a, b, how much a must be below b): what cannot be otherwise, wherever both are known.
_ORDER = (
    ("global_rank", "world_size", 1),
    ("local_rank", "local_world_size", 1),
    ("local_rank", "world_size", 1),
    ("local_world_size", "world_size", 0),
    ("node_rank", "nnodes", 1),
)

_Found = tuple[str, dict[str, int]]
"""Name of a source, and the values of _FIELDS that it has. Rank and world size are among them."""

_SINGLE: _Found = ("single", {"global_rank": 0, "world_size": 1})


def resolve(
    *,
    global_rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    node_rank: int | None = None,
    nnodes: int | None = None,
    attempt: int | None = None,
    job_id: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> RankIdentity:
    """
    Return the identity of this process, from the first source that has both its rank and the world size.

    The sources are the keywords, then torch.distributed if it is initialised (torch is never imported for
    this), then the variables of torchrun, Open MPI, SLURM, PMI; else rank 0 of 1. If a source lacks facts
    about nodes, they are filled in: nodes of one size, ranks in blocks. If a source has no facts about nodes,
    one node is assumed.

    Raises:
        IdentityError: a value is not an integer or out of range, ranks and sizes contradict each other, or a
            rank is given by keyword without a world size.
    """
    ranks = global_rank, world_size, local_rank, local_world_size, node_rank, nnodes
    given = dict(zip(_FIELDS, ranks, strict=True))
    source, numbers = _from_keywords(given) or _from_torch(environ) or _from_environment(environ) or _SINGLE
    if attempt is None:
        name = ATTEMPT if environ.get(ATTEMPT) else "TORCHELASTIC_RESTART_COUNT"
        attempt = _integer(name, environ[name]) if environ.get(name) else 0
    return RankIdentity(
        **_complete(numbers),
        hostname=os.uname().nodename,
        node_id=None,
        job_id=job_id or _job_id(environ),
        attempt=_integer("attempt", attempt),
        pid=os.getpid(),
        source=source,
        name="",
    )


def _from_keywords(given: Mapping[str, int | None]) -> _Found | None:
    if all(value is None for value in given.values()):
        return None
    group = _group("explicit", _FIELDS, given.get)
    if group is None:
        raise IdentityError("global_rank and world_size must be given together")
    return group


def _from_torch(environ: Mapping[str, str]) -> _Found | None:
    """
    Return rank and size from torch, and the other values from an environment that
    describes the same world.
    """
    dist = sys.modules.get("torch.distributed")
    is_initialized = getattr(dist, "is_initialized", None)
    if dist is None or is_initialized is None or not is_initialized():
        return None
    world = {"global_rank": dist.get_rank(), "world_size": dist.get_world_size()}
    for source, names in _ENVIRONMENTS.items():
        try:
            group = _group(source, names, environ.get)
        except IdentityError:
            continue  # unreadable, so it cannot be the same world
        if group is not None and world.items() <= group[1].items():
            return "torch.distributed", group[1]
    return "torch.distributed", world


def _from_environment(environ: Mapping[str, str]) -> _Found | None:
    groups = (_group(source, names, environ.get) for source, names in _ENVIRONMENTS.items())
    return next((group for group in groups if group is not None), None)


def _group(source: str, names: tuple[str, ...], get: Callable[[str], str | int | None]) -> _Found | None:
    """Return the values of the variables `names`; None unless rank and world size are both set."""
    raw = {field: (name, get(name)) for field, name in zip(_FIELDS, names, strict=True)}
    raw = {field: (name, value) for field, (name, value) in raw.items() if value not in (None, "")}
    if "global_rank" not in raw or "world_size" not in raw:
        return None
    known = {field: _integer(name, value) for field, (name, value) in raw.items()}
    for low, high, below in _ORDER:
        if low in known and high in known and known[low] + below > known[high]:
            relation = "must be below" if below else "must not be above"
            raise IdentityError(f"{raw[low][0]}={known[low]} {relation} {raw[high][0]}={known[high]}")
    return source, known


def _integer(name: str, value: object) -> int:
    least = 1 if "SIZE" in name.upper() or name == "nnodes" else 0
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if not least <= number <= MAX_RANKS:
        raise IdentityError(f"{name}={value!r} must be an integer from {least} to {MAX_RANKS}")
    return number


def _complete(known: Mapping[str, int]) -> dict[str, int]:
    """Fill in the values that a source lacks: one node unless more are known, all nodes of one size."""
    rank, world = known["global_rank"], known["world_size"]
    nodes, node, local = known.get("nnodes"), known.get("node_rank"), known.get("local_rank")
    size = known.get("local_world_size") or max(-(-world // (nodes or 1)), (local or 0) + 1)
    nodes = nodes or max(-(-world // size), (node or 0) + 1)
    if local is None:
        local = rank % size
    if node is None:
        dealt_in_turn = local != rank % size and local == rank // nodes
        node = rank % nodes if dealt_in_turn else min(rank // size, nodes - 1)
    return dict(zip(_FIELDS, (rank, world, local, size, node, nodes), strict=True))


def _job_id(environ: Mapping[str, str]) -> str:
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run == "none":  # what torchrun sets for every job that has no --rdzv-id
        run = None
    return environ.get("TRACEML_SESSION") or run or environ.get("SLURM_JOB_ID") or "default"


def rank_in_name(name: str) -> int | None:
    """
    Return the rank in the name of a file or folder (`rank3`, `x.rank_3.json`); None if it
    contains none.
    """
    match = _IN_NAME.search(name)
    return int(match[1]) if match else None


_RANGE = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", re.ASCII)


class RankFilterError(ValueError):
    """A rank filter that cannot be read. The message names the invalid part, and shows a valid filter."""


@dataclass(frozen=True)
class RankFilter:
    """A selection of ranks: `rank in filter`."""

    ranges: tuple[range, ...] | None = None
    """Selected ranks; None: all ranks."""

    def __contains__(self, rank: int) -> bool:
        """Return whether that rank is selected."""
        return self.ranges is None or any(rank in one_range for one_range in self.ranges)


def rank_filter(text: str) -> RankFilter:
    """
    Return the filter that `text` describes: `all`, or ranks and ranges of ranks separated by commas, both
    ends included.

    Raises:
        RankFilterError: the text is neither.
    """
    if text.strip().lower() == "all":
        return RankFilter()
    return RankFilter(tuple(_range(part.strip(), text) for part in text.split(",")))


def _range(part: str, text: str) -> range:
    match = _RANGE.fullmatch(part)
    if match is None:
        what = f"{part[:40]!r} is not a rank" if part else "a rank is missing"
        raise RankFilterError(f"ranks {text[:80]!r}: {what}; write all, or 0,2, or 0,4-7")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise RankFilterError(f"ranks {text[:80]!r}: {part} ends before it begins; write {last}-{first}")
    if last >= MAX_RANKS:
        raise RankFilterError(f"ranks {text[:80]!r}: {last} is too large, ranks are below {MAX_RANKS}")
    return range(first, last + 1)
