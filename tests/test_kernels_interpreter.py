"""The Triton kernels against their definitions, in Triton's interpreter (no GPU) or on a GPU.

Each mode of kernels_cases.py runs in a process of its own: TRITON_INTERPRET must be set before
triton is imported, and turns compilation off.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")
CASES = Path(__file__).with_name("kernels_cases.py")


def run_cases(mode, **environment):
    seed = random.randrange(10**6)  # a fresh one each run; shown when it fails
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, CASES, mode, str(seed)], env=env, capture_output=True, text=True
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, f"kernels_cases.py {mode} {seed}: {done.stdout}{done.stderr}"
    return done.stdout


def test_every_kernel_equals_its_definition():
    assert "all passed" in run_cases("quick", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_every_kernel_equals_its_definition_on_many_shapes():
    assert "all passed" in run_cases("full", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_every_mutant_of_every_kernel_is_caught():
    out = run_cases("mutants", TRITON_INTERPRET="1")
    assert "mutants caught" in out


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_every_kernel_equals_its_definition_on_a_gpu():
    assert "all passed" in run_cases("full", TRITON_INTERPRET="0")
