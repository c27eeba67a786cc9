"""Set-up of every test: an environment without variables of ranks, sessions or clusters."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from snapshot import WRITE, Snapshot

# Modules and tests stay to the end, some millions of objects: no collection of garbage needs to look at them.
gc.disable()

# Each run judges a change by the same examples; `make fuzz` looks for others. None is judged by its time: a
# test that gets no core for half a minute is no slow one.
_FUZZ = os.environ.get("FUZZ_EXAMPLES")
_UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("shared-machine", derandomize=True, **_UNTIMED)
hypothesis.settings.register_profile("search", max_examples=int(_FUZZ or 1), **_UNTIMED)
hypothesis.settings.load_profile("search" if _FUZZ else "shared-machine")

os.environ["TZ"] = "UTC"  # whatever the user's timezone: texts write times in the timezone of their process
time.tzset()

# A shell ignores both signals in background processes, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

_ENDS_A_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FOREIGN = ("TRACEML_", "TORCHELASTIC_", "OMPI_", "SLURM_", "PMI_", "RAY_")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for name in [*os.environ]:
        if name != WRITE and (name.startswith(_FOREIGN) or name in _RANKS):
            monkeypatch.delenv(name)
    if "unit" not in request.path.parts:
        monkeypatch.setenv("TRACEML_NICE", "0")  # tests wait for it even on busy cores


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """Restore the handlers of signals that end a job: a launcher called by a test installs its own."""
    before = {number: signal.getsignal(number) for number in _ENDS_A_JOB}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Any]:
    """A played session (`played.Played`) of 8 ranks, whose rank 5 is late in `data` from step 100 on."""
    from played import Played

    session = Played(tmp_path / "demo")
    session.memory_s = 5
    for _ in range(30):
        session.play()
    yield session
    session.aggregator.close()


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Snapshot:
    return Snapshot(request.node.nodeid.removeprefix("tests/"))


# Tests that judge time, or start many processes at once, must run alone. If only some tests of a file do
# so, they are marked in the file.
_ALONE = {
    "chaos/test_chaos.py",
    "integration/test_membership.py",
    "integration/test_faults.py",
    "integration/test_span_verdict.py",
    "integration/test_sync_groups.py",
}


# A file that takes minutes would run on alone if it began last, so these files begin first.
_FIRST = (
    *("test_launch", "test_ray_train", "test_agent_process", "test_driver", "test_dashboard", "test_hangs"),
    *("test_profile_request", "test_command", "test_multihost", "test_attached", "test_bundles"),
    *("test_retention", "test_session_pages", "test_episodes", "test_query", "test_device_verdicts"),
)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    for item in items:
        where = item.path.relative_to(Path(__file__).parent)
        if {where.parts[0], str(where)} & _ALONE:
            item.add_marker("alone")
        alone = item.get_closest_marker("alone") is not None
        assert not alone or where.parts[0] in ("chaos", "integration"), "see ALONE in the Makefile"
        if "snapshot" in getattr(item, "fixturenames", ()):
            item.add_marker("snapshot")
