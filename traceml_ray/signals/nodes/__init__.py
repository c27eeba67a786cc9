"""The machines: CPU, memory, disk, network and GPUs."""
