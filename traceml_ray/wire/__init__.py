"""What goes from one process to another, and how it is encoded."""
