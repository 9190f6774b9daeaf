"""Optimizer state in files."""
