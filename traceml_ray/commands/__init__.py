"""The subcommands of `traceml-ray`, a file for each subject: their options, and what is done with them."""
