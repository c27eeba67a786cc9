"""Collectives: how many bytes they move and how long they take, and which rank did not join."""
