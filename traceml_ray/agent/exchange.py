"""What is known of how this rank exchanges gradients with its peers."""

from __future__ import annotations

from collections.abc import Callable

STREAMED = "exchanged on a device"
"""Why waits are not seen, where only the device's own clock shows them."""


class GradientExchange:
    """Set by the patches of DDP, FSDP and others; read where rows are cut and flagged."""

    __slots__ = (
        *("_clocked", "_seen", "_sharded", "bracketed", "inseparable", "inferred", "on_device", "peers"),
        *("reasons", "roles", "several"),
    )

    def __init__(self) -> None:
        self.peers: Callable[[], bool] | None = None
        """Whether the backward that ends now exchanges gradients. None: there are no peers."""
        self.reasons: set[str] = set()
        """Why waits for peers inside forward and backward cannot be told apart."""
        self.inseparable = False
        """Whether waits inside forward and backward cannot be told apart from work."""
        self.several = False
        """Whether some step has had several backwards that exchanged gradients, or may have."""
        self.inferred = False
        """
        Whether rows are cut where a reduction ended, because nothing else shows where gradients are
        exchanged.
        """
        self.on_device = False
        """Whether such a reduction ran on a device: then its waits are not on the clock of the rows."""
        self.bracketed = 0
        """Number of functions whose waits on a device have marks."""
        self.roles = False
        """
        Ranks wait for others that do other work (stages of a pipeline, tensor-parallel ranks), and their rows
        show it: these waits are told apart from the exchange of gradients.
        """
        self._seen: set[str] = set()
        self._sharded = False
        self._clocked = False

    def couple(self, reason: str) -> None:
        """Note why waits are not seen."""
        self.reasons.add(reason)
        self._decide()

    def see(self, reason: str) -> None:
        """Note why ranks wait for others that do other work, where the CPU's clock shows these waits."""
        self._seen.add(reason)
        self._decide()

    def shard(self) -> None:
        """FSDP waits for this rank's peers inside forward and backward, too: waits are of two kinds there."""
        self._sharded = True
        self._decide()

    def clock(self, on: bool) -> None:
        """Rows are taken from the device's clock from here on, or no longer."""
        self._clocked = on
        self._decide()

    def _decide(self) -> None:
        reasons = self.reasons - {STREAMED} if self._clocked else self.reasons
        self.inseparable = bool(reasons or (self._seen and (self._sharded or self._clocked)))
        self.roles = bool(self._seen) and not self.inseparable

    @property
    def streamed(self) -> bool:
        """Waits are on a device's streams, so a row on the CPU's clock does not show them."""
        return STREAMED in self.reasons
