"""Foreign formats, each understood here and nowhere else."""
