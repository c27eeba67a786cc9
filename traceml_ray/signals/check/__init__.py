"""Machines measured by themselves, and compared with their peers."""
