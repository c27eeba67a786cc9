"""
Profiles: what torch's profiler recorded of a few steps of some ranks, in `<session folder>/profiles/<id>/`.

`profile.json` holds the request and the result of each rank. `rank-5.json.gz` is the trace of a rank as torch
exports it (Chrome's Trace Event Format, gzip). A profile appears by one rename, so a reader sees a complete
profile or none.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from traceml_ray import files, text
from traceml_ray.stages import N_STAGES
from traceml_ray.store.session import read_json

FOLDER = "profiles"
MANIFEST = "profile.json"
SCHEMA = "traceml_ray/profile/1"
MAX_RANKS = 64
"""Largest number of ranks in a profile; the other ranks of a larger job do the same work."""
_UNFINISHED = ".unfinished-"

State = Literal["asked", "armed", "recording", "sending", "captured", "refused", "failed"]
"""
State of one rank. asked: the command is on its way. armed: it waits for the first step. refused: it cannot
record, and nothing was recorded. failed: it was recorded and is lost.
"""
OVER: tuple[State, ...] = ("captured", "refused", "failed")


class ProfileStep(msgspec.Struct, frozen=True):
    """One step of a rank that was recorded; times are ns since the epoch on the clock of its node."""

    step: int
    """Number of the step."""
    begin_ns: int
    """End of the previous step's optimizer, in ns."""
    end_ns: int
    """End of the step's optimizer, in ns."""
    sync_exit_ns: int | None
    """End of the step's last backward, in ns: the end of its row (docs/method.md)."""
    stages_ns: list[int] | None = None
    """Time in each of `stages.STAGES`, in ns; None if no row is stored."""


class RankProfile(msgspec.Struct):
    """Result of a profile on one rank; None: not known."""

    rank: int
    """Global rank."""
    state: State
    """
    How far it is: asked, armed, recording, sending, captured, refused (nothing was recorded) or failed
    (it is lost).
    """
    reason: str | None = None
    """Why the rank has no trace."""
    node_id: str | None = None
    """Ray's id of the node."""
    node: str | None = None
    """Label of the node: `node-1`."""
    hostname: str | None = None
    """Hostname of the node."""
    pid: int | None = None
    """Process id of the rank."""
    process: int | None = None
    """Id of the rank process in the session file."""
    file: str | None = None
    """Name of the trace in the folder of the profile."""
    bytes: int = 0
    """Bytes of the trace written so far."""
    total_bytes: int | None = None
    """Size of the trace, in bytes."""
    clock_offset_ns: int | None = None
    """Offset to add to times of the rank's node to get the aggregator's clock, in ns."""
    clock_bound_ns: int | None = None
    """Largest error of that offset, in ns."""
    steps: list[ProfileStep] = []
    """The recorded steps; empty before they are known."""
    start_ms: float | None = None
    """Time of the training thread for starting torch's profiler, in ms."""
    stop_ms: float | None = None
    """Time of the training thread for stopping torch's profiler and collecting its events, in ms."""
    export_ms: float | None = None
    """Time for writing the trace, in ms; no Python code of the process ran meanwhile."""
    serves: bool = False
    """
    Whether the rank has no steps of its own, but works for other ranks (torch.distributed.rpc). It recorded
    all the time in which the other ranks did their steps, and some time before and after; `steps` has that
    time by its own clock.
    """


class Profile(msgspec.Struct, kw_only=True):
    """Contents of `profile.json`."""

    schema: str = SCHEMA
    """Name and version of this format."""
    id: str
    """Id of the profile, and name of its folder."""
    session: str
    """Name of the session."""
    run: str | None
    """Id of the run; None: not known."""
    time: str
    """When the profile was requested, ISO 8601 in UTC."""
    t_ns: int
    """When the profile was requested (ns since the epoch, aggregator's clock)."""
    why: str
    """One sentence: who requested the profile, or which verdict did."""
    requests: list[str] = []
    """Ids of the requests that the profile answers."""
    error: str | None = None
    """Why no rank was asked."""
    by_itself: bool = False
    """Whether a verdict started the profile, not a person."""
    suspect: int | None = None
    """Rank named by the verdict that started the profile."""
    stage: str | None = None
    """Stage in which the suspect is late; `median` is the rank it is compared with."""
    median: int | None = None
    """Rank that the suspect is compared with."""
    first_step: int | None
    """First recorded step, the same on all ranks; None if no rank has steps (torch.distributed.rpc)."""
    number: int = 1
    """How often the profile was begun; more than once where a rank was past the first step already."""
    n_steps: int
    """
    Number of recorded steps. For ranks without steps, number of seconds recorded on all ranks at the same
    time.
    """
    memory: bool = False
    """Whether the allocations of each operation are recorded."""
    stacks: bool = False
    """Whether the place in the code that called each operation is recorded."""
    shapes: bool = False
    """Whether the shapes of the inputs of each operation are recorded."""
    ranks: list[RankProfile]
    """Result on each rank that was asked."""
    found: list[str] = []
    """Sentences on what the suspect does more of than the median, operation by operation."""
    traceml_ray: str
    """Version of this package that wrote the file."""

    @property
    def captured(self) -> list[RankProfile]:
        """The ranks whose traces are stored."""
        return [rank for rank in self.ranks if rank.state == "captured"]

    @property
    def extent(self) -> str:
        """What was recorded, as text: `3 steps from step 812 on`."""
        if self.first_step is None and any(rank.serves for rank in self.ranks):
            return f"{text.count(self.n_steps, 'second')}, since no rank has steps"
        began = "" if self.first_step is None else f" from step {self.first_step:,} on"
        return text.count(self.n_steps, "step") + began


