"""LMS for PyTorch, on its public hooks: docs/lms.md, "Source layout", follows a saved tensor through these files."""
