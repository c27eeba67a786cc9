"""How FSDP2 divides a model among ranks, and the traffic that this causes."""