class ProfileInfo(msgspec.Struct, frozen=True):
    """A stored profile with its folder and size."""

    profile: Profile
    """Contents of its `profile.json`."""
    path: str
    """Folder of the profile, on the aggregator's node."""
    bytes: int
    """Size of all its files, in bytes."""


class Profiles(msgspec.Struct, frozen=True):
    """The profiles of a session."""

    done: list[ProfileInfo]
    """Finished profiles, the oldest first."""
    now: Profile | None
    """Profile in progress."""


@dataclass(frozen=True)
class StoredProfile:
    """A profile of a session, and its folder."""

    path: Path
    profile: Profile

    @property
    def bytes(self) -> int:
        """Size of all files of the profile (bytes)."""
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())

    def trace(self, rank: RankProfile) -> Path:
        """Return the path of the trace of a captured rank."""
        return self.path / str(rank.file)


def profiles_of(folder: Path) -> list[StoredProfile]:
    """
    Return the profiles in a session folder, the oldest first. Folders that are not
    profiles are left out.
    """
    stored_profiles = []
    for name in names_of(folder):
        path = folder / FOLDER / name
        with contextlib.suppress(OSError, ValueError):
            stored_profiles.append(StoredProfile(path, read_profile(path)))
    return stored_profiles


def listed(folder: Path) -> Profiles:
    """Return the finished profiles of a session folder and the profile in progress."""
    done = [ProfileInfo(stored.profile, str(stored.path), stored.bytes) for stored in profiles_of(folder)]
    return Profiles(done, under_way(folder))


def read_profile(path: Path) -> Profile:
    """Return the manifest in a profile's folder. Raises OSError, ValueError."""
    profile = read_json(path / MANIFEST, Profile)
    for rank in profile.ranks:
        if any(step.stages_ns is not None and len(step.stages_ns) != N_STAGES for step in rank.steps):
            raise ValueError(f"{path / MANIFEST}: rank {rank.rank} has an invalid row")
        if rank.file is not None and rank.file != trace_name(rank.rank):
            raise ValueError(f"{path / MANIFEST}: {rank.file} is not the name of a trace")
    return profile


def under_way(folder: Path) -> Profile | None:
    """Return the profile in progress of a session folder, with the results so far; None if there is none."""
    for path in (folder / FOLDER).glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError, ValueError):
            return read_profile(path)
    return None


def names_of(folder: Path) -> list[str]:
    """Return the ids of the profiles in a session folder, the oldest first, without reading the profiles."""
    try:
        return sorted(p.name for p in (folder / FOLDER).iterdir() if p.name[0] != "." and p.is_dir())
    except OSError:
        return []


def trace_name(rank: int) -> str:
    """Return the file name of the trace of a rank."""
    return f"rank-{rank}.json.gz"


def read_part(folder: Path, profile: str, name: str, offset: int, n: int) -> bytes:
    """
    Return at most `n` bytes of a file of a profile, from `offset` on. Empty beyond the file's end, or if
    there is no such file.
    """
    if profile not in names_of(folder) or "/" in name:
        return b""
    try:
        return files.read_part(folder / FOLDER / profile / name, offset, n)
    except (OSError, ValueError):
        return b""


def remove_profile(folder: Path, profile: str) -> bool:
    """Remove a profile of a session. Return False if there is no profile with that id."""
    if profile not in names_of(folder):
        return False
    shutil.rmtree(folder / FOLDER / profile, ignore_errors=True)
    return True


def unfinished(folder: Path, profile: str) -> Path:
    """
    Return the folder of a profile in progress, where its traces arrive. The folder is created, readable for
    this user only. Raises OSError.
    """
    here = folder / FOLDER / f"{_UNFINISHED}{profile}"
    here.mkdir(mode=0o700, parents=True, exist_ok=True)
    return here


def finish(folder: Path, profile: Profile) -> Path:
    """Publish a finished profile, with the traces of its `captured` ranks and no others. Raises OSError."""
    here, kept = unfinished(folder, profile.id), {rank.file for rank in profile.captured}
    for path in here.iterdir():
        if path.name not in kept:
            path.unlink()
    show(folder, profile)
    there = folder / FOLDER / profile.id
    here.rename(there)
    return there


def show(folder: Path, profile: Profile) -> None:
    """Publish the progress of a profile, which others read with `under_way`. Raises OSError."""
    change(unfinished(folder, profile.id), profile)


def change(path: Path, profile: Profile) -> None:
    """Write the manifest of the profile in the folder `path`. Raises OSError."""
    write_manifest(path, encoded(profile))


def encoded(profile: Profile) -> bytes:
    """Return the manifest of a profile as bytes."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2)


def write_manifest(path: Path, manifest: bytes) -> None:
    """Write the encoded manifest of the profile in the folder `path`, see `encoded`. Raises OSError."""
    files.write_file(path / MANIFEST, manifest)


def clear_unfinished(folder: Path, but: str | None = None) -> None:
    """Remove the folders of unfinished profiles that a killed process left behind."""
    for left in (folder / FOLDER).glob(f"{_UNFINISHED}*"):
        if left.name != f"{_UNFINISHED}{but}":
            shutil.rmtree(left, ignore_errors=True)


def prune(folder: Path, max_bytes: int) -> list[str]:
    """
    Remove the oldest profiles until the rest has at most `max_bytes`. The newest profile always stays. Return
    the ids of the removed ones.
    """
    stored_profiles = [(stored, stored.bytes) for stored in profiles_of(folder)]
    removed, total = [], sum(size for _, size in stored_profiles)
    for stored, size in stored_profiles[:-1]:
        if total <= max_bytes:
            break
        total -= size
        removed.append(stored.path.name)
        shutil.rmtree(stored.path, ignore_errors=True)
    return removed
