"""Command lines that nobody meant: one line, exit code 2 (1 where the world is to blame), no traceback."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fuzzing import bounded, fuzz
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed import run as torch_run

from traceml_ray import cli
from traceml_ray.dash_app import process as dashboard
from traceml_ray.launchers import torchrun

SCRIPT = str(Path(__file__))
# What can be in an argument: anything but NUL, and bytes that are no UTF-8 as lone surrogates.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
raw = st.binary(max_size=8).map(lambda data: data.replace(b"\0", b"").decode("utf-8", "surrogateescape"))
odd = st.sampled_from(
    ["", "-", "--", "-1", "nan", "inf", "1e999", "9" * 400, "..", "/", "/proc", "/dev/null", "~", "x" * 5000,
     "a/b", "\n", "--help=", "auto", "localhost:1", "[::1]:1", "@file", "²", "٣", "1:", ":1", "1:2:3", "0",
     "65536", "-0", "a\nb"]
)  # fmt: skip
values = texts | raw | odd


def outcome(main: Callable[[Sequence[str]], int], argv: list[str]) -> tuple[int, str, str]:
    """The exit code, stdout, and stderr as a terminal would show it."""
    processes = [
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace")
    ]
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = processes
    try:
        with bounded(60):
            code = main(argv)
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.stdout, sys.stderr = before
    for process in processes:
        process.flush()
    out, err = (process.buffer.getvalue().decode() for process in processes)  # type: ignore[attr-defined]
    return code, out, err


def check(code: int, err: str) -> None:
    assert code in (0, 1, 2)
    assert "Traceback" not in err
    if code:
        assert err.count("\n") == 1 and "traceml-ray" in err, err


@fuzz(4)
@given(
    st.sampled_from(["report", "status", "stop", "dashboard", ""]),
    st.lists(
        st.sampled_from(["--out", "--run", "--json", "--port", "--host", "--token", "--ray-address", "--x"]),
        max_size=2,
    ),
    st.lists(values, max_size=4),
    st.randoms(use_true_random=False),
)
@example("report", [], ["x" * 5000], None)
@example("report", ["--out"], ["\n"], None)
@example("dashboard", ["--port"], ["9" * 5000], None)
@example("dashboard", ["--port"], ["²"], None)
def test_traceml_command_refuses_bad_arguments_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, command: str, flags: list[str], more: list[str], mixed: Any
) -> None:
    argv = [*flags, *more]
    if mixed is not None:
        mixed.shuffle(argv)
    with pytest.MonkeyPatch.context() as patched, contextlib.chdir(tmp_path_factory.getbasetemp()):
        patched.setattr(dashboard, "run", lambda _: 0)
        patched.setattr("signal.signal", lambda *_: None)
        code, _, err = outcome(cli.main, [command, *argv])
    check(code, err)


FLAGS = [
    "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend",
    "--rdzv-conf", "--rdzv-endpoint", "--rdzv-id", "--max-restarts", "--session", "--out", "--interval",
    "--channel", "--ray-address", "--traceml-port", "--dashboard", "--no-monitor", "-m", "--no-python",
    "--standalone", "--unknown", "--log-dir", "--tee", "--role", "--monitor-interval",
]  # fmt: skip


class Started(Exception):  # noqa: N818
    """Nothing was wrong with the arguments."""


def start(*_: Any, **__: Any) -> None:
    raise Started


@fuzz(4)
@given(
    st.lists(st.tuples(st.sampled_from(FLAGS), st.none() | values), max_size=4),
    st.sampled_from([[SCRIPT], [SCRIPT, "--x"], [], ["gone.py"]]),
    st.booleans(),
)
@example([("--nproc-per-node", "9" * 5000)], [SCRIPT], True)
@example([("--nnodes", "1:2:3")], [SCRIPT], True)
@example([("--rdzv-conf", "a"), ("--rdzv-backend", "c10d")], [SCRIPT], False)
@example([("--dashboard", "9" * 5000)], [SCRIPT], True)
@example([("--master-addr", "é" * 100), ("--master-port", "1")], [SCRIPT], False)
@example([("--traceml-port", "²")], [SCRIPT], False)
def test_launcher_refuses_bad_arguments_in_one_line(
    tmp_path_factory: pytest.TempPathFactory,
    given: list[tuple[str, str | None]],
    script: list[str],
    joined: bool,
) -> None:
    argv: list[str] = []
    for flag, value in given:
        argv += (
            [flag]
            if value is None
            else [f"{flag}={value}"]
            if joined and flag.startswith("--")
            else [flag, value]
        )
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patched, contextlib.chdir(folder):
        patched.setenv("TRACEML_OUT", str(folder / "sessions"))
        patched.setattr(torchrun, "_train", start)
        patched.setattr(torch_run, "run", start)
        try:
            code, out, err = outcome(torchrun.main, [*argv, *script])
        except Started:
            return
    assert code in (0, 2), (code, err)
    assert code == 0 or (not out and err.startswith("traceml-ray: ") and err.count("\n") == 1), err
