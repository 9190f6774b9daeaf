"""Loss of a training step: its terms, unit, and weights of the replicas."""
