"""How FSDP2 divides a model among ranks, and what that moves."""
