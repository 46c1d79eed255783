"""What `pip install .` brings: the package megazero and its console script, nothing else of the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **kwargs):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that the checkout stays as it is, at a path with a space."""
    source = tmp_path_factory.mktemp("a checkout")
    for room in ("megazero", "data", "pretrain", "tools"):
        shutil.copytree(
            ROOT / room,
            source / room,
            ignore=lambda folder, names: [n for n in names if n in ("austen", "__pycache__")],
        )
    (source / "tests").mkdir()
    shutil.copy(__file__, source / "tests")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", source, source)
    (path,) = source.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def test_only_megazero_is_in_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"megazero"}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "megazero").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == ours
    assert any(name.endswith("LICENSE") for name in names)


def test_requirements_and_console_script(wheel):
    archive = zipfile.ZipFile(wheel)

    def read(name):
        return archive.read(next(n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))).decode()

    assert read("entry_points.txt").split() == "[console_scripts] megazero = megazero.__main__:main".split()
    lines = read("METADATA").splitlines()
    assert "Requires-Python: >=3.10" in lines
    required = {line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")}
    always = {line for line in required if "extra ==" not in line}
    assert always == {
        "torch>=2.11",
        "numpy",
        "sentencepiece",
        "einops",
        "wandb",
        "pydantic>=2",
        "safetensors",
        "pyyaml",
        "rich",
    }


def test_it_imports_where_nothing_else_is_installed(installed, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); import megazero; print(megazero.__file__)"
    where = run(sys.executable, "-I", "-S", "-c", code, cwd=tmp_path)
    assert where.strip() == str(installed / "megazero/__init__.py")


def test_the_public_names_and_the_script_work(installed, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    code = (
        "import megazero; print(*[getattr(megazero, name).__module__ for name in megazero.__all__ if name[0] != '_'])"
    )
    homes = run(sys.executable, "-c", code, cwd=tmp_path, env=environment).split()
    assert homes and all(home.startswith("megazero.") for home in homes)
    assert "launch" in run(sys.executable, installed / "bin/megazero", "--help", cwd=tmp_path, env=environment)


def test_importing_megazero_is_light(tmp_path):
    code = "import sys, megazero; print(*sys.modules)"
    modules = run(sys.executable, "-c", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}).split()
    assert not {"torch", "numpy", "pydantic", "wandb", "transformers"} & set(modules)


def test_constraints_pin_what_is_required():
    pinned = dict(
        line.split(";")[0].split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert pinned["torch"] == "2.13.0"
    assert {"numpy", "sentencepiece", "einops", "wandb", "pydantic", "safetensors", "pyyaml", "rich"} <= pinned.keys()
