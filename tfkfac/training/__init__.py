"""One training step of one replica, and the job that it is of."""
