"""Every threshold of the verdict, in one place."""

from __future__ import annotations

import msgspec

from traceml_ray.analysis.labels import LABELS, Label, Pattern


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers the verdict rules use; shares are fractions of the mean step."""

    window_steps: int = 50
    """Steps in a full window."""
    stride_steps: int = 10
    first_window_steps: int = 20
    """A first, shorter window is judged from here on."""
    warmup_steps: int = 10
    """Steps at the start of a run that no verdict uses (row 0 never counts)."""
    coverage_limited: float = 0.95
    """Below this share of reporting ranks: `telemetry_limited`."""
    report_timeout_s: float = 5.0
    """A rank that has not reported for so long is missing."""
    hang_timeout_s: float = 20.0
    """The job hangs when no rank has sent a row for so long and"""
    hang_steps: float = 10.0
    """for so many median steps, while a rank waits for others."""
    min_step_ns: int = 1_000_000
    max_step_ns: int = 86_400_000_000_000
    aligned_limited: float = 0.5
    """Below this share of steps that all live ranks have in common: `telemetry_limited`."""
    unsynced_spread: float = 0.05
    """Window totals that differ by more between ranks: they do not wait for each other."""
    min_excess: float = 0.05
    """Smallest persistent excess p that is considered."""
    replay_error: float = 0.15
    second_stage: float = 0.67
    """A second stage of the same rank with p above this share of the best: `ambiguous`."""
    min_gain: float = 0.33
    """Gain below this share of the best p: fixing it alone saves little."""
    same_cause: float = 0.5
    """Ranks with p above this share of the best are named together."""
    span_share: float = 0.6
    """Share of a rank's excess in its stage from which one span explains it,"""
    span_often: float = 0.5
    """and the share of the steps that it is in, where the excess is a lasting one."""
    suspect_excess: float = 0.01
    """Smallest excess listed as a suspect."""
    high_excess: float = 0.10
    """Excess from which confidence may be high."""
    high_late_share: float = 0.80
    """Share of steps in which the named rank is late from which confidence may be high."""
    transient_excess: float = 0.10
    transient_share: float = 0.80
    rotating_excess: float = 0.20
    min_imbalance: float = 0.10
    """Share of the time that unequal work of the ranks costs from which on it is a finding."""
    baseline_windows: int = 5
    """Healthy windows that the run's own baseline is learned from."""
    baseline_after_steps: int = 50
    """Steps after warm-up that it is not learned from."""
    min_drift: float = 0.03
    """Smallest drift from the baseline that is called `group_wide`."""
    drift_mads: float = 3.0
    """It must also be above so many MADs of the baseline's windows,"""
    drift_errors: float = 5.0
    """and above so many standard errors of the mean over single steps."""
    stage_carries: float = 0.5
    """
    Share of what a step has become longer by from which one stage carries it; the rest of the step must not
    be slower by more than that share of its slow-down.
    """
    keep_group: float = 0.67
    """A group of ranks that has the name keeps it while it costs this share of what the costliest does."""
    chronic_share: float = 0.5
    """Share of the last windows with the same verdict from which it is called chronic."""
    chronic_windows: int = 10
    """How many of the last windows that is counted over."""
    hold_s: float = 2.0
    """A finding is named once it has lasted for so long,"""
    hold_steps: int = 10
    """and for so many steps,"""
    hold_cost_s: float = 0.3
    """and has made the job wait for so long in all. The name is taken back when it is gone for as long."""
    hold_group_s: float = 30.0
    """As `hold_s`, for `group_wide`: it names no rank, and other work may use a machine for a while."""
    hold_share: float = 0.67
    """Share of the windows since it began that must show it."""
    usual_windows: int = 200
    """Its excess is compared with the last so many windows in which no rank was named,"""
    usual_least: int = 20
    """where there are so many of them,"""
    usual_quantile: float = 0.9
    """by this quantile."""
    run_steps: int = 2000
    """Steps that a whole-run verdict samples, evenly spread over the run."""
    run_rows: int = 1_000_000
    """Rows (steps × ranks) that a whole-run verdict samples: fewer steps where there are many ranks."""

    def least(self, pattern: Pattern) -> float:
        """Return the smallest excess of that pattern that is a finding."""
        if pattern == "lasting":
            return self.min_excess
        return self.transient_excess if pattern == "transient" else self.min_imbalance

    def hold_of(self, label: Label) -> float:
        """Return how long a finding of that label has to last, s."""
        return self.hold_group_s if LABELS[label].names == "all" else self.hold_s

    def lasted(self, label: Label, ns: float, steps: int) -> bool:
        """Whether `ns`, in which there were so many steps, is as long as `label` has to last."""
        return ns >= self.hold_of(label) * 1e9 and steps >= self.hold_steps


class ProfileLimits(msgspec.Struct, frozen=True, kw_only=True):
    """From where on an operation is named as what a rank spends more time in; these cannot be set."""

    named_share: float = 0.15
    """Share of all that the rank spends more, in whatever operations,"""
    least_share: float = 0.01
    """and of the step."""
    most_named: int = 3
    same_calls: float = 0.05
    """Calls a step that differ by less are as many."""


