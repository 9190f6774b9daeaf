"""Each command of the documentation is run, or a table says why it is not.

Commands stand in Markdown files, in docstrings of scripts and in comments of
shell scripts. Python scripts of this repository are run at least up to the
start of their work, which finds wrong arguments and missing modules.
"""

import ast
import json
import pathlib
import re
import shlex
from collections.abc import Iterator

import pytest

import results
import time_to_target
from targets import report
from targets.study import TRAININGS, Records
from tests.support.scripts import ROOT, Done, Job, run_all

PAGES = sorted((ROOT / "docs" / "pages").rglob("*.md"))
READMES = [ROOT / folder / "README.md" for folder in (".", "examples", "tools")]
README = READMES[0].read_text()
DOCUMENTS = [*READMES, ROOT / "CONTRIBUTING.md", *PAGES]
FOLDERS = [
    ROOT / place
    for place in ("tools", "tools/studies", "examples", "examples/clusters")
]
FENCE = re.compile(r"^( *)```\w*\n(.*?)^\1```$", re.M | re.S)
COMMAND = re.compile(
    r"((?:[A-Z_]+=(?:'[^']*'|\S+)\s+)*)(?:\.venv/bin/)?((?:python|bash|pip|"
    r"srun|sbatch|scancel|scontrol|mpirun|torchrun|horovodrun|ray)\s+\S.*)"
)

