"""What every test stands on: an environment that says nothing of ranks, sessions or clusters."""

import os
import signal

import hypothesis
import pytest

hypothesis.settings.register_profile("shared-machine", deadline=None)
hypothesis.settings.load_profile("shared-machine")

# A shell starts what it runs in the background with SIGINT ignored, and so would be whatever a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

_FOREIGN = ("TRACEML_", "TORCHELASTIC_", "OMPI_", "SLURM_", "PMI_", "RAY_")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(_FOREIGN) or name in _RANKS:
            monkeypatch.delenv(name)
