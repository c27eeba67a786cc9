"""The document that people read, as one model (`model`), and its renderers."""
