"""Families of transformers 4: found, run and counted. Prints one JSON object per family.

Counts are checked against what the router returned: its ids, or the best k of its logits.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from frameworks import transformers_models as models
from frameworks.checks import Truth, check, compile_layers, sequence, trace
from moetrace.adapters.base import LayerMatch
from moetrace.adapters.routes import top_k_of
from moetrace.adapters.transformers import TransformersAdapter
from moetrace.adapters.transformers_v4 import TransformersV4Adapter
from moetrace.instrument.torch_state import graphs_compiled
from moetrace_schemas.enums import Direction

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


models.OVERRIDES.update(
    {
        "jamba": {**models.OVERRIDES["jamba"], "use_mamba_kernels": False},
        "qwen3_vl_moe": {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        # Its parts are built with their own sizes, which makes ten thousand experts.
        "qwen3_omni_moe": {
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
            "num_experts": 4,
        },
    }
)
# A part's configuration is made from a dictionary that names it only.
models.ADDED["aria"] = {"moe_num_experts": {"model_type": "aria_text"}}
_tiny_config = models.tiny_config


def tiny_config(model_class: Any, family: str) -> Any:
    """DBRX's configuration does not take back the values that it gives."""
    if family != "dbrx":
        return _tiny_config(model_class, family)
    return transformers.DbrxConfig(
        d_model=32,
        n_heads=4,
        n_layers=models.LAYERS,
        max_seq_len=64,
        vocab_size=128,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    )


models.tiny_config = tiny_config


def matches(model: Any) -> list[LayerMatch]:
    """Layers, as both adapters find them."""
    found = [a.match(model) for a in (TransformersAdapter(), TransformersV4Adapter())]
    return [layer for match in found for layer in match.layers]


def listed(model: Any) -> list[str]:
    """Experts that are modules in a list, or by name: most families of this release have them so."""
    kinds = (torch.nn.ModuleList, torch.nn.ModuleDict)
    return [
        path
        for path, module in model.named_modules()
        if path.rpartition(".")[2] == "experts" and isinstance(module, kinds) and len(module) > 1
    ]


def covered(family: str) -> dict[str, Any]:
    """Layers per model class, classes that do not build, and blocks that were missed or taken for one."""
    layers: dict[str, int] = {}
    failed: dict[str, str] = {}
    missing, invented = [], []
    for model_class in models.model_classes(family):
        try:
            model = models.build(model_class, family)
        except Exception as error:  # noqa: BLE001 - reported, and judged by the test
            failed[model_class.__name__] = f"{type(error).__name__}: {error}"[:200]
            continue
        found = matches(model)
        paths = {layer.path for layer in found}
        parents = {path.rpartition(".")[0] for path in [*models.expert_modules(model), *listed(model)]}
        blocks = {path: type(model.get_submodule(path)).__name__ for path in parents}
        missing += [f"{name}" for path, name in blocks.items() if path not in paths]
        invented += [f"{model_class.__name__}: {path}" for path in sorted(paths - blocks.keys())]
        layers[model_class.__name__] = len(found)
    return {"layers": layers, "missing": sorted(set(missing)), "invented": invented, "failed": failed}


def watch_router(model: Any, layer: LayerMatch, truth: Truth) -> Any:
    """Count what the router returned; returns the hook that does."""
    block = model.get_submodule(layer.path)
    router = next(getattr(block, name) for name in ("gate", "router") if hasattr(block, name))
    top_k = top_k_of(block, router, model.config.get_text_config())

    def look(module: Any, args: Any, result: Any) -> None:
        items = result if isinstance(result, tuple) else (result,)
        sizes = next((item for item in items if isinstance(item, list)), None)
        whole = next((t for t in items if isinstance(t, torch.Tensor) and _is_matrix_of_integers(t)), None)
        wide = [t for t in items if isinstance(t, torch.Tensor) and t.shape[-1] == layer.num_experts]
        if sizes is not None:
            truth.add(layer.layer, torch.tensor(sizes))
        elif whole is not None and whole.shape[-1] == layer.num_experts:
            # One-hot; second choices show in dense weights only.
            dense = next((t for t in wide if t.is_floating_point() and t.dim() == 2), whole)
            truth.add(layer.layer, (dense != 0).reshape(-1, layer.num_experts).sum(0))
        elif whole is not None:
            truth.add_ids(layer.layer, whole, layer.num_experts)
        else:
            scores = wide[-1].reshape(-1, layer.num_experts)
            if hasattr(block, "moe_statics"):
                scores = block.moe_statics(scores.float().softmax(-1))
            truth.add_ids(layer.layer, scores.topk(top_k).indices, layer.num_experts)

    return router.register_forward_hook(look)


def _is_matrix_of_integers(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.dim() > 1


def ran(family: str, *, compiled: bool = False) -> dict[str, Any]:
    """One step traced and not, of the first model class that takes text; with gradients where compiled."""
    classes = list(models.model_classes(family))
    model_class = next(
        c
        for e in ("ForCausalLM", "TextModel", "ForConditionalGeneration")
        for c in classes
        if c.__name__.endswith(e)
    )
    model = models.filled(model_class(models.tiny_config(model_class, family)).eval())
    generator = torch.Generator().manual_seed(1)
    inputs = {"input_ids": torch.randint(2, 100, (2, 7), generator=generator)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(2, 100, (2, 5), generator=generator)

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(**inputs, use_cache=False)[0].clone()]

    def train() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(**inputs, use_cache=False)[0]
        out.float().pow(2).mean().backward()
        return [out.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    truth = Truth()
    hooks = [watch_router(model, layer, truth) for layer in matches(model)]
    if compiled:
        compile_layers([model], truth, train, hooks)
    traced = trace(model, train if compiled else run, truth=None if compiled else truth)
    layer = traced.report.layers[0].layer
    order = sequence(traced.records[0], layer)
    check(traced, truth, order)
    if not compiled:
        return {"order": order}
    return {
        "order": order,
        "backward": sequence(traced.records[0], layer, Direction.BACKWARD),
        "graph_breaks": traced.graph_breaks,
        "graphs": graphs_compiled(),
    }


def main() -> None:
    """One line per family: of all, or `compiled` and the names of some."""
    compiled = sys.argv[1:2] == ["compiled"]
    for family in sys.argv[2:] if compiled else models.families():
        line: dict[str, Any] = {"family": family, "version": transformers.__version__}
        if not compiled:
            line.update(covered(family))
        try:
            line.update(ran(family, compiled=compiled))
        except Exception as error:  # noqa: BLE001 - reported, and judged by the test
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
