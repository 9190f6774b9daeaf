"""Processes of a job: their meeting, faults and common stop."""
