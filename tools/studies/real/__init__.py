"""Small programs of the kinds of the keras.io examples, one function each.

A program takes a function that makes an optimizer, and the arguments of `fit`
that time it. It trains as a user would, and returns the losses of the training
and of the validation data. `USUAL` has the optimizer that such an example uses.
"""
