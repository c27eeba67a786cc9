"""Readers of foreign formats. No other code knows these formats."""
