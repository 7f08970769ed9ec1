"""All-to-alls inside compiled graphs: told apart from the work around them, with no graph break."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from compiled_models import needs_marks

PROGRAM = """
import os, sys
import torch, torch.distributed as dist, torch.distributed._functional_collectives as functional
import moetrace
from moetrace.testing import MemoryEmitter

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)


def by_functional(rows):
    return functional.all_to_all_single(rows, [4], [4], dist.group.WORLD)


def by_buffer(rows):
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    return received


for exchange in (by_functional, by_buffer):
    torch._dynamo.reset()
    run = torch.compile(lambda rows: exchange(rows * 2) + 1, backend="aot_eager", fullgraph=True)
    plain = run(torch.ones(4, 2))
    emitter = MemoryEmitter()
    tracer = moetrace.init(run_id="compiled", endpoint="", emitters=[emitter])
    dispatch = tracer.wrap(dispatch=exchange, layer=0).dispatch
    torch._dynamo.reset()
    run = torch.compile(lambda rows: dispatch(rows * 2) + 1, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), tracer.step():
        traced = run(torch.ones(4, 2))
    (step,) = emitter.wait_for(1)
    moetrace.shutdown()
    rows = [f"{row.phase}:{row.flags}" for row in step.phases if row.layer == 0 and row.phase == "dispatch"]
    print(torch.equal(plain, traced), tracer.guard.errors, *rows, flush=True)
os._exit(0)
"""


@needs_marks
def test_an_exchange_in_a_compiled_phase_is_its_barrier(tmp_path: Path) -> None:
    """Functional and in-place collectives: local work, barrier, local work, and the same result."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "rendezvous")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["True {} dispatch:0 dispatch:1 dispatch:0"] * 2
