"""Training steps of a replica; the job with model, optimizers and replicas."""
