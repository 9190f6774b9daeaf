"""What K-FAC and FOSI share: the Keras optimizer around another."""
