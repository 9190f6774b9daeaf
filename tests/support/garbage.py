"""Settings of Python's garbage collector for tests."""

import gc


def tune_garbage_collection() -> None:
    """Exclude the objects that exist now, and collect less often.

    TensorFlow and Keras create millions of objects when they are imported.
    Scanning these objects repeatedly takes 10 % of the time of the tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
