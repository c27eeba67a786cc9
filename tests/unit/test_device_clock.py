"""What an abstention on CUDA ranks advises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sessions import LIMITS, Clock, Rank, Relay, aggregation, ask, written_summary

from traceml_ray.stages import FLAG_EXCLUDED, FLAG_INSEPARABLE
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire.messages import DEVICE_CLOCK

OFF = "not read in steps as short as 5 ms: TRACEML_DEVICE_CLOCK=1 turns it on"


@pytest.mark.parametrize(
    ("why", "strategy", "flags", "advice"),
    [
        (OFF, "ddp", FLAG_INSEPARABLE, "Set TRACEML_DEVICE_CLOCK=1"),
        ("turned off by TRACEML_DEVICE_CLOCK=0", "fsdp2", FLAG_INSEPARABLE, "Set TRACEML_DEVICE_CLOCK=1"),
        (
            "off since step 7: CUDA error 719",
            "ddp",
            FLAG_INSEPARABLE,
            "The device's clock is not read: off since",
        ),
        (OFF, "ddp+tp", FLAG_INSEPARABLE, ""),
        ("", "ddp", FLAG_INSEPARABLE, ""),
        (OFF, "ddp", 0, ""),
        ("off since step 7: CUDA error 719", "ddp", 0, ""),
    ],
)
def test_abstention_on_cuda_says_how_to_have_its_ranks_judged(
    tmp_path: Path, why: str, strategy: str, flags: int, advice: str
) -> None:
    clock, relay = Clock(), Relay()
    core = aggregation(tmp_path / "s", clock)
    ranks = [Rank(0), Rank(1)]
    more = {"strategy": strategy, "missing": {DEVICE_CLOCK: why} if why else {}}
    for second in range(20):
        clock.tick()
        marks = np.full(10, flags, np.uint8)
        marks[0] |= FLAG_EXCLUDED * (second == 0)
        core.ingest(relay.message(*(rank.batch(10, flags=marks.tobytes(), **more) for rank in ranks)))
        assert core.commit()
        core.judge()
    live = ask(core, "verdict")
    with SessionFile(tmp_path / "s" / "session.sqlite") as file:
        summary = written_summary(file, LIMITS)
    core.close()
    for verdict in (live, summary["verdict"], summary["verdicts"][-1]):
        assert verdict["label"] == ("accounting_only" if flags else "healthy")
        assert verdict["next"].startswith(advice)
        closed = (
            "rank 0's device clock closed at step 7, those of 1 other rank then or later: CUDA error 719."
        )
        assert verdict["note"].startswith(closed) == ("719" in why)
        assert bool(advice) == ("DEVICE_CLOCK" in verdict["next"] or "device's clock" in verdict["next"])
