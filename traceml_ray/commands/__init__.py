"""The subcommands of `traceml-ray`, one file for each subject: their options and their implementation."""
