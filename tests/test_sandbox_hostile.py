"""The hostile suite as this user, and (slow) as others: see sandbox_hostile.py."""

import os
import subprocess
import sys

import pytest
import sandbox_hostile as hostile

from sandbox import LINUX, Sandbox

pytestmark = pytest.mark.skipif(not LINUX, reason="the layers are Linux's")


@pytest.fixture(scope="module")
def stage():
    """(pool with its layers, pool without, what there is to attack)"""
    with hostile.outside_world() as world, Sandbox(**hostile.SETTINGS) as box:
        with Sandbox(preload=(), off=hostile.ALL_OFF, workers=1) as bare:
            yield box, bare, world


@pytest.mark.parametrize("case", hostile.CASES, ids=lambda c: f"{c.layer}: {c.name}")
def test_is_refused_and_would_succeed_without_the_layer(stage, case):
    box, bare, world = stage
    on, reason = box.layers()[case.layer]
    if not on:
        pytest.skip(f"no {case.layer} on this host: {reason}")
    assert hostile.complaint(box, case, world) == ""
    assert hostile.control_complaint(bare, case, world) == ""


@pytest.mark.slow
@pytest.mark.parametrize("who", ["nobody", "container", "view"])
def test_all_is_refused_as(who):
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    command = [sys.executable, hostile.__file__, who]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
