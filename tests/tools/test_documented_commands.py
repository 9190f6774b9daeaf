"""Commands of the documentation: arguments are accepted, and many are run.

Commands are in Markdown files, in docstrings of scripts and in comments of
shell scripts. Those of Python scripts of this repository are started up to the
end of their argument parser; scripts of other commands must exist.
"""

import ast
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

import benchmark
import results
import time_to_target
from targets import report
from targets.study import TRAININGS, Records
from tests.support.programs import ROOT, Program

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
# Scripts with many commands, which are parsed in this process.
PARSERS = {
    f"python tools/studies/{module.__name__}.py": module.parse_arguments
    for module in (benchmark, time_to_target)
}
CLASSIFY = "python examples/classification.py"
# Run in full: the start of the command in a document, further arguments that
# make it short, a part of its output.
RUNS = (
    ("python examples/autoencoder.py --optimizer kfac adam",
     "--optimizer kfac_empirical --epochs 1", "val_error"),
    (f"{CLASSIFY} --optimizer kfac adam", "--epochs 1 --optimizer fosi sgd",
     "val_accuracy"),
    ("python examples/clusters/train.py", "", "worker 0 of 1: loss"),
    ("python examples/datasets.py", "--epochs 1 --directory built",
     "val_accuracy"),
    ("python examples/detection.py --optimizer kfac adam", "--epochs 1",
     "val_masks_iou"),
    ("python examples/gauss_newton.py", "--seconds 20", "5 steps, error"),
    ("python examples/curvature.py", "", "AUC of the self-influence"),
    ("python examples/language.py --optimizer kfac adam",
     "--examples 200 --optimizer kfac", "val_accuracy"),
    ("python examples/masked_language.py --optimizer kfac adam",
     "--examples 200 --optimizer kfac", "val_accuracy"),
    ("python examples/plot_spectrum.py", "--epochs 1", "Plot: spectrum.png"),
    ("python examples/poisson.py", "--dimension 2 --steps 9", "9 steps"),
    ("python examples/quickstart.py", "", "Preconditioned weights: 26,122"),
    ("python examples/reproduce.py kaisa-figure-6 --quick", "", "Written"),
    ("python examples/sobolev.py", "", "slopes: error"),
    ("python examples/segmentation.py --optimizer kfac adam",
     "--examples 200 --epochs 1 --optimizer kfac", "val_iou"),
    (f"python tools/launch.py 2 -- {CLASSIFY} --epochs 5",
     "--epochs 1 --optimizer kfac", "[worker 0] 23/23"),
    ("python tools/demo.py", "", "squared error of an image"),
    ("python tools/gpu_check.py --json gpu.json", "--only FOSI",
     "FOSI                 passed: loss"),
    ("python tools/studies/benchmark.py --variants sgd",
     "--models mlp-8x2 --mixes 1,2 --rounds 1 --batch 8 --json rows.json "
     "--variants adam kfac-inverse:damping=0.1 fosi-adam",
     "mlp-8x2 kfac-inverse:damping=0.1"),
    ("python tools/studies/large_batches.py --problem arm",
     "--optimizer kfac --steps 3", "after 3 steps"),
    ("python tools/studies/time_to_target.py --size tiny",
     "--problem regression --seeds 0 1 --method adam kfac:rest=adam "
     "--rates 0.01 --json study.json", "## Tiny problems"),
    ("python tools/studies/compiled_step.py m1", "--optimizer muon",
     "instructions, 0 cholesky("),
    ("python tools/studies/published.py engd", "--seeds 3 --cpu-seconds 0",
     "poisson"),
    ("python tools/studies/stages.py --optimizer", "--rounds 1 --rows 8",
     "inverses"),
)  # fmt: skip


def commands_of(text: str) -> Iterator[str]:
    """Yield commands at the start of lines, without comments."""
    text = re.sub(r"\s*\\\n\s*", " ", text)
    text = re.sub(r"'[^'\n]*\n[^'\n]*'", lambda m: unwrapped(m[0]), text)
    for line in text.splitlines():
        line = re.sub(r"\s+# .*$", "", line.strip().removeprefix("# "))
        if match := COMMAND.fullmatch(line):
            yield re.sub(r" \[[A-Z-][^\]]*\]", "", match[1] + match[2])


def unwrapped(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text)


def texts() -> Iterator[str]:
    """Yield the texts that contain commands."""
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
    """All commands, without optional arguments in brackets."""
    return {command for text in texts() for command in commands_of(text)}


