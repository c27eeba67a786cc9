"""Where the time of a run went: steps, checkpoints, evaluations, restarts."""
