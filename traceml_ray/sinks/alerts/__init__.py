"""Alerts of a session: rules, and the places that they are sent to."""
