"""Which node of a job this is, and where the others find the monitor, derived from torchrun's flags."""

from __future__ import annotations

import argparse
import hashlib
import re
from dataclasses import dataclass

from traceml_ray.ray.connection import join


class UsageError(ValueError):
    """The command line cannot be used; the message says why."""


class NotGiven(int):
    """A node rank that was not given: to torchrun it is 0."""


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
    """Return where the ranks of all nodes meet."""
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
    """Return whether this is the machine of the rendezvous, as torch itself decides it."""
    from torch.distributed.elastic.rendezvous import utils as rendezvous

    is_host = rendezvous._parse_rendezvous_config(args.rdzv_conf or "").get("is_host")
    if is_host is not None:
        return is_host.lower() in ("1", "true", "t", "yes", "y")
    return rendezvous._matches_machine_hostname(host)


def head_host(host: str) -> str:
    """Return the name of the head's host for Ray."""
    # Ray takes localhost and 127.0.0.1 for "whatever address this machine has"; not so the next one.
    return "127.0.0.2" if host == "localhost" or host.startswith("127.") else host
