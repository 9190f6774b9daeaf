"""The size of the training step that XLA compiles on a GPU."""

from compiled_step import compiled_step


def test_equal_layers_share_the_instructions_of_a_step() -> None:
    """Nine equal layers and an output layer: at most 4.5 times Muon's addition.

    The inverse updates are not in the compiled step.
    """
    counts = {}
    for name in ("adam", "muon", "kfac"):
        text, module = compiled_step("dense10", name)
        counts[name] = sum(" = " in line for line in text.splitlines())
        assert "cholesky(" not in text
        assert b"dot" in module
    added = {name: count - counts["adam"] for name, count in counts.items()}
    assert added["muon"] > 0
    assert 0 < added["kfac"] <= 4.5 * added["muon"], counts
