"""Tables of plans, of the papers' figures and of what was measured."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from planning.cost import Estimate, Machine, recommend
from tfkfac.shell.tables import bytes_text, table

if TYPE_CHECKING:
    from planning.local import Comparison
    from planning.papers import Reproduction

Intervals = tuple[int, int]
# Relative errors beyond these are marked.
_PAPER_BOUND, _MEASURED_BOUND = 0.25, 0.30


def machine_text(machine: Machine, first_order: float | None) -> str:
    """What is known of the machine."""
    text = (
        f"A worker: {machine.flops / 1e12:.3g} TFLOP/s of products; n^3 of "
        f"decompositions {machine.inverse / 1e9:.3g} G/s (inverse), "
        f"{machine.eigen / 1e9:.3g} G/s (eigen); {machine.memory / 1e9:.3g} "
        f"GB/s of memory, {machine.bandwidth / 1e9:.3g} GB/s and "
        f"{machine.latency * 1e6:.3g} us between workers."
    )
    if first_order is not None:
        text += f" A step of SGD: {1e3 * first_order:.3g} ms, measured."
    return text


def counts_text(optimizer: Any) -> str:
    """Elements of the factors and weights."""
    registry = optimizer.method.placement.registry
    factors = sum(
        factor.elements
        for block in registry.blocks
        for factor in block.factors.values()
    )
    rest = sum(left.weights for left in registry.leftovers)
    return (
        f"{len(registry.blocks)} blocks: {factors / 1e6:.2f} M elements of "
        f"factors, {registry.covered / 1e6:.2f} M weights preconditioned, "
        f"{rest / 1e6:.2f} M not."
    )


def plan_text(
    estimates: Sequence[Estimate], intervals: Sequence[Intervals]
) -> str:
    """All distributions, and the one to take."""
    header = (
        "Solver",
        "Distribution",
        "plain ms",
        "factor ms",
        "inverse ms",
        *(f"mean ms at {f},{i}" for f, i in intervals),
        "plain recv.",
        "factor +",
        "inverse +",
        "State",
    )
    lines = table(header, [_row(one, intervals) for one in estimates])
    best = recommend(estimates, *intervals[0])
    lines += ["", f"Recommended: {_choice(best, intervals[0])}"]
    if best.candidate.distribution == "dp_kfac":
        rest = [
            one for one in estimates if one.candidate.distribution != "dp_kfac"
        ]
        other = recommend(rest, *intervals[0])
        lines += [
            "Its factors are of one worker's batch, which makes it another "
            "method. Of those that agree with one worker:",
            f"Recommended: {_choice(other, intervals[0])}",
        ]
    return "\n".join(lines)


def _choice(one: Estimate, intervals: Intervals) -> str:
    factor, inverse = intervals
    mode, fraction, solver = one.candidate
    given = (
        "" if fraction is None else f"gradient_worker_fraction={fraction:g}, "
    )
    return (
        f'KFAC(distribution="{mode}", {given}solver="{solver}"), '
        f"{1e3 * one.amortised(factor, inverse):.4g} ms a step at intervals "
        f"{factor} and {inverse}, {bytes_text(one.state['total'])} of state"
    )


def _row(one: Estimate, intervals: Sequence[Intervals]) -> tuple[str, ...]:
    seconds = [one.plain, one.factor, one.inverse]
    seconds += [one.amortised(*pair) for pair in intervals]
    received = one.received
    plain = received["gradients"] + received["preconditioned_gradients"]
    sizes = [plain, received["factors"], received["decompositions"]]
    return (
        one.candidate.solver,
        one.candidate.text,
        *(f"{1e3 * value:.4g}" for value in seconds),
        *(bytes_text(size) for size in (*sizes, one.state["total"])),
    )


# ------------------------------------------------------------------ papers
def papers_text(found: "Reproduction", stale: Intervals) -> str:
    """The papers' figures beside the model's.

    Args:
        found: What the model says.
        stale: Steps between KAISA's stale updates.
    """
    machine = found.machine
    lines = [
        "DP-KFAC, table 2: elements of factors N_f and of weights N_g",
        *(
            f"  {name}: {c.factors / 1e6:.2f} M, {c.weights / 1e6:.2f} M"
            for name, c in found.counts.items()
        ),
        "  (the paper: ResNet-50 153.9 M, 25.6 M)",
        "",
        "DP-KFAC, table 5: seconds of an iteration on 64 GPUs. Fitted to "
        f"ResNet-50 alone: {machine.bandwidth / 1e9:.3g} GB/s, "
        f"{machine.overhead:.3g} s of overhead",
    ]
    rows = []
    for name, (ours, theirs) in found.times.items():
        for mode in ours._fields:
            mine, paper = getattr(ours, mode), getattr(theirs, mode)
            ratio = (ours.dp_kfac / mine) / (theirs.dp_kfac / paper) - 1
            rows.append(
                (
                    name,
                    mode,
                    f"{paper:.3f}",
                    f"{mine:.3f}",
                    f"{theirs.dp_kfac / paper:.3f}",
                    f"{ours.dp_kfac / mine:.3f}",
                    _marked(ratio, _PAPER_BOUND),
                )
            )
    header = ("Network", "Distribution", "paper s", "model s",
              "paper dp/", "model dp/", "off by")  # fmt: skip
    lines += [*table(header, rows), "", *_kaisa(found, stale)]
    return "\n".join(lines)


def _kaisa(found: "Reproduction", stale: Intervals) -> list[str]:
    lines = [
        "KAISA: ResNet-50, eigen, quickest first. Stale: factors are renewed "
        f"every {stale[0]} steps, decompositions every {stale[1]}"
    ]
    clusters = {"fitted": found.fitted, "V100": found.own}
    for cluster, kaisa in clusters.items():
        for updates, times in kaisa._asdict().items():
            order = sorted(times, key=times.__getitem__)
            text = " < ".join(f"{mode} {times[mode]:.4g} s" for mode in order)
            lines.append(f"  {cluster} cluster, {updates} updates: {text}")
    return [
        *lines,
        "  comm_opt is quicker than mem_opt with stale updates by "
        f"{found.fitted.gain:.1%} (fitted) and {found.own.gain:.1%} (V100); "
        "the paper says 24.4 %.",
        "  mem_opt loses by the hops of its broadcasts, 63 round a ring for "
        "each layer's owner: it would",
        f"  be the 24.4 % with {1e6 * found.hop:.1f} us for each of them, "
        "where 5 us are assumed.",
    ]


def _marked(error: float, bound: float) -> str:
    return f"{error:+.0%}{' (!)' if abs(error) > bound else ''}"


# ---------------------------------------------------------------- measured
def verify_text(found: Sequence["Comparison"]) -> str:
    """Kinds of steps, predicted and measured."""
    rows = [
        (
            one.model,
            one.solver,
            one.kind,
            f"{one.measured:.4g}",
            f"{one.predicted:.4g}",
            _marked(one.error, _MEASURED_BOUND),
        )
        for one in found
    ]
    header = ("Model", "Solver", "Step", "measured ms", "model ms", "off by")
    worst = max(abs(one.error) for one in found)
    lines = table(header, rows)
    return "\n".join([*lines, f"The worst is off by {worst:.0%}."])
