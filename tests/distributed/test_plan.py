import itertools
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import tfkfac
from tfkfac.distributed.plan import MODES, LayerPlan, Shapes, plan_layers

# A convolutional network's: of all kinds, with ties.
SHAPES: list[Shapes] = [
    {"A": (28, 28), "G": (32, 32)},
    {"G": (32, 2, 2)},
    {"A": (289, 289), "G": (64, 64)},
    {"A": (4, 9, 9), "G": (4, 8, 8)},
    {"A": (1000,), "G": (64, 64)},
    {"A": (289, 289), "G": (64, 64)},
    {"A": (65, 65), "G": (10, 10)},
]


def plan(mode: str, workers: int, **kwargs: Any) -> tuple[LayerPlan, ...]:
    if mode == "hybrid_opt":
        kwargs.setdefault("fraction", 1 / workers)
    return plan_layers(SHAPES, workers, mode, **kwargs)


class TestPlan:
    @pytest.mark.parametrize("workers", [1, 2, 3, 4, 16])
    @pytest.mark.parametrize("mode", MODES)
    def test_each_worker_in_one_receiver_group(
        self, mode: str, workers: int
    ) -> None:
        for layer in plan(mode, workers):
            groups = [(s, *r) for s, r in layer.receivers.items()]
            everyone = sorted(itertools.chain(*groups))
            assert everyone == list(range(workers))
            assert tuple(layer.receivers) == layer.gradient_workers

    @pytest.mark.parametrize("workers", [1, 2, 3, 16])
    @pytest.mark.parametrize("mode", MODES)
    def test_owners_are_gradient_workers(self, mode: str, workers: int) -> None:
        for layer, shapes in zip(plan(mode, workers), SHAPES, strict=True):
            assert set(layer.owners) == set(shapes)
            assert set(layer.owners.values()) <= set(layer.gradient_workers)
            owned = [layer.owned_by(w) for w in range(workers)]
            assert sorted(itertools.chain(*owned)) == sorted(shapes)

    def test_comm_opt_splits_by_factor(self) -> None:
        layers = plan("comm_opt", 4)
        assert {p.gradient_workers for p in layers} == {(0, 1, 2, 3)}
        assert not any(any(p.receivers.values()) for p in layers)
        # The two largest factors first; then 65, and 64 three times.
        assert layers[2].owners == {"A": 0, "G": 3}
        assert layers[5].owners == {"A": 1, "G": 2}
        assert layers[6].owners["A"] == 2

    @pytest.mark.parametrize("mode", MODES)
    def test_whole_layers(self, mode: str) -> None:
        """One owner of both factors; the gradient workers are the mode's."""
        fraction = 1 if mode == "hybrid_opt" else None
        whole = plan(mode, 4, fraction=fraction, whole_layers=True)
        split = plan(mode, 4, fraction=fraction)
        for one, other in zip(whole, split, strict=True):
            assert len(set(one.owners.values())) == 1
            assert set(one.owners) == set(other.owners)
            if mode in ("comm_opt", "hybrid_opt"):
                assert one.gradient_workers == other.gradient_workers
        owners = {owner for one in whole for owner in one.owners.values()}
        assert owners == {0, 1, 2, 3}

    @pytest.mark.parametrize("mode", ["mem_opt", "dp_kfac"])
    def test_one_owner(self, mode: str) -> None:
        for layer in plan(mode, 4):
            (owner,) = set(layer.owners.values())
            assert layer.gradient_workers == (owner,)
            others = tuple(w for w in range(4) if w != owner)
            assert layer.receivers == {owner: others}

    def test_hybrid(self) -> None:
        for layer in plan("hybrid_opt", 4, fraction=0.5):
            (owner,) = set(layer.owners.values())
            assert layer.gradient_workers == (owner % 2, owner % 2 + 2)
            neighbor = 1 - owner % 2
            assert layer.receivers == {
                owner % 2: (neighbor,),
                owner % 2 + 2: (neighbor + 2,),
            }

    @pytest.mark.parametrize(
        ("fraction", "columns", "sends"),
        [
            (
                1 / 4,
                {(0, 4), (1, 5), (2, 6), (3, 7)},
                {0: {1, 2, 3}, 4: {5, 6, 7}},
            ),
            (1 / 2, {(0, 2, 4, 6), (1, 3, 5, 7)}, {0: {1}, 2: {3}, 4: {5}}),
        ],
    )
    def test_hybrid_on_eight(
        self, fraction: float, columns: set[Any], sends: dict[int, set[int]]
    ) -> None:
        """The groups of KAISA's authors' code, written out."""
        shapes: list[Shapes] = [{"A": (2, 2)}] * 8
        layers = plan_layers(shapes, 8, "hybrid_opt", fraction)
        assert {p.gradient_workers for p in layers} == columns
        first = next(p for p in layers if 0 in p.gradient_workers)
        for sender, receivers in sends.items():
            assert set(first.receivers[sender]) == receivers

    @pytest.mark.parametrize("workers", [1, 2, 4])
    def test_hybrid_extremes(self, workers: int) -> None:
        least = plan("hybrid_opt", workers, fraction=1 / workers)
        if workers > 1:  # one worker is both extremes
            assert least == plan("mem_opt", workers)
        most = plan("hybrid_opt", workers, fraction=1)
        assert most == plan("comm_opt", workers)

    def test_default_policies(self) -> None:
        by_turns = plan("dp_kfac", 2)
        assert by_turns == plan("dp_kfac", 2, policy="round_robin")
        pairs = [p.owners["G"] for p in by_turns if "A" in p.owners]
        singles = [p.owners["G"] for p in by_turns if "A" not in p.owners]
        assert pairs == [i % 2 for i in range(len(pairs))]
        assert singles == [i % 2 for i in range(len(singles))]
        for mode in ("comm_opt", "mem_opt", "hybrid_opt"):
            assert plan(mode, 2) == plan(mode, 2, policy="compute")
        assert plan("dp_kfac", 2, policy="compute") == plan("mem_opt", 2)

    def test_memory_differs_from_compute(self) -> None:
        # 3^3 > 3 * 2^3, but 3^2 < 3 * 2^2.
        shapes: list[Shapes] = [{"A": (3, 3)}, {"A": (3, 2, 2)}]
        for policy, owners in (("compute", [0, 1]), ("memory", [1, 0])):
            layers = plan_layers(shapes, 2, "mem_opt", policy=policy)
            assert [p.owners["A"] for p in layers] == owners

    def test_no_layers(self) -> None:
        assert plan_layers([], 2, "comm_opt") == ()

    @pytest.mark.parametrize("hash_seed", ["1", "2"])
    def test_same_in_another_process(self, hash_seed: str) -> None:
        """There, without the rest of the package: it needs no TensorFlow."""
        code = (
            "import ast, sys, types\n"
            "for name in ('tfkfac', 'tfkfac.distributed'):\n"
            "    sys.modules[name] = types.ModuleType(name)\n"
            "    path = '/'.join([sys.argv[1], *name.split('.')])\n"
            "    sys.modules[name].__path__ = [path]\n"
            "from tfkfac.distributed.plan import plan_layers\n"
            "shapes = ast.literal_eval(sys.argv[2])\n"
            "print(plan_layers(shapes, 4, 'comm_opt'))\n"
            "assert 'tensorflow' not in sys.modules"
        )
        root = str(pathlib.Path(tfkfac.__file__).parents[1])
        output = subprocess.run(
            [sys.executable, "-c", code, root, repr(SHAPES)],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert output.strip() == repr(plan("comm_opt", 4))

    @pytest.mark.parametrize("mode", ["comm_opt", "mem_opt", "dp_kfac"])
    def test_fraction_without_hybrid(self, mode: str) -> None:
        with pytest.raises(ValueError, match="must be None unless"):
            plan_layers(SHAPES, 2, mode, fraction=0.5)

    def test_hybrid_without_fraction(self) -> None:
        with pytest.raises(ValueError, match="must be given with"):
            plan_layers(SHAPES, 2, "hybrid_opt")

    def test_unknown_mode(self) -> None:
        with pytest.raises(ValueError, match="`distribution` must be one of"):
            plan_layers(SHAPES, 2, "magic")

    def test_unknown_policy(self) -> None:
        with pytest.raises(ValueError, match="`assignment` must be one of"):
            plan_layers(SHAPES, 2, "mem_opt", policy="magic")
