"""Pure functions over numpy arrays: no Ray, no torch, no I/O, no clock."""
