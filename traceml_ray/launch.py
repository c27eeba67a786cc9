"""`python -m traceml_ray.launch`: torchrun with a monitor. Everything is in `launchers.torchrun`."""

import sys

from traceml_ray.launchers.torchrun import main

if __name__ == "__main__":
    sys.exit(main())
