"""LMS for PyTorch, on its public hooks."""
