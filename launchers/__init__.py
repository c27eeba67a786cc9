"""What starts training and joins it to the monitor: torchrun, and a Ray cluster to attach to or to start."""
