"""Patches of torch and Ray Data: one family per file. `patcher` defines how a patch is applied."""
