"""What to simulate: the shape of a run, its noise, its clocks and its injected faults.

Beside simulate.py, which makes the steps. Everything is validated on construction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moetrace_collectors.model import FloatArray
from moetrace_schemas.enums import Cause, ForwardMode, Phase

PHASE_NS: dict[Phase, float] = {
    Phase.OUTSIDE: 400_000.0,
    Phase.ROUTER: 40_000.0,
    Phase.PERMUTE: 60_000.0,
    Phase.UNPERMUTE: 50_000.0,
}
"""Local work per layer that does not depend on rows, ns."""

DEVICE_PHASES = (Phase.ROUTER, Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE)
"""Where a slow device can be injected."""

LAUNCH_NS = 8_000.0
"""Host time before each exchange (rows of phase dispatch and combine without flag BARRIER)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What no one injected: spread of work, and a scheduler that takes cores away."""

    spread: float = 0.02
    """Log-normal sigma of every interval of local work."""
    hiccups_per_step: float = 0.0
    """Expected number of scheduling hiccups of each rank per step."""
    hiccup_ns: float = 0.0
    """Mean length of a hiccup (exponential); it hits an interval in proportion to its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """How wrong the ranks' unix clocks are. Durations are exact: monotonic clocks drift far less."""

    offset_ns: float = 0.0
    """Standard deviation of a rank's constant offset."""
    drift_ppm: float = 0.0
    """Standard deviation of a rank's drift, parts per million."""
    jitter_ns: float = 0.0
    """Standard deviation of each reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One known fault.

    `extension` is what it adds to a calm step (max - mean over ranks), as a part of the calm step; over all
    layers, or in one. The delay of the rank itself is that times R / (R - 1): the rank is part of the mean.
    """

    cause: Cause
    rank: int
    extension: float
    phase: Phase = Phase.EXPERT_GEMM
    """For `device`: any local phase. The other causes have their own phase, see `named_phase`."""
    layer: int | None = None
    first_step: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        """Refuse what no step can show.

        Raises:
            ValueError: an extension outside (0, 10], a cause that is none, or a phase that a device has not.
        """
        if not 0.0 < self.extension <= 10.0:
            raise ValueError(f"injection extension {self.extension:g}: above 0 and at most 10 calm steps")
        if self.cause is Cause.UNKNOWN:
            raise ValueError(
                "injection cause unknown: one of device, outside, host, routing, placement, link"
            )
        if self.cause is Cause.DEVICE and self.phase not in DEVICE_PHASES:
            raise ValueError(f"injection phase {self.phase}: a device is slow in {', '.join(DEVICE_PHASES)}")
        if self.first_step < 0 or self.every < 1:
            raise ValueError("injection: the first step is 0 or later, and every is 1 or more")

    def hits(self, step: int) -> bool:
        """Whether the fault is active in a step."""
        return step >= self.first_step and (step - self.first_step) % self.every == 0

    @property
    def named_phase(self) -> Phase:
        """The phase that a right verdict names."""
        if self.cause in (Cause.ROUTING, Cause.PLACEMENT):
            return Phase.EXPERT_GEMM
        if self.cause is Cause.OUTSIDE:
            return Phase.OUTSIDE
        if self.cause in (Cause.HOST, Cause.LINK) and self.phase is not Phase.COMBINE:
            return Phase.DISPATCH
        return self.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A run to simulate; validated on construction.

    Raises:
        ValueError: experts do not divide by ranks, or an injection's rank or layer does not exist.
    """

    seed: int = 0
    run_id: str = "simulated"
    num_ranks: int = 8
    ranks_per_node: int = 8
    ep_size: int | None = None
    """Ranks per expert-parallel group; None = all ranks in one group."""
    num_layers: int = 8
    num_experts: int = 64
    top_k: int = 2
    num_tokens: int = 4096
    """Tokens per rank and step."""
    num_steps: int = 64
    warmup_steps: int = 0
    forward_mode: ForwardMode = ForwardMode.TRAIN
    row_bytes: int = 4096
    load_sigma: float = 0.1
    """Log-normal sigma of expert popularity, drawn anew for every layer and step."""
    popularity: FloatArray | None = None
    """[steps, layers, experts] replayed loads instead of drawn ones; step s uses entry s mod steps."""
    gemm_ns_per_row: float = 60.0
    bytes_per_ns: float = 150.0
    """Exchange speed inside a node."""
    node_bytes_per_ns: float = 25.0
    """Exchange speed between nodes."""
    latency_ns: float = 15_000.0
    noise: Noise = field(default_factory=Noise)
    clocks: Clocks = field(default_factory=Clocks)
    missing_chance: float = 0.0
    """Chance that a rank's step never arrives."""
    late_chance: float = 0.0
    """Chance that a rank's step comes `late_steps` steps after its own (see simulate.arrivals)."""
    late_steps: int = 4
    injections: tuple[Injection, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        if not 0.0 <= self.load_sigma <= 5.0:
            raise ValueError(f"load_sigma {self.load_sigma:g}: 0 to 5 expected")
        if not 0.0 <= self.missing_chance < 1.0:
            raise ValueError(f"missing chance {self.missing_chance:g}: 0 or more and below 1 expected")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed}: 0 or more expected")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k}: at most the {self.num_experts} experts")
        group = self.group_size
        if self.num_ranks % group or self.num_experts % group:
            raise ValueError(
                f"ep_size {group} must divide num_ranks {self.num_ranks} and num_experts {self.num_experts}"
            )
        for injection in self.injections:
            if not 0 <= injection.rank < self.num_ranks:
                raise ValueError(f"injection rank {injection.rank}: ranks are 0 to {self.num_ranks - 1}")
            if injection.layer is not None and not 0 <= injection.layer < self.num_layers:
                raise ValueError(f"injection layer {injection.layer}: layers are 0 to {self.num_layers - 1}")

    @property
    def group_size(self) -> int:
        """Ranks per expert-parallel group."""
        return self.ep_size or self.num_ranks

    @property
    def mean_rows(self) -> float:
        """Rows that a rank's experts receive per layer on average."""
        return float(self.num_tokens * self.top_k)

    @property
    def calm_step_ns(self) -> float:
        """Expected length of a step of even loads without noise or fault."""
        moved = self.mean_rows * self.row_bytes
        exchange = self.latency_ns + moved / self._mean_speed()
        local = sum(PHASE_NS.values()) + 2 * LAUNCH_NS + self.gemm_ns_per_row * self.mean_rows
        return self.num_layers * (local + 2 * exchange)

    def _mean_speed(self) -> float:
        near = min(self.ranks_per_node, self.group_size) / self.group_size
        return 1.0 / (near / self.bytes_per_ns + (1.0 - near) / self.node_bytes_per_ns)
