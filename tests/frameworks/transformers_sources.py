"""Classes in the sources of the installed transformers that look like a part of a mixture of experts.

Looked for in every modeling file, whatever its family's configuration says, and by more names than the
library goes by: a block that no family's models show would be left out in silence otherwise.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import transformers

MODELS = Path(transformers.__file__).parent / "models"
_CLASS = re.compile(r"^class (\w+)\b.*?(?=^(?:class|def|@)|\Z)", re.MULTILINE | re.DOTALL)
_HOLDS = re.compile(
    r"self\.\w*experts? *= *(?!config\b|int\b|\w*num_|None\b|\d)\w+[.(]"
    r"|self\.\w*(?:router|routing)\w* *= *(?:nn\.(?!Dropout|Parameter)|[A-Z])"
    r"|self\.gate *= *(?:nn\.(?!Parameter)|[A-Z])"
    r"|ParallelExperts\("
)
"""An attribute that is a module of experts, a router or a gate."""
_CALLED = re.compile(r"(?:Experts?|Router|Gate|MoE|Moe|MOE|SparseMLP|SparseMoeBlock|MoeBlock|MoeMLP|MoEMLP)$")
"""What such classes are called."""


@functools.cache
def suspects() -> dict[str, str]:
    """Family by class that holds experts or a router, or is called so; models themselves left out."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        if path.parent.name == "deprecated":
            continue
        for match in _CLASS.finditer(path.read_text(encoding="utf-8")):
            name = match[1]
            if _HOLDS.search(match[0]) or _CALLED.search(name):
                found[name] = path.parent.name
    return found