SNIPPET = "README.md, first snippet"
# Run in full: the command, arguments that make it quick, a part of its output.
QUICK = (
    ("python examples/reproduce.py --list", "", "kaisa-figure-6"),
    ("python tools/launch.py 2 -- python train.py", "", "[worker 1] trained"),
)
TRAIN = "--quick --json runs.json"
SLOW = (
    ("python examples/autoencoder.py --optimizer kfac adam", TRAIN, "kfac"),
    (
        "python examples/classification.py --optimizer kfac adam "
        "--plot digits.png",
        f"{TRAIN} --model cnn",  # ResNet-32 takes long to trace
        "Plot: digits.png",
    ),
    (
        "python examples/clusters/train.py DIRECTORY EPOCHS",
        "",
        "worker 0 of 1: loss",
    ),
    (
        "python examples/detection.py --optimizer "
        "'kfac:skip_layers=[\"neck\"]' sgd",
        TRAIN,
        "neck",
    ),
    (
        "python examples/gauss_newton.py table --threads 1 --problems "
        '"Poisson 2-D" --optimizers gauss_newton lbfgs --seeds 3 --seconds 20',
        "--problems regression --seeds 1 --seconds 6",
        "lbfgs",
    ),
    (
        "python examples/language.py --optimizer kfac adam",
        f"{TRAIN} --optimizer kfac",
        "kfac",
    ),
    (
        "python examples/masked_language.py --optimizer kfac adam",
        f"{TRAIN} --optimizer kfac",
        "kfac",
    ),
    (
        "python examples/plot_spectrum.py --epochs 5 --every 20 "
        "--output spectrum.png",
        "--quick",
        "Plot: spectrum.png",
    ),
    (
        "python examples/poisson.py --dimension 5 --seconds 60",
        "--seconds 1",
        "lbfgs",
    ),
    ("python examples/quickstart.py", "", "Preconditioned weights: 26,122"),
    ("python examples/segmentation.py --optimizer kfac adam", TRAIN, "kfac"),
    (
        "python tools/studies/benchmark.py --first-step 3 --models M3 "
        "MobileNetV2",
        "--first-step 1 --models mlp-8x2 --variants sgd kfac-inverse",
        "mlp-8x2  kfac-inverse",
    ),
    (
        "python tools/launch.py 2 -- python examples/classification.py "
        "--optimizer kfac:distribution=dp_kfac",
        "--quick --model cnn",
        "[worker 0] Preconditioned weights",
    ),
    (
        "python tools/studies/plan.py ResNet50 --workers 64 --batch 32 "
        "--bandwidth 100Gbit --latency 5us --flops 14T",
        "",
        "Recommended: KFAC(distribution=",
    ),
    (
        "python tools/same_bits.py write before.npz",
        "--only process/dense/defaults",
        "1 runs",
    ),
)
BENCHMARK = "python tools/studies/benchmark.py"
TARGET = "python tools/studies/time_to_target.py"
# Not run in full, by reason; those of Python scripts end before their work.
NOT_RUN = {
    "makes an environment: installs packages": (
        "bash tools/demo.sh",
        "bash tools/demo.sh --epochs 5",
        "bash tools/demo.sh --workers 2",
        "bash tools/demo.sh --workers 2 --epochs 5",
        "bash tools/docs.sh",
        "bash tools/docs.sh --site-dir /tmp/site",
        "bash tools/matrix.sh",
        "bash tools/test.sh",
        "bash tools/test.sh --all",
        "bash tools/test.sh --clusters",
        "bash tools/test.sh tests/kfac -k clip",
        "bash tools/test.sh tests/kfac -n 0 --pdb",
        "bash tools/test.sh tests/solvers",
        "pip install '.[examples]'",
        "pip install .",
    ),
    "in the tree, by tools/test.sh": ("python -m ruff format .",),
    "in a new environment, by tests/test_release.py": (
        "python -m pytest @tests/quick.txt",
    ),
    "stands for the names in its table": ("python examples/...",),
    "the program and the addresses are the reader's": (
        'TF_CONFIG=\'{"cluster": {"worker": ["host0:12345", "host1:12345"]}, '
        '"task": {"type": "worker", "index": 0}}\' python train.py',
        "python train.py DIRECTORY EPOCHS",
    ),
    "needs a launcher; like it by tests/cluster/test_real_launchers.py": (
        "bash examples/clusters/openmpi.sh DIRECTORY EPOCHS",
        "horovodrun -np 2 python train.py",
        "mpirun -n 2",
        "mpirun -n 2 -genv KERAS_DISTRIBUTION_JOB_ADDRESSES host0:23456 "
        "python ...",
        "python examples/clusters/ray_train.py DIRECTORY EPOCHS",
        "sbatch examples/clusters/slurm.sh DIRECTORY EPOCHS",
        "scancel -s TERM JOB",
        "srun -n 2",
        "srun -n 2 python train.py",
        "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d "
        "--rdzv-endpoint host0:29500 --no-python python train.py DIRECTORY "
        "EPOCHS",
    ),
    "writes into the tree what tests/tools/test_docs.py compares": (
        "python tools/results.py",
        "python tools/results.py --commands",
    ),
    "needs data from elsewhere": (
        "python examples/autoencoder.py --dataset fashion_mnist --data-dir DIR "
        "--optimizer kfac kfac:fisher=empirical",
        "python examples/autoencoder.py --dataset mnist",
        "python examples/classification.py --dataset cifar10 --batch-size 128",
        "python examples/classification.py --model cnn --dataset fashion_mnist "
        "--data-dir /usr/share/datasets/fashion-mnist --optimizer "
        "kfac:damping=0.03 adam --plot fashion.png --log-dir logs",
        "python examples/language.py --dataset tiny_shakespeare",
        f"{TARGET} --problem mlp cnn --search-size small "
        "--data mnist=DIR fashion_mnist=/usr/share/datasets/fashion-mnist",
    ),
    "quick, by tests/tools/test_benchmark.py": (
        BENCHMARK,
        f"{BENCHMARK} --record",
        f"{BENCHMARK} --mode fit --models M1 M3",
        f"{BENCHMARK} --variants sgd kfac-inverse@../old",
        f"{BENCHMARK} --variants sgd kfac-inverse@../old kfac-inverse",
    ),
    "quick, by tests/tools/test_demo.py": ("python tools/demo.py",),
    "row by row, by tests/tools/test_faults.py": (
        "python tools/studies/faults.py",
        "python tools/studies/faults.py kill data",
    ),
    "quick, by tests/tools/test_gpu_check.py": (
        "python tools/gpu_check.py",
        "python tools/gpu_check.py --json gpu.json",
    ),
    "by tests/tools/test_plan.py": ("python tools/studies/plan.py --papers",),
    "downloads; with other tests, by tests/tools/test_keras_tests.py": (
        "python tools/keras_tests.py",
    ),
    "tiny, by tests/tools/test_time_to_target.py": (
        f"{TARGET} --optimizer my.py:make --problem mlp",
        f"{TARGET} --problem mlp --optimizer my.py:make",
        f"{TARGET} --problem mlp cnn --search-size small",
        f"{TARGET} --size tiny",
        f"{TARGET} --size tiny --jobs 2",
    ),
    "experiment by experiment, by tests/examples/test_reproduce.py": (
        "python examples/reproduce.py EXPERIMENT --quick --jobs 2",
        "python examples/reproduce.py distributed-kfac-table-1 --quick --jobs "
        "4",
        "python examples/reproduce.py kaisa-figure-6 --quick --jobs 2",
    ),
    "like another row, with other arguments": (
        "python examples/classification.py --model MobileNetV2 --image-size 32",
        "python examples/plot_spectrum.py --optimizer adam --epochs 5 --every "
        "20",
        "python examples/poisson.py --dimension 5 --seconds 60 --output "
        "poisson.png",
        "python tools/launch.py 2 -- python examples/classification.py --model "
        "cnn",
        "python tools/launch.py 2 -- python examples/segmentation.py",
        "python tools/same_bits.py compare before.npz",
    ),
    "minutes to hours; figures of the results page": (
        f"{BENCHMARK} --first-step 3 --models M1 M3 M4 mlp-64x100 MobileNetV2 "
        "--variants sgd adam kfac-inverse kfac-inverse:step=spectral fosi-adam",
        f"{BENCHMARK} --models M1 M4 --batch 512 --mixes 10,100 --rounds 2 "
        "--variants sgd kfac-inverse kfac-inverse:step=spectral",
        f"{BENCHMARK} --models M1 M4 --rounds 2 --variants sgd "
        "kfac-inverse:max_factor_dim=400 fosi-sgd",
        f"{BENCHMARK} --models M1 M4 M2 --rounds 3 --variants sgd adam muon "
        "kfac-inverse kfac-inverse:step=spectral fosi-adam "
        "kfac-inverse:max_factor_dim=16384:factor_batch_fraction=1.0",
        f"{BENCHMARK} --models M2 --rounds 2 --variants sgd fosi-sgd",
        f"{BENCHMARK} --models M3 --rounds 1 --variants sgd kfac-inverse "
        "kfac-inverse:step=spectral "
        "kfac-inverse:max_factor_dim=16384:factor_batch_fraction=1.0",
        "python examples/classification.py --model cnn --optimizer kfac adam "
        "fosi sgd",
        "python examples/gauss_newton.py --threads 1",
        "python examples/gauss_newton.py digits cost",
        "python examples/gauss_newton.py digits diabetes --threads 1",
        "python examples/gauss_newton.py table --threads 1",
        "python examples/gauss_newton.py table --threads 1 --json "
        "docs/gauss_newton.json",
    ),
}


