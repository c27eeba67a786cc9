"""What is known of how this rank exchanges gradients with its peers."""

from __future__ import annotations

from collections.abc import Callable


class GradientExchange:
    """Set by the patches of DDP, FSDP and others; read where rows are cut and flagged."""

    __slots__ = ("coupled", "inferred", "on_device", "peers", "several")

    def __init__(self) -> None:
        self.peers: Callable[[], bool] | None = None
        """Does the backward that ends now exchange gradients? None: there are no peers."""
        self.coupled = False
        """Waits for peers cannot be told apart inside forward and backward (on a device, tensor parallel)."""
        self.several = False
        """Some step has had several backwards that exchanged gradients, or might have."""
        self.inferred = False
        """Rows are cut where a reduction ended, because nothing else says where gradients are exchanged."""
        self.on_device = False
        """Such a reduction ran on a device: its waits are not on the clock of the rows."""
