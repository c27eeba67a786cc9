"""The memory of rank processes and their devices."""
