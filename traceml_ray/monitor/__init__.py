"""Relay and aggregator without Ray: what runs in their actors."""
