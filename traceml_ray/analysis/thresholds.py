"""Every threshold of the verdict, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from traceml_ray.analysis.labels import LABELS, Label, Pattern


@dataclass(frozen=True)
class Bounds:
    """In the type of a setting: the smallest and the largest value that it may have."""

    low: float
    high: float


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """
    Limits of the verdict rules. Shares are fractions of the mean step. Where its type says nothing else, a
    number of steps is from 1, and a share from 0 to 1.
    """

    window_steps: Annotated[int, Bounds(2, 10_000)] = 50
    """Steps in a full window."""
    stride_steps: int = 10
    """Steps by which one window begins after the other."""
    first_window_steps: Annotated[int, Bounds(2, 10_000)] = 20
    """Number of steps from which on a first, shorter window is judged."""
    warmup_steps: Annotated[int, Bounds(0, 1_000_000)] = 10
    """Steps at the start of a run that no verdict uses (row 0 never counts)."""
    coverage_limited: float = 0.95
    """Share of reporting ranks below which the verdict is `telemetry_limited`."""
    report_timeout_s: Annotated[float, Bounds(0.1, 3600)] = 5.0
    """Time after which a rank that has not reported counts as missing, in s."""
    hang_timeout_s: Annotated[float, Bounds(0.1, 86_400)] = 20.0
    """
    Time without a row from any rank after which the job may hang, in s; `hang_steps` must have
    passed, too.
    """
    hang_steps: Annotated[float, Bounds(1, 1_000_000)] = 10.0
    """Number of median steps without a row after which the job hangs, if a rank waits for others."""
    min_step_ns: int = 1_000_000
    """Shortest mean step that is judged, in ns."""
    max_step_ns: int = 86_400_000_000_000
    """Longest step that is believed, in ns."""
    aligned_limited: float = 0.5
    """Share of steps common to all live ranks below which the verdict is `telemetry_limited`."""
    unsynced_spread: float = 0.05
    """Difference of the ranks' window totals, as a share, from which on they do not wait for each other."""
    min_excess: float = 0.05
    """Smallest persistent excess p that is a finding."""
    replay_error: float = 0.15
    """Share of the elapsed time that a replay may miss; beyond, ranks do not wait as assumed."""
    second_stage: float = 0.67
    """A second stage of the same rank with p above this share of the best makes the finding `ambiguous`."""
    min_gain: float = 0.33
    """Share of the best p that a gain must reach; below it, fixing the cause alone saves little."""
    same_cause: float = 0.5
    """Ranks with p above this share of the best are named together."""
    span_share: float = 0.6
    """Share of a rank's excess in its stage from which on a single span explains it."""
    span_often: float = 0.5
    """Share of the steps that a span must occur in to explain a lasting excess."""
    suspect_excess: float = 0.01
    """Smallest excess listed as a suspect."""
    high_excess: float = 0.10
    """Excess from which on confidence may be high."""
    high_late_share: float = 0.80
    """Share of steps in which the named rank is late, from which on confidence may be high."""
    transient_excess: float = 0.10
    """Smallest share of exposed time of a rank that is late now and then."""
    transient_share: float = 0.80
    """Share of all such exposed time that this rank must have."""
    rotating_excess: float = 0.20
    """Smallest share of exposed time for ranks that are late in turn."""
    min_imbalance: float = 0.10
    """Share of the time that unequal work must cost to be a finding."""
    baseline_windows: Annotated[int, Bounds(2, 1000)] = 5
    """Number of healthy windows that the run's own baseline is learned from."""
    baseline_after_steps: Annotated[int, Bounds(0, 1_000_000)] = 50
    """Number of steps after the warm-up that the baseline is not learned from."""
    min_drift: float = 0.03
    """Smallest drift from the baseline that is `group_wide`."""
    drift_mads: Annotated[float, Bounds(0, 100)] = 3.0
    """Number of MADs of the baseline's windows that a drift must exceed."""
    drift_errors: Annotated[float, Bounds(0, 100)] = 5.0
    """Number of standard errors of the mean over single steps that a drift must exceed."""
    stage_carries: float = 0.5
    """
    Share of a drift of the step that one stage must have to carry it. The rest of the step must not be slower
    by more than that share of its slow-down.
    """
    keep_group: float = 0.67
    """A named group of ranks keeps the name while it costs this share of what the costliest group does."""
    chronic_share: float = 0.5
    """Share of the last windows with the same verdict from which on it is called chronic."""
    chronic_windows: int = 10
    """Number of last windows that `chronic_share` is counted over."""
    hold_s: Annotated[float, Bounds(0, 3600)] = 2.0
    """Time that a finding must last before it is named, in s."""
    hold_steps: Annotated[int, Bounds(0, 1_000_000)] = 10
    """Number of steps that a finding must last before it is named."""
    hold_cost_s: Annotated[float, Bounds(0, 3600)] = 0.3
    """
    Time that the job must have waited for a finding before it is named, in s. The name is taken back when the
    finding is gone for as long.
    """
    hold_group_s: Annotated[float, Bounds(0, 3600)] = 30.0
    """As `hold_s`, for `group_wide`, in s. It names no rank, and other work may use a machine for a while."""
    hold_share: Annotated[float, Bounds(0.01, 1)] = 0.67
    """Share of the windows since a finding began that must show it."""
    usual_windows: int = 200
    """Number of windows without a named rank that show the usual excess; a finding is compared with them."""
    usual_least: int = 20
    """Number of such windows from which on the usual excess is known."""
    usual_quantile: float = 0.9
    """Quantile of the excess in these windows that a finding must exceed."""
    run_steps: int = 2000
    """Number of steps that a whole-run verdict samples, evenly spread over the run."""
    run_rows: int = 1_000_000
    """Number of rows (steps × ranks) that a whole-run verdict samples: with many ranks, fewer steps."""

    def least(self, pattern: Pattern) -> float:
        """Return the smallest excess that is a finding of this pattern."""
        if pattern == "lasting":
            return self.min_excess
        return self.transient_excess if pattern == "transient" else self.min_imbalance

    def hold_of(self, label: Label) -> float:
        """Return the time that a finding with this label must last, in s."""
        return self.hold_group_s if LABELS[label].names == "all" else self.hold_s

    def lasted(self, label: Label, ns: float, steps: int) -> bool:
        """Whether `ns`, which had `steps` steps, is as long as a finding with `label` must last."""
        return ns >= self.hold_of(label) * 1e9 and steps >= self.hold_steps


class ProfileLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for naming an operation that a rank spends more time in. They cannot be set."""

    named_share: float = 0.15
    """Share of the rank's whole additional time that the operation must have."""
    least_share: float = 0.01
    """Share of the step that the operation's additional time must reach."""
    most_named: int = 3
    same_calls: float = 0.05
    """Difference in calls per step below which the number of calls counts as equal."""


class HostLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for hosts of rows on a device clock. They cannot be set. Shares are 0..1."""

    late: float = 0.25
    """
    Share of the rows in which a device has caught up with its host, from which on it waits for
    the host.
    """
    share: float = 0.5
    """
    Share of the rows in which the host is late, or of an excess that the host causes, from which on the host
    is the cause.
    """
    waited: float = 0.01
    """Share of the time that a device must wait for its host for it to count."""
    suspect: float = 0.025
    """Smallest excess of a device for which it is examined whether the device follows its host."""
    sure_rows: int = 20
    """Number of rows that show whether hosts wait for their devices in a stage."""
    sure_ranks: float = 0.5
    """Share of the ranks that must have `sure_rows` such rows."""
    held: float = 0.5
    """
    A stage holds hosts up if their steps minus their devices' vary by less than this share of the hosts' own
    times.
    """
    wanders: float = 3.0
    """
    Number of standard deviations over blocks of steps that an excess must exceed where a device may wait for
    its host.
    """
    compared: int = 16
    compared_rows: int = 100
    """Number of ranks, and of the newest rows, that suffice to see who waits."""


HOSTS = HostLimits()


class MachineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """
    Limits from which on a quantity of a node is an anomaly. They cannot be set.

    Pairs are (level, how much above what is usual). Shares are 0..1, rates are in bytes per second or cores.
    """

    samples: int = 8
    """Number of samples below which there is no evidence."""
    often: float = 0.7
    """Share of the samples that must be anomalous."""
    usual_quantile: float = 0.95
    """Quantile of the samples they are compared with that anomalous samples must exceed."""
    processes: int = 2
    """Number of samples of a device's processes from which on a foreign process counts."""
    live_s: float = 60.0
    """
    Length of the period that evidence is from, in s: up to now for the live verdict, up to the death for a
    death.
    """
    lead_s: float = 30.0
    """
    Time before that period from which samples of peers are used as well, so that there are
    enough, in s.
    """
    before_s: float = 300.0
    """Time before that period from which the node's own samples are used if there are no peers, in s."""
    mem_used: float = 0.95
    """Used share of a node's memory that is an anomaly whatever is usual."""
    swap_in_bps: tuple[float, float] = (1 << 20, 1 << 20)
    """Memory read back from swap."""
    psi_memory: tuple[float, float] = (0.10, 0.10)
    """Share of time in which processes wait for memory (PSI)."""
    cpu_throttled: tuple[float, float] = (0.05, 0.05)
    """Share of time in which a quota holds back the CPUs."""
    cpu_pct: tuple[float, float] = (90.0, 20.0)
    """CPU utilisation, in percent."""
    psi_cpu: tuple[float, float] = (0.30, 0.20)
    """Share of time in which processes wait for a CPU (PSI)."""
    load: tuple[float, float] = (1.5, 0.5)
    """Load per core."""
    psi_io: tuple[float, float] = (0.20, 0.15)
    """Share of time in which processes wait for I/O (PSI)."""
    bps: tuple[float, float] = (50e6, 50e6)
    """Rate of disk or network; it must also be `bps_times` the usual rate."""
    bps_times: float = 3.0
    """Multiple of the usual rate of disk or network."""
    power_cap: float = 0.5
    """Share of samples in which a device is held back by its power limit, above the usual share."""
    power: tuple[float, float] = (0.97, 0.08)
    """Power as a share of the device's limit."""
    clock_lack: tuple[float, float] = (0.10, 0.08)
    """How far the SM clock is below its maximum, as a share of the maximum."""