class HostLimits(msgspec.Struct, frozen=True, kw_only=True):
    """From where on hosts count, where rows are of a device's clock; these cannot be set. Shares are 0..1."""

    late: float = 0.25
    """Share of the rows in which a device has caught up with its host from which it waits for it."""
    own: float = 0.5
    """
    Share of the rows in which its host is late, or of an excess that is its host's, that makes it the host's.
    """
    waited: float = 0.01
    """Share of the time from which it counts that a device waits for its host."""
    suspect: float = 0.025
    """Smallest excess of a device that it is looked at whether it follows its host."""
    sure_rows: int = 20
    """So many rows show whether hosts wait for their devices in a stage,"""
    sure_ranks: float = 0.5
    """on this share of the ranks."""
    held: float = 0.5
    """
    A stage holds hosts up when their steps, less their devices', vary by less than this share of their own
    times.
    """
    wanders: float = 3.0
    """
    Where a device may wait for its host, its excess must be above so many standard deviations of what it is
    in blocks of steps.
    """
    compared: int = 16
    compared_rows: int = 100
    """So many ranks, and rows, the newest, are enough to see that."""


HOSTS = HostLimits()


class MachineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """
    From where on a quantity of a node is an anomaly; these cannot be set. Pairs are (level, how much above
    what is usual).

    Shares are 0..1, rates bytes or cores.
    """

    samples: int = 8
    """Fewer samples are no evidence."""
    often: float = 0.7
    """Share of the samples that must be anomalous,"""
    usual_quantile: float = 0.95
    """and above this quantile of the samples they are compared with."""
    processes: int = 2
    """Samples of the processes of a device from which on a foreign one counts."""
    live_s: float = 60.0
    """Evidence of the live verdict is of the last so many seconds; of a death, of those before it."""
    lead_s: float = 30.0
    """Samples of peers are taken from so many seconds earlier, so that there are enough;"""
    before_s: float = 300.0
    """where there are no peers, those of the node itself from so many seconds before."""
    mem_used: float = 0.95
    """Of a node's memory; an anomaly whatever is usual."""
    swap_in_bps: tuple[float, float] = (1 << 20, 1 << 20)
    psi_memory: tuple[float, float] = (0.10, 0.10)
    cpu_throttled: tuple[float, float] = (0.05, 0.05)
    cpu_pct: tuple[float, float] = (90.0, 20.0)
    psi_cpu: tuple[float, float] = (0.30, 0.20)
    load: tuple[float, float] = (1.5, 0.5)
    """Per core."""
    psi_io: tuple[float, float] = (0.20, 0.15)
    bps: tuple[float, float] = (50e6, 50e6)
    """Of disk or network; it must also be"""
    bps_times: float = 3.0
    """so many times what is usual."""
    power_cap: float = 0.5
    """Share of samples in which a device is held back by its power limit, above what is usual."""
    power: tuple[float, float] = (0.97, 0.08)
    """Of the device's limit."""
    clock_lack: tuple[float, float] = (0.10, 0.08)
    """Of the highest SM clock, by how much the clock is below it."""


MACHINE = MachineLimits()


class CompareLimits(msgspec.Struct, frozen=True, kw_only=True):
    """From where on two sessions differ; these cannot be set. Shares are 0..1."""

    steps: int = 30
    """Fewer steps beyond the warm-up are not compared."""
    columns: int = 4096
    """Steps that are resampled one by one; of a longer run, means of some steps each."""
    replicates: int = 1000
    """Of the bootstrap."""
    confidence: float = 0.95
    """Of an interval."""
    least: float = 0.05
    """
    Smallest difference of times, as a share of the step of the first session, that is called one: runs of the
    same script differ by some per cent however quiet a machine is.
    """
    least_skew: float = 5.0
    """The same of the skew between ranks, percentage points;"""
    least_memory: float = 0.05
    """of memory, a share of what the first session had."""
    carries: float = 0.5
    """Share of what a step has become longer by from which waiting for the exchange carries it."""
    moved: float = 0.5
    """Share of the largest change of any rank from which a rank has moved, too."""
    samples: int = 20
    """Fewer samples of memory are not compared."""


COMPARE = CompareLimits()


class ShardLimits(msgspec.Struct, frozen=True, kw_only=True):
    """From where on a model is called unevenly divided; these cannot be set."""

    imbalance: float = 1.1
    """Largest shard ÷ that of the median rank, or that ÷ the smallest."""


SHARDS = ShardLimits()


class LayerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """From where on a layer takes longer on a rank than on others; these cannot be set. Shares are 0..1."""

    steps: int = 5
    """With fewer steps measured a rank is not compared."""
    least_ms: float = 0.3
    """An excess is at least so large,"""
    of_layer: float = 0.15
    """that share of what the layer takes elsewhere,"""
    of_model: float = 0.01
    """that of what all layers take,"""
    errors: float = 4.0
    """and so many standard errors, with how far the peers are apart counted as one."""
    slower: float = 1.15
    """A rank whose layers all take so many times as long is slower as a whole."""
