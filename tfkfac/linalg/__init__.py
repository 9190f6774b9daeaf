"""Linear algebra on symmetric matrices; depends on TensorFlow only."""
