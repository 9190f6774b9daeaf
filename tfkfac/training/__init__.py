"""Training step of a replica, and the job that all its steps belong to."""
