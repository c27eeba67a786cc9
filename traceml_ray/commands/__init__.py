"""The subcommands of `traceml-ray` that have a file of their own: arguments, and what is done with them."""
