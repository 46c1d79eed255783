"""Every command in README.md and docs/ is right: flags parse, files exist, and the worked example runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from megazero.config import load_config
from tests.forked_scripts import help_of, run_forked
from tools.layout_runs import parse_run

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Its commands start scripts that the page itself prints; a test of its own writes them out and runs them.
OWN_TEST = ("change-the-model.md",)
BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
OWN_FLAGS = {"tools/benchmark.py": ("--warmup", "--measure", "--profile", "--memory-limit")}
OWN_SWITCHES = ("--beside-plain-loop",)
SEVERAL_RUNS = {"tools/benchmark_layouts.py": "tools/benchmark.py", "tools/compare_layouts.py": "pretrain/gpt.py"}


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


def commands(block: str) -> list[list[str]]:
    """The words of each command of a block, continued lines joined, comments dropped."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


ALL = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)[:70]}")
    for page in PAGES
    if page.name not in OWN_TEST
    for block in blocks(page)
    for words in commands(block)
]


def check_runs(script: str, arguments: list[str]) -> None:
    """Each of ``--runs`` with the other settings."""
    start = arguments.index("--runs") + 1
    end = next((i for i in range(start, len(arguments)) if arguments[i].startswith("--")), len(arguments))
    for run in arguments[start:end]:
        processes, flags = parse_run(run)
        check_script(SEVERAL_RUNS[script], [*arguments[: start - 1], *arguments[end:], *flags], processes)


def check_script(script: str, arguments: list[str], processes: int) -> None:
    assert (ROOT / script).is_file(), script
    if script in SEVERAL_RUNS:
        check_runs(script, arguments)
        return
    if script == "pretrain/gpt.py" or script in OWN_FLAGS:
        settings = [word for word in arguments if script not in OWN_FLAGS or word not in OWN_SWITCHES]
        for flag in OWN_FLAGS.get(script, ()):
            if flag in settings:
                at = settings.index(flag)
                assert settings[at + 1].isdigit()
                del settings[at : at + 2]
        settings = [str(ROOT / word) if word.startswith("examples/") else word for word in settings]
        if "--help" not in settings:
            load_config(settings, world_size=processes, needs_data=False)
        return
    # A first word in lower case and without a dot or slash is a subcommand: files have one, values follow flags.
    subcommand = arguments[:1] if arguments and re.fullmatch("[a-z][a-z-]*", arguments[0]) else []
    for flag in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        # A flag with a dot is a setting of training, which some tools pass on.
        shown = help_of("pretrain/gpt.py") if "." in flag else help_of(script, *subcommand)
        assert re.search(rf"{flag}\b", shown), f"{script} has no {flag}"


def check_launch(words: list[str]) -> None:
    processes = int(words[words.index("--nproc") + 1]) if "--nproc" in words else 1
    at = next(index for index, word in enumerate(words) if word.endswith(".py"))
    check_script(words[at], words[at + 1 :], processes)


def check_pip(words: list[str]) -> None:
    for word in words:
        if word.endswith(".txt"):
            assert (ROOT / word).is_file(), word
        if extra := re.fullmatch(r"\.\[(\w+)\]", word):
            assert f'"{extra[1]}":' in (ROOT / "setup.py").read_text(), word


@pytest.mark.parametrize("words", ALL)
def test_command_is_known_and_right(words: list[str]):
    known = (ROOT / "examples" / "recipe.sh").read_text() + (ROOT / "examples" / "sweep_layouts.sh").read_text()
    while "=" in words[0] and not words[0].startswith("-"):
        name = words[0].partition("=")[0]
        assert name in (*re.findall(r"[A-Z_]+", known), "CUDA_VISIBLE_DEVICES", "PYTHON"), f"no script reads {name}"
        words = words[1:]
    program = Path(words[0]).name
    if program == "bash":
        assert (ROOT / words[1]).is_file(), words[1]
    elif words[:2] == ["megazero", "launch"] or words[1:4] == ["-m", "megazero", "launch"]:
        check_launch(words)
    elif words[1:3] == ["-m", "torch.distributed.run"] or program == "torchrun":
        check_launch([word.replace("--nproc-per-node", "--nproc") for word in words])
    elif "pip" in words[:3]:
        check_pip(words)
    elif words[1:3] == ["-m", "venv"]:
        pass
    elif program.startswith("python"):
        check_script(words[1], words[2:], processes=1)
    else:
        pytest.fail(f"no test knows {words[0]}")


def test_readme_names_both_commands_and_links_exist():
    text = (ROOT / "README.md").read_text()
    assert "```bash\nbash examples/quickstart.sh\nbash tests/run.sh\n```" in text
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_files_of_the_quickstart_are_those_it_makes():
    """The pages go on with them; each is named in the scripts that make it."""
    scripts = "".join((ROOT / "examples" / name).read_text() for name in ("quickstart.sh", "recipe.sh"))
    for page in PAGES:
        for name in re.findall(r"\bruns/quickstart/([\w.-]+)", page.read_text()):
            assert re.search(rf'(?:\$OUT|\$1)/{re.escape(name)}"', scripts), f"{page.name}: runs/quickstart/{name}"


def test_metrics_of_the_worked_example_are_reported_from_where_it_writes_them():
    written = {words[words.index("--log.jsonl") + 1] for words in _words("README.md") if "--log.jsonl" in words}
    reported = {words[2] for page in PAGES for words in _words(page.name) if words[1:2] == ["tools/report.py"]}
    assert written and reported <= written


def _words(name: str) -> list[list[str]]:
    page = next(page for page in PAGES if page.name == name)
    return [words for block in blocks(page) for words in commands(block)]


def test_worked_example_runs(tmp_path: Path):
    """As it stands, but for fewer and smaller steps, in a folder that is not the checkout."""
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## A worked example") : text.index("Settings may stand in a")]
    shutil.copytree(ROOT / "data" / "austen", tmp_path / "data" / "austen")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    output = []
    for words in (words for block in BLOCK.findall(section) for words in commands(block)):
        shorter = {
            **dict.fromkeys(("--train.steps", "--train.eval_interval"), lambda n: n // 50),
            "--optimizer.warmup_steps": lambda n: 2,
            "--data.seq_length": lambda n: n // 4,
        }
        for flag, shorten in shorter.items():
            if flag in words:
                at = words.index(flag) + 1
                words[at] = str(shorten(int(words[at])))
        words += ["--train.eval_steps", "1"] if "pretrain/gpt.py" in words else []
        words = [str(ROOT / word) if word.endswith(".py") else word for word in words]
        done = run_forked(*words[1:], directory=tmp_path, environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        output.append(done.stdout)
    assert "step 4/4" in output[1] and "validation loss" in output[1]
    assert "resumed step 4" in output[2] and "step 6/6" in output[2]
    assert (tmp_path / "runs" / "first-hf" / "config.json").is_file()
