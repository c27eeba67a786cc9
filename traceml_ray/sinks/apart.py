"""
Starts the process of the sinks as a child of this one, which waits for it. Ray kills the children of an actor
that ends, but not their children: so the sinks can still report the end of the session.

    python -m traceml_ray.sinks.apart FD FOLDER < settings
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Report the session in a child of this process. Return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    from traceml_ray.sinks import process  # only the child needs it

    return process.main()


if __name__ == "__main__":
    sys.exit(main())
