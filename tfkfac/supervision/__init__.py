"""What the workers of a job do together around `fit`."""
