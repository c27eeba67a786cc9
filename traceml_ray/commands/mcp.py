"""The command `mcp`: a coding agent asks about sessions."""

from __future__ import annotations

import argparse
import os
import sys

from traceml_ray.commands import which
from traceml_ray.text import log


def mcp_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray mcp`."""
    which.add_folder(command)
    command.add_argument(
        "--read-only",
        action="store_true",
        help="without the tools that ask something of a running job (profile, stacks)",
    )


def mcp(arguments: argparse.Namespace) -> int:
    """
    Answer the questions of a coding agent (Claude Code, Cursor, VS Code) about sessions, over the Model
    Context Protocol.
    """
    try:
        from traceml_ray.mcp.server import make_server
        from traceml_ray.mcp.sessions import Sessions
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("traceml_ray"):
            raise
        # An older `mcp` lacks the module `mcp.server.mcpserver`.
        missing = f"this needs the package mcp, 2.0 or newer ({error}): pip install 'traceml-ray[mcp]'"
        log(missing)
        return 1
    os.nice(5)  # training comes first
    if sys.stdin is not None and sys.stdin.isatty():
        log("mcp: waiting for a coding agent on standard input, which starts this command (Ctrl-C ends)")
    sessions = Sessions(arguments.out)
    try:
        make_server(sessions, read_only=arguments.read_only).run()
    except KeyboardInterrupt:
        pass
    finally:
        sessions.close()
    return 0
