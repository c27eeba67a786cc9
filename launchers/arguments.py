"""
Adds the command-line flags that all launchers share, and makes the settings from them. Also reads from
torchrun's flags which node of a job this is, and where the other nodes find the monitor.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from traceml_ray.launchers.min_versions import too_old
from traceml_ray.ray.connection import join
from traceml_ray.settings import Setting, SettingError, Settings, help_of, table
from traceml_ray.text import log, masked, masked_command


class UsageError(ValueError):
    """The command line cannot be used. The message says why."""


class NotGiven(int):
    """Marks a node rank that was not given. For torchrun it is 0."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of one job, as this launcher sees them."""

    count: int = 1
    """Smallest number of nodes."""
    fixed: bool = True
    """Whether `count` is also the largest number of nodes."""
    rank: int = 0
    first: bool = True
    """Whether this node creates the session."""
    host: str = ""
    """Host of the first node, as given on the command line."""
    head: str = ""
    """host:port of the private cluster's head; "" for a job of one node."""
    job: str = ""
    """Name of the session if none is given: the same on every node."""

    @property
    def several(self) -> bool:
        """Whether the job has, or may get, more than one node."""
        return self.count > 1 or not self.fixed


def read(args: argparse.Namespace, ray_address: str | None) -> Nodes:
    """Return the nodes that torchrun's arguments describe. Raises UsageError."""
    from torch.distributed import run as torch_run

    try:
        least, most = torch_run.parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError):
        raise UsageError(f"--nnodes={args.nnodes} is neither N nor MIN:MAX") from None
    if not 0 < least <= most:
        raise UsageError(f"--nnodes={args.nnodes}: at least one node, and MIN not above MAX")
    if most == 1:
        return Nodes()
    host, port = _endpoint(args)
    rank: int | None = None if isinstance(args.node_rank, NotGiven) else args.node_rank
    if args.rdzv_backend == "static":
        rank = args.node_rank
    if rank is None and ray_address is None:
        raise UsageError(
            f"--nnodes={args.nnodes} with --rdzv-backend={args.rdzv_backend} needs --node-rank on every "
            "node, or the --ray-address of a running cluster"
        )
    first = _hosts_rendezvous(args, host) if rank is None else rank == 0
    named = re.sub(r"[^A-Za-z0-9_-]", "-", args.rdzv_id)[:40] if args.rdzv_id != "none" else "job"
    address_hash = hashlib.sha256(f"{host}:{port}".encode()).hexdigest()[:8]
    return Nodes(
        count=least,
        fixed=least == most,
        rank=rank if rank is not None else int(not first),
        first=first,
        host=host,
        head=join(head_host(host), args.traceml_port or port + 1),
        job=f"{named}-{address_hash}",
    )


def _endpoint(args: argparse.Namespace) -> tuple[str, int]:
    """Return the host and port at which the ranks of all nodes meet."""
    from torch.distributed.elastic.rendezvous import utils as rendezvous

    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return args.master_addr, args.master_port or 29500
    if not args.rdzv_endpoint:
        raise UsageError(
            f"--rdzv-backend={args.rdzv_backend} with --nnodes={args.nnodes} needs --rdzv-endpoint"
        )
    try:
        host, port = rendezvous.parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=29400)
    except ValueError as error:
        raise UsageError(f"--rdzv-endpoint={args.rdzv_endpoint}: {error}") from None
    return host, port


def _hosts_rendezvous(args: argparse.Namespace, host: str) -> bool:
    """Return whether this machine hosts the rendezvous, determined in the same way as torch does."""
    from torch.distributed.elastic.rendezvous import utils as rendezvous

    is_host = rendezvous._parse_rendezvous_config(args.rdzv_conf or "").get("is_host")
    if is_host is not None:
        return is_host.lower() in ("1", "true", "t", "yes", "y")
    return rendezvous._matches_machine_hostname(host)


def head_host(host: str) -> str:
    """Return the host name of the head, in a form for Ray."""
    # Ray interprets localhost and 127.0.0.1 as "any address of this machine", but not the next address.
    return "127.0.0.2" if host == "localhost" or host.startswith("127.") else host


_COMMAND_CHARS = 1000
RAY_PORT = 29501
"""Port of `traceml-ray run` on several nodes: torchrun's default port + 1."""
LINGER_S = 1800
CHECK_S = 20
_OF_SETTING = "setting_"
"""Prefix of the names of parsed settings, because torchrun has names of its own."""
_BARE = "--dashboard=\0"  # no argument can be that


