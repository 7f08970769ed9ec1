"""How a gloo rank ends its process."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int = 0) -> NoReturn:
    """End this process at once, with everything written; nothing registered for the exit runs.

    torch's functional collectives keep a process group and its gloo threads alive even after
    `destroy_process_group`. A thread that drops its last work while the interpreter is torn down aborts
    the process ("terminate called without an active exception", pytorch/pytorch#179291): rarely, and
    after all is done, but with an exit code that says the rank failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
