"""What is patched in torch and in Ray Data, one family a file; `patcher` says how."""
