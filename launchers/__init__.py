"""Launchers: start training under torchrun or Ray and connect it to the monitor."""