MACHINE = MachineLimits()


class CompareLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for differences between two sessions. They cannot be set. Shares are 0..1."""

    steps: int = 30
    """Number of steps beyond the warm-up below which sessions are not compared."""
    columns: int = 4096
    """Number of values that are resampled: single steps or, in a longer run, means of several steps."""
    replicates: int = 1000
    """Number of replicates of the bootstrap."""
    confidence: float = 0.95
    """Confidence level of the intervals."""
    least: float = 0.05
    """
    Smallest difference of times, as a share of the step of the first session, that counts. Runs of the same
    script differ by some per cent however quiet a machine is.
    """
    least_skew: float = 5.0
    """Smallest difference of the skew between ranks that counts, in percentage points."""
    least_memory: float = 0.05
    """Smallest difference of memory that counts, as a share of what the first session had."""
    carries: float = 0.5
    """Share of a step's slow-down from which on waiting for the exchange carries it."""
    moved: float = 0.5
    """Share of the largest change of any rank from which on another rank has moved, too."""
    samples: int = 20
    """Number of memory samples below which memory is not compared."""


COMPARE = CompareLimits()


class ShardLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits from which on a model is called unevenly divided. They cannot be set."""

    imbalance: float = 1.1
    """Ratio of the largest shard to the median rank's, or of that to the smallest."""


SHARDS = ShardLimits()


class LayerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """
    Limits from which on a layer takes longer on a rank than on others. They cannot be set.
    Shares are 0..1.
    """

    steps: int = 5
    """Number of measured steps below which a rank is not compared."""
    least_ms: float = 0.3
    """Smallest excess, in ms."""
    of_layer: float = 0.15
    """Smallest excess as a share of the layer's time on other ranks."""
    of_model: float = 0.01
    """Smallest excess as a share of the time of all layers."""
    errors: float = 4.0
    """Smallest excess in standard errors; the spread of the peers counts as one."""
    slower: float = 1.15
    """Multiple of the others' time from which on, in all layers, a rank is slower as a whole."""
