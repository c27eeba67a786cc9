"""What people read, as one model (`model`), and its renderers."""
