"""What a rule found, before it is put into numbers and words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from traceml_ray.analysis.window import Bool

if TYPE_CHECKING:
    from traceml_ray.analysis.drift import Drift


@dataclass(frozen=True)
class Cause:
    """A stage and the ranks (places in the window, not rank numbers) that are late out of it."""

    stage: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """
    The rule that applied: a label, and either a `reason` to abstain or the `causes`, best first.

    `excess` is the excess of the worst rank of the first cause, as a share of the mean step. `transient`
    says that it was found by the transient rule, `rotating` that no single rank is meant, `new` that the
    newest steps alone show it. `drift` is all that `group_wide` has.
    """

    label: str
    reason: str = ""
    causes: tuple[Cause, ...] = ()
    excess: float | None = None
    transient: bool = False
    rotating: bool = False
    new: bool = False
    drift: Drift | None = None


@dataclass(frozen=True)
class Timing:
    """
    When the first cause is late.

    `late` (K,) per step of the window; `began` is the place in it at which it began, `None` when
    that lies before the window; `goes_on` that it has not stopped since.
    """

    late: Bool
    began: int | None
    goes_on: bool

    @property
    def since(self) -> Bool:
        """The steps from the beginning on."""
        return self.late[self.began or 0 :]