def words_of(command: str, more: str = "") -> list[str] | None:
    """Return script and arguments; None if it is not of this repository."""
    for name, value in (
        ("/usr/share/datasets/fashion-mnist", "DIR"),
        ("EPOCHS", "1"),
        ("EXPERIMENT", "kaisa-figure-6"),
    ):
        command = re.sub(rf"{name}\b", value, command)
    match = COMMAND.fullmatch(command)
    assert match is not None
    program, script, *words = shlex.split(match[2])
    if program != "python" or not (ROOT / script).is_file():
        return None
    # launch.py takes the script of its workers as an argument.
    return [
        str(ROOT / word) if word.startswith("examples/") else word
        for word in (str(ROOT / script), *words, *shlex.split(more))
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("commands") / "here"
    for name in ("DIR", "fashion-mnist", "../old"):
        (folder / name).mkdir(parents=True)
    (folder / "tools").symlink_to(ROOT / "tools")
    (folder / "train.py").write_text("print('trained')\n")
    program = r"\[start:program\] -->\n```python\n(.*?)^```$"
    snippet = re.search(program, README, re.M | re.S)
    assert snippet is not None
    (folder / "snippet.py").write_text(snippet[1])
    return folder


class Done(NamedTuple):
    """The exit code of a script, and what it printed."""

    code: int
    output: str


def run(
    words: Sequence[str],
    folder: pathlib.Path,
    dry: Sequence[Sequence[str]] | None = None,
) -> Done:
    """Run a script in a folder; `dry`: see `Program`."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "MPLBACKEND": "agg",
    }
    with Program(
        [sys.executable, *words],
        environment=environment,
        folder=folder,
        dry=dry,
    ) as program:
        return Done(program.end(), program.text())


@pytest.fixture(scope="module")
def done(documented: set[str], folder: pathlib.Path) -> dict[str, Done]:
    """Run each script up to the end of its parser, some in full.

    A script parses the arguments of all its commands.
    """
    scripts: dict[str, dict[str, list[str]]] = {}
    for command in sorted(documented):
        if "ray_train" in command or command.startswith((*PARSERS,)):
            continue
        if words := words_of(command):
            # launch.py divides its arguments by itself.
            key = command if "launch.py" in words[0] else words[0]
            scripts.setdefault(key, {})[command] = words
    assert len(scripts) > 25
    results = {}
    for (command, words), *others in map(dict.items, scripts.values()):
        name = "\n".join([command, *(other for other, _ in others)])
        results[name] = run(words, folder, [w[1:] for _, w in others])
    for script in docstrings().keys() - {*map(pathlib.Path, scripts)}:
        command = f"python {script.relative_to(ROOT)} --help"
        results[command] = run([str(script), "--help"], folder, [])
    for command in (
        "python examples/reproduce.py --list",
        "python tools/launch.py 2 -- python train.py",
    ):
        results[command] = run(words_of(command) or (), folder)
    snippet = [str(folder / "snippet.py")]
    return results | {"snippet": run(snippet, folder)}


def docstrings() -> dict[pathlib.Path, str]:
    """Return the docstrings of scripts with arguments."""
    return {
        path: ast.get_docstring(ast.parse(text)) or ""
        for place in FOLDERS[:3]
        for path in sorted(place.glob("*.py"))
        if "__main__" in (text := path.read_text())
        and re.search(r"argparse|make_parser", text)
    }


def test_scripts_exist(documented: set[str]) -> None:
    pattern = r"\b(?:tools|examples)/[\w/]+\.(?:py|sh)\b"
    named = {s for text in documented for s in re.findall(pattern, text)}
    assert len(named) > 25
    assert not [script for script in named if not (ROOT / script).exists()]


def test_no_script_fails(done: dict[str, Done]) -> None:
    """Arguments are accepted, modules found, as `python SCRIPT` does."""
    failed = [
        f"{command}: exit status {job.code}\n{job.output[-1500:]}"
        for command, job in done.items()
        if job.code
    ]
    assert not failed, "\n\n".join(failed)


def test_help_has_the_lines_of_the_docstring(done: dict[str, Done]) -> None:
    for path, text in docstrings().items():
        start = f"python {path.relative_to(ROOT)}"
        outputs = [j.output for name, j in done.items() if start in name]
        usage = f"usage: {path.name} "
        assert any(
            output.startswith(usage) and text in output for output in outputs
        ), path


def test_short_runs(done: dict[str, Done]) -> None:
    launch = "python tools/launch.py 2 -- python train.py"
    assert "[worker 1] trained" in done[launch].output
    listed = done["python examples/reproduce.py --list"].output
    assert "kaisa-figure-6" in listed
    assert "Preconditioned weights" in done["snippet"].output


def test_commands_of_benchmarks_and_records(
    documented: set[str], folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of the recorded trainings are still accepted, too."""
    monkeypatch.chdir(folder)
    commands = {*documented, *report.commands(Records(TRAININGS))}
    for script, parse in PARSERS.items():
        script_commands = [c for c in commands if c.startswith(script)]
        assert len(script_commands) > 5
        for command in script_commands:
            words = words_of(command)
            assert words is not None
            parse(words[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("start", "more", "says"), RUNS)
def test_run(
    start: str,
    more: str,
    says: str,
    documented: set[str],
    tmp_path: pathlib.Path,
) -> None:
    command = next(c for c in sorted(documented) if c.startswith(start))
    words = words_of(command, more)
    assert words is not None
    job = run(words, tmp_path)
    assert job.code == 0 and says in job.output, job.output
