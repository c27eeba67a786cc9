"""Every threshold of the memory analysis, in one place."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryLimits:
    """Numbers the memory rules use; shares are 0..1."""

    min_growth_bytes: int = 64 * MIB
    """Smallest change that is worth a word,"""
    growth_of_peak: float = 0.10
    """and smallest growth of a rank that can be a first cause, as a share of its highest value."""
    noise: float = 6.0
    """Any change must also be so many robust standard deviations of the noise."""
    cluster_s: float = 300.0
    """Ranks that begin to grow within so long of each other are one incident."""
    apart_s: float = 60.0
    """A rank that was flat for so long before it grows again has two incidents."""

    creep_samples: int = 6
    """Fewest samples after warm-up for a creep,"""
    creep_steps: int = 10
    """and fewest steps, where steps are known,"""
    drift_samples: int = 30
    """and for a drift of the hidden gap."""
    r2: float = 0.6
    """Share of the variance that the ramp must explain,"""
    r2_short: float = 0.9
    """with fewer than `drift_samples`,"""
    r2_shortest: float = 0.97
    """and with fewer than `short_samples`."""
    short_samples: int = 12
    over_walk: float = 3.5
    """Growth that a random walk would not show, of so many standard deviations,"""
    over_walk_short: float = 5.0
    """So many are enough for a warning with fewer than `short_samples`."""
    over_walk_sure: float = 6.0
    """With so many, growth is an event at once."""
    walk_blocks: tuple[int, int] = (8, 12)
    """by the increments of so many blocks at most,"""
    walk_least: int = 5
    """and at least."""
    newest: tuple[int, int] = (24, 64)
    """So many of the newest samples are tried by themselves: growth that has begun late in a run,"""
    beyond: float = 0.7
    """of which this share has to be beyond all that was used before."""
    trend_points: int = 128
    """Blocks of samples that a slope is estimated from, at most."""
    least_share: float = 0.4
    """A ramp, with the level before it, must explain this share of the variance."""
    still_grows: float = 0.3
    """The slope of the last third must be this share of the whole's: growth that has ended is no creep."""
    forecast_growth_bytes: int = 16 * MIB
    """Less growth is named from here on, where memory runs out within"""
    forecast_s: float = 86_400.0
    """so long."""
    critical_s: float = 3_600.0
    """Memory that runs out within so long is critical,"""
    trusted_s: float = 60.0
    """where it has grown for so long,"""
    trusted_share: float = 0.1
    """or for this share of the time that is left."""

    host_share: float = 0.25
    """A rank that grows by less than this share of the steepest of its host is judged by its own forecast."""
    ended_s: float = 30.0
    """A process without samples for so long has ended, or for `step_samples` of its own intervals."""

    held: float = 0.2
    """Live, growth is an event once it has been found for this share of the time that it has lasted."""

    alike: float = 0.5
    """Ranks that all creep, none slower than this share of the median, creep alike: that is less severe."""

    step_samples: int = 5
    """Samples on both sides that a step is measured from, and for which it must be held."""
    step_kept: float = 0.5
    """Share of a step that must be kept to the end: else it is a spike."""
    max_steps: int = 8
    """Steps of a rank that are told apart."""
    spike_samples: int = 30
    """Fewest samples after warm-up for a spike,"""
    marked_spike_samples: int = 6
    """and for one of the hidden gap that stands with a collective."""
    step_of_total: float = 0.02
    """A step of a smaller share of the device's memory is no warning."""

    fragmentation: tuple[float, float] = (0.3, 0.5)
    """Inactive split blocks over reserved memory: a warning, critical,"""
    fragmentation_bytes: int = 256 * MIB
    """and from so many bytes on."""
    near_limit: tuple[float, float] = (0.75, 0.90)
    """Used over total memory: a warning, critical."""
    imbalance: float = 0.10
    """A rank's peak over the median of its peers by this share,"""
    imbalance_bytes: int = 256 * MIB
    """and by so many bytes."""
    imbalance_peers: int = 2
    """Fewest peers to compare with."""
    imbalance_ranks: float = 0.25
    """Where a larger share of the ranks has more than the others, they do different work."""

    settled_s: float = 30.0
    """Where no steps are known: warm-up was over when a rank had its level for so long before it grew."""
    near_growth: float = 0.5
    """A rank whose growth does not count, and is this share of the first one's, is not far from it."""
    near_ranks: float = 0.5
    """Where so large a share of the other ranks did, they grew together."""
    high_lead: float = 3.0
    """Confidence in a first cause is high from a lead of so many error bounds on,"""
    high_coverage: float = 0.9
    """where so large a share of the ranks was observed; with less than"""
    low_coverage: float = 0.5
    """this, it is low."""
    low_lead: float = 1.5
    """So is it with a shorter lead."""
    marked_share: float = 0.34
    """Marks of collectives that cover a larger share of the time stand with everything by chance,"""
    marked_changes: float = 0.5
    """and marks must stand with this share of the changes at least."""
    drift_groups: int = 3
    """New process groups during a drift from which on it stands with them."""


MEMORY = MemoryLimits()
SYNCHRONY = {"low": 0.75, "medium": 0.5, "high": 0.3}
"""Share of the other ranks that must see the same at the same time, by sensitivity."""
SHOWN = {"low": 1, "medium": 3, "high": 3}
"""How many of the classes of attribution are shown, the surest first, by sensitivity."""
