"""Every script runs from any directory, whatever lies there."""

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from tests.forked_scripts import help_of, run_forked

ROOT = Path(__file__).resolve().parents[2]


def scripts():
    for room in ("data", "tools", "pretrain"):
        for path in sorted((ROOT / room).glob("*.py")):
            if '__name__ == "__main__"' in path.read_text():
                yield path


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A user's directory with folders named like our rooms and like a module that every script needs."""
    folder = tmp_path_factory.mktemp("a user's folder")
    for name in ("data", "tools", "pretrain", "megazero"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('the user\\'s own')\n")
    return folder


def test_there_are_scripts():
    names = {str(path.relative_to(ROOT)) for path in scripts()}
    assert {"pretrain/gpt.py", "data/preprocess.py", "data/train_tokenizer.py", "tools/convert_checkpoint.py"} <= names


@pytest.mark.parametrize("script", list(scripts()), ids=lambda path: str(path.relative_to(ROOT)))
def test_help_from_another_directory(script, elsewhere):
    assert "usage" in help_of(script, directory=elsewhere).lower()
    assert not list(elsewhere.glob("*.*")), "--help left something behind"


LAUNCH, PLAN = ["-m", "megazero", "launch"], ["tools/plan_layout.py", "--model", "llama3-8b", "--gpus", "8"]


@pytest.mark.parametrize(
    "words, said",
    [
        ([*LAUNCH, "--nprocs", "2", "a.py"], "unrecognized arguments: --nprocs; for --nprocs, did you mean --nproc?"),
        ([*LAUNCH, "--procs=2", "--log-dir=x", "a.py", "--ssg"], "did you mean --nproc?; for --log-dir, did you mean"),
        (
            ["data/preprocess.py", "--tokeniser", "byte", "--input", "a", "--output", "b"],
            "are required: --tokenizer; for --tokeniser, did you mean --tokenizer?",
        ),
        (["tools/convert_checkpoint.py", "export", "--form", "a", "--to", "b"], "for --form, did you mean --from?"),
        (["tools/generate.py", "--checkpont", "a", "--tokenizer", "byte"], "did you mean --checkpoint?"),
        ([*PLAN, "--gpu", "h200", "--seqlength", "8"], "--seqlength: unknown flag; did you mean --seq-length?"),
        ([*PLAN, "--gpu", "h200", "--lr", "8"], "--lr: unknown flag; did you mean --optimizer.lr?"),
        ([*PLAN, "--model.num_layers", "8"], "are required: --gpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_misspelt_flag_is_told_the_nearest(words, said):
    words = words if words[0] == "-m" else [ROOT / words[0], *words[1:]]
    done = run_forked(*words, directory=ROOT)
    assert done.returncode == 2 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert said in last and last.endswith(said if said.endswith("--gpu") else "?")


def test_all_flags_are_parsed_by_what_tells_the_nearest():
    """But for a script that has none."""
    bare = {"megazero/errors.py", "tools/run_hf_deepspeed_tests.py"}
    files = [path for room in ("data", "tools", "pretrain", "megazero") for path in (ROOT / room).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT))
        for path in files
        if re.search(r"ArgumentParser\)?\(|ArgumentParser\):", path.read_text())
    }
    assert found <= bare


def test_no_file_is_named_like_a_module():
    """A script's own folder comes first on sys.path: a file called inspect.py there breaks `import torch`."""
    taken = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()} - {"megazero"}
    files = [path for room in ("data", "tools", "pretrain", "tests") for path in (ROOT / room).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in files if path.stem in taken and path.stem != "__init__"] == []


# Room → the rooms, or modules of one, that it may import besides itself.
ALLOWED = {
    "megazero": (),
    "data": ("megazero.errors",),
    "pretrain": ("megazero", "data"),
    "tools": ("megazero", "data"),
}


def imports(path):
    """(module, line, whether it is imported when the file is) of each import statement."""
    tree = ast.parse(path.read_text())
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield names, node.lineno, id(node) not in lazy
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield [alias.name], node.lineno, id(node) not in lazy


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_downwards(room):
    wrong = []
    for path in (ROOT / room).rglob("*.py"):
        for names, line, _ in imports(path):
            top = names[0].split(".")[0]
            if top in (*ALLOWED, "tests", "examples") and top != room:
                if not any(
                    name == allowed or name.startswith(f"{allowed}.") for name in names for allowed in ALLOWED[room]
                ):
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {names[0]}")
    assert wrong == []


def test_models_know_no_infrastructure():
    wrong = []
    for path in (ROOT / "megazero/models").glob("*.py"):
        for names, line, _ in imports(path):
            ours = names[0].startswith("megazero.") and not names[0].startswith(("megazero.models", "megazero.errors"))
            if ours or "torch.distributed" in names[0] or "torch.distributed" in names:
                wrong.append(f"{path.name}:{line}: {names[0]}")
    assert wrong == []


def test_heavy_packages_are_imported_only_when_used():
    heavy = {"wandb", "transformers", "peft", "tensorboard", "pyarrow", "tokenizers", "tiktoken", "zstandard"}
    wrong = []
    for room in ALLOWED:
        for path in (ROOT / room).rglob("*.py"):
            for names, line, at_import in imports(path):
                if path == ROOT / "megazero" / "integrations" / "transformers.py":
                    continue  # it is a Trainer
                if at_import and (names[0].split(".")[0] in heavy or "torch.utils.tensorboard" in names):
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {names[0]}")
    assert wrong == []
