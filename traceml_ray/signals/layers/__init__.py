"""The time and the memory of each layer of the model."""
