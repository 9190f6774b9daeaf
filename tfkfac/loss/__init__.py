"""The loss of a step: its terms, its unit, and what replicas have of it."""