def add_flags(add: Callable[..., Any], default_port: str) -> None:
    """Add our flags with `add`, the `add_argument` of a parser."""
    for setting in table(Settings).values():
        _add_setting(add, setting)
    add(
        "--thresholds",
        dest=f"{_OF_SETTING}thresholds",
        action="append",
        metavar="NAME=VALUE",
        help=f"{help_of(Settings).get('thresholds', '').partition(':')[0]}; may be given several times.",
    )
    add(
        "--traceml-port",
        type=_port,
        help=f"Port of the private Ray on the first of several nodes; default: {default_port}.",
    )
    add(
        "--live",
        action="store_true",
        help="Show the session below the job's output, if that is a terminal (as traceml-ray top).",
    )
    add(
        "--check",
        action="store_true",
        help="Before the job starts, measure its nodes, and name one that is slower than its peers.",
    )
    add("--check-seconds", type=_seconds, metavar="S", help=f"Seconds per node; default: {CHECK_S}.")
    add("--check-path", metavar="PATH", help="Also read from the disk of this file or folder.")
    add(
        "--check-stop",
        action="store_true",
        help="Check, and do not start the job if something is named: exit code 3.",
    )
    add(
        "--dashboard",
        type=_dashboard_port,
        metavar="[=PORT]",
        help="Serve the web app on this node while the job runs; default: port 8050, or a free one.",
    )
    add(
        "--dashboard-linger",
        type=_seconds,
        metavar="SECONDS",
        help="Keep serving this long after the job while a browser is open; 0: stop with the job. "
        f"Default: {LINGER_S}.",
    )


def _add_setting(add: Callable[..., Any], setting: Setting) -> None:
    """Add the flags of a setting. `settings_of` checks its value later, with the environment."""
    about = help_of(Settings).get(setting.name, "").rstrip(".")
    usual = "" if setting.default is None else f"; default: {setting.default}"
    more: dict[str, Any] = {"dest": _OF_SETTING + setting.name, "default": None}
    if setting.type is bool:
        more |= {"action": argparse.BooleanOptionalAction, "help": f"{about}.".replace("%", "%%")}
        add(*setting.flags, **more)
        return
    allowed = f". {setting.allowed[0].upper()}{setting.allowed[1:]}" if setting.range else ""
    metavar = "|".join(setting.choices) or ("N" if setting.range else "TEXT")
    add(*setting.flags, metavar=metavar, help=f"{about}{allowed}{usual}.".replace("%", "%%"), **more)


def add_command(add: Callable[..., Any]) -> None:
    """Add the arguments of `traceml-ray run` with `add`, the `add_argument` of a parser."""
    add_flags(add, str(RAY_PORT))
    add("--nnodes", type=int, default=1, metavar="N", help="Number of nodes; start one `run` on each.")
    add(
        "--node-rank",
        type=int,
        default=0,
        metavar="R",
        help="Rank of this node; the session is written on node 0.",
    )
    add("--master-addr", metavar="HOST", help="Host of node rank 0, if there are several nodes.")
    add("--no-monitor", action="store_true", help="Run the command without the monitor.")
    add("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="Command to run, with its arguments.")


def marked(argv: Sequence[str]) -> list[str]:
    """Return `argv` with a `--dashboard` that has no port as one word, so that the next is not its port."""
    return [_BARE if text == "--dashboard" else text for text in argv]


def unmarked(argv: Sequence[str]) -> list[str]:
    """Return `argv` as it was before `marked`, for words that are passed to another program."""
    return ["--dashboard" if text == _BARE else text for text in argv]


def check_floors(args: argparse.Namespace) -> None:
    """If torch or Ray is too old for a monitor, set `no_monitor` and print the reason in one line."""
    if not args.no_monitor and (lack := too_old("torch") or too_old("ray")):
        log(f"no monitor for this run: {lack}")
        args.no_monitor = True


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the settings of a launch. Raises SettingError."""
    prefix = len(_OF_SETTING)
    fields = {name[prefix:]: value for name, value in vars(args).items() if name.startswith(_OF_SETTING)}
    fields["thresholds"] = _pairs(fields.get("thresholds"))
    if not os.environ.get("TRACEML_RAY_ADDRESS"):
        fields["ray_address"] = fields.get("ray_address") or os.environ.get("RAY_ADDRESS") or None
    return Settings.load(os.environ, None, _flag, **fields)


def _pairs(texts: Sequence[str] | None) -> dict[str, str]:
    """Return the thresholds given as NAME=VALUE, by name. Raises SettingError."""
    for text in texts or ():
        if "=" not in text:
            raise SettingError(f"--thresholds={text!r} must be NAME=VALUE")
    return dict(text.split("=", 1) for text in texts or ())


def _flag(name: str) -> str:
    return table(Settings)[name].flags[-1] if name != "thresholds" else "--thresholds"


def dashboard_of(args: argparse.Namespace) -> dict[str, str] | None:
    """Return the options of the dashboard. None: no dashboard is wanted."""
    if args.dashboard is None:
        return None
    linger = LINGER_S if args.dashboard_linger is None else args.dashboard_linger
    return {"port": args.dashboard, "linger": str(linger)}


def command_text(words: Sequence[str]) -> str:
    """Return a command as one shortened line, without words that look like a secret."""
    return masked(shlex.join(masked_command(words)))[:_COMMAND_CHARS]


def _dashboard_port(text: str) -> str:
    return text.strip("\0") if text in ("\0", "0") else str(_port(text))


def _seconds(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return int(text)


def _port(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return int(text)
