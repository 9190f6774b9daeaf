"""Losses among replicas, and their scale."""
