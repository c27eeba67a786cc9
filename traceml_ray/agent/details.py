"""Named parts inside the stages (optimizer, checkpoint, a user's own): sums, never columns."""

from __future__ import annotations

from traceml_ray.wire import Detail

MAX_NAMES = 256


class Details:
    """
    Sums per (name, stage), written by the training thread and collected by the agent.

    `collect` hands out what was swapped away one call earlier, so that an update which the
    training thread was in the middle of is never lost, and no lock is needed.
    """

    def __init__(self) -> None:
        self._now: dict[tuple[str, int], list[int]] = {}
        self._before: dict[tuple[str, int], list[int]] = {}
        self.refused = 0

    def add(self, name: str, stage: int, step: int, ns: int) -> None:
        """Add one stretch of `ns` nanoseconds that began in `stage` of `step`."""
        sums = self._now
        entry = sums.get((name, stage))
        if entry is None:
            if len(sums) >= MAX_NAMES:
                self.refused += 1
                return
            sums[name, stage] = [1, ns, ns, step, step]
            return
        entry[0] += 1
        entry[1] += ns
        entry[2] = max(entry[2], ns)
        entry[4] = step

    def collect(self) -> list[Detail]:
        """Return the sums of the tick before this one."""
        done, self._before, self._now = self._before, self._now, {}
        return [Detail(name[:64], stage, *entry) for (name, stage), entry in done.items()]
