"""Every threshold of the memory analysis, in one place."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryLimits:
    """Limits of the memory rules. Shares are 0..1."""

    min_growth_bytes: int = 64 * MIB
    """Smallest change that is reported, in bytes."""
    growth_of_peak: float = 0.10
    """Smallest growth of a rank that can be a first cause, as a share of its highest value."""
    noise: float = 6.0
    """A change must exceed the noise by this many robust standard deviations."""
    cluster_s: float = 300.0
    """Ranks whose growth begins within this time belong to one incident, in s."""
    apart_s: float = 60.0
    """Time that a rank must be flat before further growth becomes a second incident, in s."""

    creep_samples: int = 6
    """Least number of samples after warm-up for a creep."""
    creep_steps: int = 10
    """Least number of steps for a creep, if steps are known."""
    drift_samples: int = 30
    """Least number of samples for a drift of the hidden gap."""
    r2: float = 0.6
    """Share of the variance that the ramp must explain."""
    r2_short: float = 0.9
    """Share of the variance that the ramp must explain with fewer than `drift_samples` samples."""
    r2_shortest: float = 0.97
    """Share of the variance that the ramp must explain with fewer than `short_samples` samples."""
    short_samples: int = 12
    over_walk: float = 3.5
    """Smallest growth that is significant, in standard deviations of a random walk."""
    over_walk_short: float = 5.0
    """Smallest growth for a warning with fewer than `short_samples` samples, in the same unit."""
    over_walk_sure: float = 6.0
    """Smallest growth that is an event immediately, in the same unit."""
    walk_blocks: tuple[int, int] = (8, 12)
    """Largest numbers of blocks. The random walk is estimated from the increments of these blocks."""
    walk_least: int = 5
    """Least number of these blocks."""
    newest: tuple[int, int] = (24, 64)
    """Numbers of newest samples that are also tested separately, to find growth that began late in a run."""
    beyond: float = 0.7
    """Share of these newest samples that must exceed everything before them."""
    trend_points: int = 128
    """Largest number of blocks of samples that a slope is estimated from."""
    least_share: float = 0.4
    """Share of the variance that a ramp, including the flat level before it, must explain."""
    still_grows: float = 0.3
    """Smallest slope of the last third, as a share of the whole slope. Growth that has ended is no creep."""
    forecast_growth_bytes: int = 16 * MIB
    """Smallest growth that is reported if memory is forecast to be full within `forecast_s`, in bytes."""
    forecast_s: float = 86_400.0
    """Forecast time until memory is full below which smaller growth is reported, in s."""
    critical_s: float = 3_600.0
    """Forecast time until memory is full below which growth is critical, in s."""
    trusted_s: float = 60.0
    """Duration of growth from which on a forecast is trusted, in s."""
    trusted_share: float = 0.1
    """
    Alternatively, duration of growth as a share of the remaining time from which on a forecast
    is trusted.
    """

    host_share: float = 0.25
    """A rank that grows by less than this share of the steepest of its host is judged by its own forecast."""
    ended_s: float = 30.0
    """A process without samples for this time has ended, in s; or for `step_samples` of its own intervals."""

    held: float = 0.2
    """In a live run growth is an event once it has been found for this share of its duration."""

    alike: float = 0.5
    """
    If all ranks creep, and none slower than this share of the median, they creep alike: that
    is less severe.
    """

    step_samples: int = 5
    """Number of samples on each side from which a step is measured, and for which it must be held."""
    step_kept: float = 0.5
    """Share of a step that must be kept to the end. Otherwise it is a spike."""
    max_steps: int = 8
    """Largest number of steps of a rank that are told apart."""
    spike_samples: int = 30
    """Least number of samples after warm-up for a spike."""
    marked_spike_samples: int = 6
    """
    Least number of samples after warm-up for a spike of the hidden gap that coincides with a
    collective.
    """
    step_of_total: float = 0.02
    """Smallest share of the device's memory for a step to be a warning."""

    fragmentation: tuple[float, float] = (0.3, 0.5)
    """Inactive split blocks over reserved memory, for a warning and for a critical finding."""
    fragmentation_bytes: int = 256 * MIB
    """Smallest size of inactive split blocks for a finding, in bytes."""
    near_limit: tuple[float, float] = (0.75, 0.90)
    """Used over total memory, for a warning and for a critical finding."""
    imbalance: float = 0.10
    """Smallest share by which a rank's peak must exceed the median of its peers."""
    imbalance_bytes: int = 256 * MIB
    """Smallest amount by which a rank's peak must exceed the median of its peers, in bytes."""
    imbalance_peers: int = 2
    """Least number of peers to compare with."""
    imbalance_ranks: float = 0.25
    """If more than this share of ranks uses more memory than the others, they do different work."""

    settled_s: float = 30.0
    """
    Time that a rank must have held its level before it grew, to know that warm-up is over if no steps are
    known, in s.
    """
    near_growth: float = 0.5
    """Growth below the threshold is close to the first rank's growth from this share of it on."""
    near_ranks: float = 0.5
    """Share of the other ranks that must be close for the ranks to have grown together."""
    high_lead: float = 3.0
    """Lead, in error bounds, from which on confidence in a first cause is high."""
    high_coverage: float = 0.9
    """Share of ranks that must be observed for high confidence in a first cause."""
    low_coverage: float = 0.5
    """Share of observed ranks below which confidence in a first cause is low."""
    low_lead: float = 1.5
    """Lead, in error bounds, below which confidence in a first cause is low."""
    marked_share: float = 0.34
    """
    If marks of collectives cover more than this share of the time, any coincidence with them
    may be chance.
    """
    marked_changes: float = 0.5
    """Smallest share of the changes that must coincide with marks."""
    drift_groups: int = 3
    """Number of new process groups during a drift from which on the drift is attributed to them."""


MEMORY = MemoryLimits()
SYNCHRONY = {"low": 0.75, "medium": 0.5, "high": 0.3}
"""Share of the other ranks that must change at the same time, by sensitivity."""
SHOWN = {"low": 1, "medium": 3, "high": 3}
"""Number of classes of attribution that are shown, the most certain first, by sensitivity."""
