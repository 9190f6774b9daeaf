"""The Keras optimizer around another: arguments, model, state in files."""
