"""One rank of test_placement_ranks: a real MoE model over gloo that announces two placements.

python placement_worker.py RANK WORLD_SIZE RENDEZVOUS ENDPOINT STEPS
"""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta

FIRST, SECOND = 3, 7
"""Placement versions."""


def main() -> None:
    """Half of the steps under one version, half under the other."""
    rank, world_size, steps = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[5])
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed as distributed

    import moetrace
    from moetrace.demo.models import VOCABULARY, build
    from moetrace.demo.plan import MODELS
    from moetrace.demo.text import Batches

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[3]}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=2),
    )
    spec = MODELS["mixtral"]
    model = build(spec, world_size)
    moetrace.init(
        run_id="real-ranks",
        rank=rank,
        world_size=world_size,
        endpoint=sys.argv[4],
        warmup_steps=2,
        forward_mode="prefill",
    )
    moetrace.instrument(model, strict=True)
    experts = torch.arange(spec.num_experts).repeat(len(spec.layers), 1)
    moetrace.placement(FIRST, experts, proposed_by="test-balancer", expert_bytes=1000)
    batches = Batches(rank, VOCABULARY, batch=2, length=32)
    with torch.no_grad():
        for step in range(steps):
            if step == steps // 2:
                # Experts 0 and 4 change ranks on paper; the model itself stays as it is.
                moved = experts.clone()
                moved[:, [0, 4]] = experts[:, [4, 0]]
                moetrace.placement(
                    SECOND, moved, proposed_by="test-balancer", expert_bytes=1000, window=(0, step - 1)
                )
            with moetrace.step(step):
                batch = batches.at(step)
                model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    assert moetrace.shutdown(timeout_s=30)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
