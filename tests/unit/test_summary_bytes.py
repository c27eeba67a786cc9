"""`summary.json` stays as it is, byte by byte: programs of others read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from measured_layers import window
from played import Played
from snapshot import Snapshot

from traceml_ray.document.json import as_json
from traceml_ray.signals.experts.records import RouterTokens
from traceml_ray.signals.logged.records import LoggedValues
from traceml_ray.signals.sharding.records import Sharding
from traceml_ray.signals.view import Run, View
from traceml_ray.signals.views import VIEWS, answers_in
from traceml_ray.store.query import OfRun
from traceml_ray.store.summary_shape import plain, summary_of


def _late(folder: Path) -> Played:
    """Rank 1 is late, and each signal has something to say."""
    played = Played(folder, 2, per_node=1, late=1, onset=40, gpus=1)
    played.leaks = {0: 256 << 20}
    for _ in range(25):
        played.play(5)
    played.play(
        experts=[RouterTokens(0, "router", [7, 1])],
        sharding=[Sharding(2, 10, 40, 0, 10, 4, 1, 1, [4], [], {}, {}, steps=5)],
        layers=[window({"blocks.0": (1.5, 2.25), "head": (0.5, 1.0)})],
        logged=[LoggedValues("loss", 0, 129, 130, 0.123456, 3.0, 1, 40, None, 0.123456)],
    )
    return played


def _failed(folder: Path) -> Played:
    """Rank 1 dies of an exception."""
    played = Played(folder, 2, per_node=1, late=None, gpus=1)
    for _ in range(12):
        played.play(5)
    played.dies(1, 1, "ValueError: loss is nan")
    return played


def _no_step(folder: Path) -> Played:
    return Played(folder, 2, per_node=1, late=None, gpus=1)


@pytest.mark.parametrize("made", [_late, _failed, _no_step], ids=lambda made: made.__name__.strip("_"))
def test_summary_json_has_the_same_bytes_as_before(
    made: Callable[[Path], Played], tmp_path: Path, snapshot: Snapshot
) -> None:
    played = made(tmp_path / "s")
    played.end(int(made is _failed))
    snapshot("summary", (tmp_path / "s" / "summary.json").read_text())


class Energy(msgspec.Struct, frozen=True):
    """What a run used."""

    joules: float


class GetEnergy(OfRun[Energy], frozen=True):
    """What a run used."""


class EnergyView(View[Energy]):
    """A signal that no struct of a summary knows."""

    name = "energy"
    question = GetEnergy

    def answer(self, run: Run, asked: GetEnergy) -> Energy:
        return Energy(1.23456789)

    def block(self, answer: Energy) -> Energy:
        return answer

    def of_block(self, block: Any) -> Energy:
        return msgspec.convert(block, Energy)


def test_signal_without_a_field_in_the_summary_has_a_block_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VIEWS, "energy", EnergyView())
    played = _failed(tmp_path / "s")
    played.end(1)
    written = json.loads((tmp_path / "s" / "summary.json").read_bytes())
    assert [*written.items()][-1] == ("energy", {"joules": 1.2346})
    summary = summary_of(written)
    assert answers_in(summary)["energy"] == Energy(1.2346)
    assert json.loads(as_json(plain(summary))) == written


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"verdict": None}, r"\$\.verdict"),
        ({"steps": {"count": "many"}}, r"\$\.steps"),
        ({"layers": 7}, r"\$\.layers"),
    ],
)
def test_summary_of_something_else_is_refused_by_the_name_of_its_block(
    change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    played = _no_step(tmp_path / "s")
    played.end()
    written = json.loads((tmp_path / "s" / "summary.json").read_bytes())
    with pytest.raises(msgspec.ValidationError, match=why):
        summary_of({**written, **change})
