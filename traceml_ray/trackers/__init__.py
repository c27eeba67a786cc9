"""Writes figures of a run into the experiment tracker that the training script has open."""
