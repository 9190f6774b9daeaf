"""Who computes what on several workers, and how the results travel."""
