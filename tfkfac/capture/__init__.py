"""Record layer inputs and gradients under the user's gradient tape."""
