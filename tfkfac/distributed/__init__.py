"""Distribution over workers: plans, messages and collectives."""
