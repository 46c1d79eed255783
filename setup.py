"""Packaging: the package megazero and its console script, nothing else of the checkout."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "megazero/__init__.py").read_text(), re.MULTILINE).group(1)

CONVERT = ["transformers>=4.51"]
DATA = ["tokenizers", "tiktoken", "pyarrow", "zstandard"]
TENSORBOARD = ["tensorboard"]
PEFT = ["peft", "accelerate"]
TRL = ["trl", "datasets"]

setup(
    name="megazero",
    version=VERSION,
    description="Pretraining of GPT models over tensor, pipeline and ZeRO data parallelism",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megazero", "megazero.*"]),
    install_requires=[
        "torch>=2.11",
        "numpy",
        "sentencepiece",
        "einops",
        "wandb",
        "pydantic>=2",
        "safetensors",
        "pyyaml",
        "rich",
    ],
    extras_require={
        "convert": CONVERT,
        "data": DATA,
        "tensorboard": TENSORBOARD,
        "peft": PEFT,
        "huggingface": [*CONVERT, *PEFT, *TRL],
        # megatron-core reads and writes our datasets, as the reference for their format.
        "test": [
            *CONVERT,
            *DATA,
            *TENSORBOARD,
            *PEFT,
            *TRL,
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "setuptools",
            "wheel",
            "megatron-core==0.16.1",
        ],
    },
    entry_points={"console_scripts": ["megazero = megazero.__main__:main"]},
)
