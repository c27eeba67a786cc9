"""What is known of a run beside its steps: each signal is a folder."""
