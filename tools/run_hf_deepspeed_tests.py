"""transformers' and accelerate's own DeepSpeed tests against megazero: what passes, is skipped, and fails, and why.

    python tools/run_hf_deepspeed_tests.py DIR [PYTEST ARGS…]

DIR: a checkout of huggingface/transformers (tests/trainer/distributed) or huggingface/accelerate (tests/deepspeed), of
the release that is installed; the tests need `parameterized`. What they take from the Hub is made here
(hub_stand_in.py). Without a GPU, tests of one process run on the CPU, and those of several on two processes there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/trainer/distributed/test_trainer_distributed_deepspeed.py", "tests/deepspeed")
PROCESSES = 2
"""Without a GPU, where a test asks for as many as there are."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="DIR", type=Path, help="a checkout of transformers or accelerate")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="pytest's")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    found = [str(folder / test) for test in TESTS if (folder / test).exists()]
    if not found:
        print(f"{folder} holds neither {' nor '.join(TESTS)}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))
    from tools import hub_stand_in

    with tempfile.TemporaryDirectory() as hub:
        hub_stand_in.fill(Path(hub))
        environment = os.environ | hub_stand_in.environment(Path(hub)) | {"RUN_SLOW": "1"}
        places = [str(ROOT), str(folder), str(folder / "src"), hub, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(places)
        # The tests start `accelerate` and `torchrun` by those names.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        ours = ("-p", "tools.run_hf_deepspeed_tests", "-p", "no:cacheprovider")
        pytest = [*ours, "-q", "-rA", "--tb=line", "--show-capture=no", "--rootdir", str(folder)]
        command = [sys.executable, "-m", "megazero.integrations.deepspeed", "-m", "pytest", *pytest]
        # transformers' tests name files of the checkout, accelerate's a data set of the Hub.
        place = folder if (folder / TESTS[0]).exists() else hub
        return subprocess.run([*command, *found, *asked.arguments], cwd=place, env=environment).returncode


# From here on: the plugin, in pytest's process.


def pytest_configure(config: Any) -> None:
    """Before a test module is imported."""
    import torch

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # each test says for itself whether there are processes
        os.environ.pop(name, None)
    if not torch.cuda.is_available():
        _run_without_gpu()


def _run_without_gpu() -> None:
    """Tests that ask for GPUs run without."""
    import accelerate.test_utils.testing as accelerates
    import transformers.testing_utils as transformers_own
    import transformers.training_args

    def as_it_is(test: Any) -> Any:
        return test

    transformers_own.require_torch_accelerator = as_it_is
    transformers_own.require_torch_multi_accelerator = as_it_is
    transformers_own.backend_device_count = lambda device: PROCESSES
    transformers_own.execute_subprocess_async = _on_the_cpu(transformers_own.execute_subprocess_async)
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # it asks for a GPU, and the CPU has bfloat16
    for kind in ("cuda", "non_cpu", "cuda_or_hpu", "cuda_or_xpu"):
        setattr(accelerates, f"require_{kind}", as_it_is)


def _on_the_cpu(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Scripts of the Trainer that a test starts are told to stay on the CPU."""

    def executed(command: list[str], *args: Any, **kwargs: Any) -> Any:
        return execute([*command, "--use_cpu"], *args, **kwargs)

    return executed


if __name__ == "__main__":
    sys.exit(main())
