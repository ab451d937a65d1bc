"""What the compiler makes of the kernels, read from the assembly; no GPU.

bfloat16 at the shapes of Qwen3-14B and Qwen3-0.6B, tensors below and above 2 GB, for MI300X
(gfx942), MI350 (gfx950) and H100 (sm_90). In a process of its own, see test_kernels_interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the kernels need triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not triton.__version__.startswith("3.9."),
        reason=f"the figures were read with triton 3.9, this is {triton.__version__}",
    ),
]
SCRIPT = Path(__file__).parents[1] / "benchmarks/kernels.py"
ELEMENTWISE = {"rmsnorm_kernel", "rmsnorm_backward_kernel", "rotary_kernel", "store_kv_kernel",
               "sample_kernel"}  # fmt: skip
MATRIX = {"paged_attention_kernel", "token_logprobs_kernel", "token_logprobs_backward_kernel"}
SHARED_BYTES = {"gfx942": 65536, "gfx950": 65536, "sm_90": 232448}  # MI350 has more: not needed
# Loads narrower than 16 bytes: slots, block ids, targets, and one float a row. Never a tensor.
NARROW = {
    "rmsnorm_backward_kernel": {4},  # rstd
    "store_kv_kernel": {8},  # slot
    "paged_attention_kernel": {4},  # block id, lengths
    "sample_kernel": {4, 8},  # temperature, state
    "token_logprobs_kernel": {8},  # target
    "token_logprobs_backward_kernel": {4, 8},  # gradients, entropy and lse of a row; target
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, SCRIPT, "--static", "--json"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def wrong(rows, condition):
    return [row for row in rows if not condition(row)]


def test_every_kernel_compiles_for_every_target_and_pointer_range(rows):
    for arch in SHARED_BYTES:
        of_arch = [r for r in rows if r["arch"] == arch]
        assert {r["kernel"] for r in of_arch} == ELEMENTWISE | MATRIX
        if arch.startswith("gfx"):  # CUDA addresses any size in the same way
            assert {r["kernel"] for r in of_arch if r["big"]} == ELEMENTWISE | MATRIX


def test_nothing_spills(rows):
    assert not wrong(rows, lambda r: r["spills"] == r["scratch"] == 0 < r["registers"])


def test_registers_leave_room_for_a_second_wave(rows):
    limit = lambda r: 128 if r["kernel"] in ELEMENTWISE else 256
    assert not wrong(rows, lambda r: r["registers"] <= limit(r))


def test_shared_memory_can_be_launched(rows):
    assert not wrong(rows, lambda r: r["shared"] <= SHARED_BYTES[r["arch"]])
    assert all(r["shared"] > 0 for r in rows if r["kernel"] in MATRIX)


def test_every_dot_uses_the_matrix_units(rows):
    assert not wrong(rows, lambda r: (r["dots"] > 0) == (r["kernel"] in MATRIX))


def test_tensors_are_loaded_16_bytes_at_a_time(rows):
    narrow = lambda r: set(r["loads"]) - {16}
    assert not wrong(rows, lambda r: 16 in r["loads"])
    assert not wrong(rows, lambda r: narrow(r) <= NARROW.get(r["kernel"], set()))
