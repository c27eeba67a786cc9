"""
What travels about layers: what a person asks for.

What travels about profiles: what a person asks for, how far a rank is with it (its trace: `wire.bulk`).

What a person asks for is a `MeasureRequest`, from wherever it comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from traceml_ray.identity import rank_filter
from traceml_ray.wire.codec import FEW, Count, Int64, Name, Part, ready

MAX_LAYER_STEPS = 1000


class LayersRequest(Part, frozen=True):
    """For how many steps of which run a person wants to have the layers measured."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYER_STEPS)] = 20
    run: str | None = None
    """Id or name; None: the newest."""

    @classmethod
    def checked(cls, steps: int, run: str | None = None) -> LayersRequest:
        """Return it. Raises ValueError where there cannot be so many steps."""
        if not 1 <= steps <= MAX_LAYER_STEPS:
            raise ValueError(f"steps={steps} must be an integer from 1 to {MAX_LAYER_STEPS}")
        return cls(steps, run)


class LayersCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the command `layers`, see `wire.Command`."""

    id: Name
    run: str | None = None
    ranks: str = "all"
    steps: Count


MAX_PROFILE_STEPS = 50
OPTIONS = ("memory", "stacks", "shapes")
"""What may be recorded besides, see `ProfileRequest`."""
LATE = "was over when the request came"
"""Phrase in the reason of a rank that was past the first step. The profile is then begun again."""

CaptureState = Literal["armed", "recording", "sending", "refused", "failed"]
"""State of one rank as the rank knows it; see `store.profiles.State`."""


class ProfileRequest(Part, frozen=True):
    """Which steps of which ranks a person wants to have profiled."""

    ranks: Annotated[str, msgspec.Meta(max_length=1024)] = "all"
    """A rank filter: `all`, or `0,4-7`."""
    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROFILE_STEPS)] = 3
    memory: bool = False
    """Whether the allocations of each operation are recorded."""
    stacks: bool = False
    """Whether the place in the code that called each operation is recorded."""
    shapes: bool = False
    """Whether the shapes of the inputs of each operation are recorded."""
    run: str | None = None
    """Id or name; None: the newest."""

    @classmethod
    def of(cls, values: Mapping[str, object]) -> ProfileRequest:
        """Return the request that has these fields. Raises ValueError, which says what is wrong with them."""
        try:
            return msgspec.convert([*msgspec.structs.astuple(cls(**values))], ready(cls), strict=False)  # type: ignore[arg-type]
        except (msgspec.ValidationError, TypeError) as error:
            raise ValueError(f"{error} (a profile has {', '.join(cls.__struct_fields__)})") from None

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> ProfileRequest:
        """Return what a person asks for, as `of`. Raises ValueError also for ranks that cannot be read."""
        rank_filter(values["ranks"])
        steps = values.get("steps", 1)
        if isinstance(steps, int) and not 1 <= steps <= MAX_PROFILE_STEPS:
            raise ValueError(f"steps={steps} must be an integer from 1 to {MAX_PROFILE_STEPS}")
        return cls.of(values)


class MeasureRequest(Part, frozen=True):
    """A profile, or the time of layers, that a person asks for: in a rank, or over the relay's socket."""

    id: Name
    """It will be in the manifest of a profile."""
    profile: ProfileRequest | None = None
    layers: LayersRequest | None = None


class ProfileCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the command `profile`, see `wire.Command`."""

    id: Name
    """Id of the profile."""
    number: Count
    """Grows where it is begun anew, since a rank was past its first step already."""
    run: str | None = None
    ranks: str = "all"
    """A rank filter: those of the run that are meant."""
    first_step: Count
    steps: Count
    limit_s: float
    """Time to wait for the steps, in s."""
    record_s: float = 60.0
    """
    Longest time that the steps may take, in s. What is recorded takes memory: an evaluation among them would
    take gigabytes.
    """
    memory: int = 0
    stacks: int = 0
    shapes: int = 0
    """0 or 1, as torch has them."""
    serve_s: float = 60.0
    """Longest time that a rank without steps, to which others give work, records, in s. It begins at once."""
    over: int = 0
    """1 when the others have recorded their steps; ranks without steps then end."""


class Capture(Part, frozen=True):
    """How far this rank is with the profile that it was asked for; in every batch while there is one."""

    id: Name
    number: Count
    """Number of the command that the rank follows. A profile may be begun again, see `wire.Command`."""
    state: CaptureState
    reason: str = ""
    total_bytes: Count | None = None
    """Size of the trace once it is written, in bytes."""
    steps: Annotated[list[tuple[Int64, Int64, Int64, Int64 | None]], FEW] = []
    """For each recorded step: number, begin, end, end of its row, see `store.profiles.ProfileStep`."""
    start_ns: Count | None = None
    stop_ns: Count | None = None
    export_ns: Count | None = None
    """What it has cost, see `store.profiles.RankProfile`."""
    serves: bool = False
    """It has no steps of its own; `steps` then has one, 0, for all the time that was recorded."""
    folder: str = ""
    """Where its trace is as a file on this host, see `wire.bulk`: an absolute path."""