def commands_of(text: str) -> Iterator[str]:
    """Commands at the beginning of lines, without comments."""
    text = re.sub(r"\s*\\\n\s*", " ", text)
    text = re.sub(r"'[^'\n]*\n[^'\n]*'", lambda m: unwrapped(m[0]), text)
    for line in text.splitlines():
        line = re.sub(r"\s+# .*$", "", line.strip().removeprefix("# "))
        if match := COMMAND.fullmatch(line):
            yield re.sub(r" \[[A-Z-][^\]]*\]", "", match[1] + match[2])


def unwrapped(text: str) -> str:
    """A text in one line."""
    return re.sub(r"\s*\n\s*", " ", text)


def texts() -> Iterator[str]:
    """Places of the documentation where commands stand."""
    for path in DOCUMENTS:
        text = path.read_text()
        yield from (block for _, block in FENCE.findall(text))
        inline = re.findall(r"`([^`]+)`", FENCE.sub("", text))
        yield from map(unwrapped, inline)
    yield "\n".join(results.commands())
    for folder in FOLDERS:
        for path in sorted(folder.glob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            yield text
            yield from re.findall(r"`([^`\n]+)`", text)
        for path in sorted(folder.glob("*.sh")):
            comments = re.findall(r"^#\s+(.*)$", path.read_text(), re.M)
            yield from (line.rpartition(": ")[2] for line in comments)


@pytest.fixture(scope="module")
def documented() -> set[str]:
    """All commands; optional arguments, in brackets, are left out."""
    return {command for text in texts() for command in commands_of(text)}


def test_each_command_is_run_or_listed(documented: set[str]) -> None:
    run = [command for command, *_ in (*QUICK, *SLOW)]
    rows = [*run, *(c for listed in NOT_RUN.values() for c in listed)]
    assert len(rows) == len(set(rows))
    unlisted = sorted(documented - set(rows))
    assert not unlisted, "add these to a table: run them, or say why not"
    gone = sorted(set(rows) - documented)
    assert not gone, "these rows are in no document any more"
    for reason in NOT_RUN:
        for name in re.findall(r"\S+\.py", reason):
            assert (ROOT / name).exists(), reason


# --------------------------------------------------------------- scripts here
PLACEHOLDERS = {
    "/usr/share/datasets/fashion-mnist": "DIR",
    "EPOCHS": "1",
    "EXPERIMENT": "kaisa-figure-6",
}


def words_of(command: str, more: str = "") -> list[str] | None:
    """The script and its arguments; None if it is not of this repository."""
    for name, value in PLACEHOLDERS.items():
        command = re.sub(rf"{name}\b", value, command)
    match = COMMAND.fullmatch(command)
    assert match is not None
    program, script, *words = shlex.split(match[2])
    if program != "python" or not (ROOT / script).is_file():
        return None
    more_words = [*words, *shlex.split(more)]
    # launch.py takes the script of its workers as an argument.
    words = [
        str(ROOT / w) if w.startswith("examples/") else w for w in more_words
    ]
    return [str(ROOT / script), *words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the files are that the commands name."""
    folder = tmp_path_factory.mktemp("commands") / "here"
    for name in ("DIR", "fashion-mnist", "../old"):
        (folder / name).mkdir(parents=True)
    for name in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (folder / "DIR" / f"{name}-{kind}-ubyte").touch()
    (folder / "my.py").write_text("def make(rate, decay): ...\n")
    (folder / "train.py").write_text("print('trained')\n")
    snippet = re.search(r"^```python\n(.*?)^```$", README, re.M | re.S)
    assert snippet is not None
    (folder / "snippet.py").write_text(snippet[1])
    (folder / "before.npz").touch()
    return folder


@pytest.fixture(scope="module")
def done(documented: set[str], folder: pathlib.Path) -> dict[str, Done]:
    """What scripts did: dry runs, `--help`, quick runs, README's snippet."""
    jobs = {
        command: Job(words)
        for command in sorted(documented)
        if "ray_train" not in command and (words := words_of(command))
    }
    assert len(jobs) > 50
    for script in docstrings():
        jobs[f"{script} --help"] = Job([str(script), "--help"])
    for command, more, _ in QUICK:
        jobs[f"{command} in full"] = Job(words_of(command, more) or (), False)
    jobs[SNIPPET] = Job([str(folder / "snippet.py")], False)
    return dict(zip(jobs, run_all([*jobs.values()], folder), strict=True))


def docstrings() -> dict[pathlib.Path, str]:
    """Those of scripts that take arguments."""
    return {
        path: ast.get_docstring(ast.parse(text)) or ""
        for place in FOLDERS[:3]
        for path in sorted(place.glob("*.py"))
        if "__main__" in (text := path.read_text())
        and re.search(r"argparse|arguments\.", text)
    }


def test_no_script_fails(done: dict[str, Done]) -> None:
    """Arguments are taken, modules found, as `python SCRIPT` starts them."""
    failed = [
        f"{command}: exit status {one.code}\n{one.output[-1500:]}"
        for command, one in done.items()
        if one.code
    ]
    assert not failed, "\n\n".join(failed)


def test_help_has_the_lines_of_the_docstring(done: dict[str, Done]) -> None:
    scripts = docstrings()
    assert len(scripts) > 10
    for path, text in scripts.items():
        output = done[f"{path} --help"].output
        assert output.startswith(f"usage: {path.name} "), path
        assert text in output, path


@pytest.mark.parametrize(("command", "more", "says"), QUICK)
def test_quick_run(
    command: str, more: str, says: str, done: dict[str, Done]
) -> None:
    assert says in done[f"{command} in full"].output


def test_first_snippet(done: dict[str, Done]) -> None:
    assert "Preconditioned weights" in done[SNIPPET].output


def test_commands_of_records(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of the trainings are still accepted."""
    monkeypatch.chdir(folder)
    printed = report.commands(Records(TRAININGS))
    commands = [line for line in printed if line.startswith(TARGET)]
    assert len(commands) > 30
    for command in commands:
        words = shlex.split(command.removeprefix(TARGET))
        time_to_target.parse_arguments(words)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "more", "says"), SLOW)
def test_slow_run(
    command: str, more: str, says: str, tmp_path: pathlib.Path
) -> None:
    words = words_of(command, more)
    assert words is not None
    [one] = run_all([Job(words, dry=False)], tmp_path)
    assert one.code == 0 and says in one.output, one.output
    if "runs.json" in more:
        records = json.loads((tmp_path / "runs.json").read_text())
        kfac = records[next(name for name in records if "kfac" in name)]
        assert kfac["losses"][-1] < kfac["losses"][0]
        assert kfac["state_bytes"]["total"] > 0
