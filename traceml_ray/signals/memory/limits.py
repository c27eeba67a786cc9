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
    """Number of robust standard deviations of the noise that any change must exceed."""
    cluster_s: float = 300.0
    """Time within which ranks that begin to grow are one incident, in s."""
    apart_s: float = 60.0
    """Time that a rank must be flat before further growth is a second incident, in s."""

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
    """Growth that a random walk would not show, in standard deviations of the walk."""
    over_walk_short: float = 5.0
    """Growth from which on a warning is given with fewer than `short_samples` samples, in the same unit."""
    over_walk_sure: float = 6.0
    """Growth from which on it is an event at once, in the same unit."""
    walk_blocks: tuple[int, int] = (8, 12)
    """Largest numbers of blocks whose increments the random walk is estimated from."""
    walk_least: int = 5
    """Least number of these blocks."""
    newest: tuple[int, int] = (24, 64)
    """Numbers of newest samples that are also tried alone, for growth that began late in a run."""
    beyond: float = 0.7
    """Share of these newest samples that must be above everything before them."""
    trend_points: int = 128
    """Largest number of blocks of samples that a slope is estimated from."""
    least_share: float = 0.4
    """Share of the variance that a ramp with the level before it must explain."""
    still_grows: float = 0.3
    """Share of the whole slope that the last third must have: growth that has ended is no creep."""
    forecast_growth_bytes: int = 16 * MIB
    """Smallest growth that is reported if memory runs out within `forecast_s`, in bytes."""
    forecast_s: float = 86_400.0
    """Time until memory runs out below which smaller growth is reported, in s."""
    critical_s: float = 3_600.0
    """Time until memory runs out below which growth is critical, in s."""
    trusted_s: float = 60.0
    """Time that memory must have grown for a forecast to be trusted, in s."""
    trusted_share: float = 0.1
    """Share of the remaining time that memory may have grown instead for a forecast to be trusted."""

    host_share: float = 0.25
    """A rank that grows by less than this share of the steepest of its host is judged by its own forecast."""
    ended_s: float = 30.0
    """Time without samples after which a process has ended, in s; or `step_samples` of its own intervals."""

    held: float = 0.2
    """Live, growth is an event once it has been found for this share of the time that it has lasted."""

    alike: float = 0.5
    """Ranks that all creep, none slower than this share of the median, creep alike: that is less severe."""

    step_samples: int = 5
    """Number of samples on both sides that a step is measured from, and that it must be held for."""
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
    """Share of ranks with more memory than the others from which on they do different work."""

    settled_s: float = 30.0
    """
    Time that a rank must have held its level before it grew, for warm-up to be over if no steps are known, in
    s.
    """
    near_growth: float = 0.5
    """Share of the first rank's growth from which on growth that does not count is close to it."""
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
    """Share of the time beyond which marks of collectives coincide with everything by chance."""
    marked_changes: float = 0.5
    """Least share of the changes that marks must coincide with."""
    drift_groups: int = 3
    """Number of new process groups during a drift from which on the drift coincides with them."""


MEMORY = MemoryLimits()
SYNCHRONY = {"low": 0.75, "medium": 0.5, "high": 0.3}
"""Share of the other ranks that must see the same at the same time, by sensitivity."""
SHOWN = {"low": 1, "medium": 3, "high": 3}
"""Number of classes of attribution that are shown, the surest first, by sensitivity."""
