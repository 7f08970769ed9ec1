"""What tracing costs a step: off, on with a good collector, and on with a collector that is away.

One small OLMoE on one thread runs forward steps; blocks of steps under each condition are interleaved
in random order, round by round, so that a machine that changes speed changes it for all. Per round a
condition is compared with "off" of the same round; the median of those ratios is quoted with a
bootstrap interval of 95 %.

Conditions: off (nothing wrapped); every step traced, to a server that answers at once; slow (answers after a
second); refused (nobody listens); blackholed (accepts, never answers). What fewer recorded steps cost says
benchmarks/tool_cost.py.

    python benchmarks/step_cost.py [--rounds 20] [--steps 30] [--write]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import statistics
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import transformers
from results import write_section

import moetrace

SLOW_S = 1.0


class Accept(BaseHTTPRequestHandler):
    """Answers every request with an empty success."""

    protocol_version = "HTTP/1.1"  # connections stay open, as at the collector

    def do_POST(self) -> None:  # noqa: D102
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:  # noqa: D102
        return None


class AcceptLate(Accept):
    """The same, after a while."""

    def do_POST(self) -> None:  # noqa: D102
        time.sleep(SLOW_S)
        super().do_POST()


def serve(port: Any, handler: type[Accept]) -> None:
    """A server that takes everything; tells its port through a queue."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    port.put(server.server_port)
    server.serve_forever()


def good_server(handler: type[Accept] = Accept) -> str:
    """Address of such a server in a process of its own, as a collector is."""
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    context.Process(target=serve, args=(port, handler), daemon=True).start()
    return f"http://127.0.0.1:{port.get()}"


def blackhole() -> tuple[str, socket.socket]:
    """Address of a socket that accepts connections and never answers."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    return f"http://127.0.0.1:{listener.getsockname()[1]}", listener


def make_model(layers: int, experts: int, hidden: int) -> Any:
    torch.manual_seed(0)
    config = transformers.OlmoeConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=experts,
        num_experts_per_tok=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.OlmoeForCausalLM(config).eval()


def run_block(model: Any, tokens: torch.Tensor, steps: int) -> float:
    """Median ms per step."""
    times = []
    for _ in range(steps):
        start = time.perf_counter_ns()
        with moetrace.step():
            model(input_ids=tokens, use_cache=False)
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e6


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="write the section of benchmarks/RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = make_model(options.layers, 32, 128)
    tokens = torch.randint(2, 2048, (4, 96))
    hole, listener = blackhole()
    conditions = {
        "off": None,
        "on, 1/1": (good_server(), "1/1"),
        "slow, 1/1": (good_server(AcceptLate), "1/1"),
        "refused, 1/1": ("http://127.0.0.1:9", "1/1"),
        "blackholed, 1/1": (hole, "1/1"),
    }
    times: dict[str, list[float]] = {name: [] for name in conditions}
    dropped: dict[str, int] = dict.fromkeys(conditions, 0)
    generator = random.Random(1)
    with torch.no_grad():
        run_block(model, tokens, options.steps)
        for _ in range(options.rounds):
            names = list(conditions)
            generator.shuffle(names)
            for name in names:
                tracer = None
                if (condition := conditions[name]) is not None:
                    endpoint, sample = condition
                    tracer = moetrace.init(
                        run_id="cost",
                        endpoint=endpoint,
                        sample=sample,
                        queue_steps=16,
                        forward_mode="prefill",
                    )
                    moetrace.instrument(model)
                times[name].append(run_block(model, tokens, options.steps))
                if tracer is not None:
                    moetrace.shutdown(timeout_s=0.2)
                    dropped[name] += sum(tracer.metrics.dropped.values())
    listener.close()
    lines = [
        f"`python benchmarks/step_cost.py --rounds {options.rounds} --steps {options.steps}`: forward step "
        f"of a {options.layers}-layer OLMoE (32 experts, top 4, 384 tokens), one thread, "
        f"median step off {statistics.median(times['off']):.1f} ms",
        "",
        "| condition | step time / off of the same round (median) | 95 % interval | sampled steps dropped |",
        "|---|---|---|---|",
    ]
    for name, values in times.items():
        if name == "off":
            continue
        ratios = [value / base for value, base in zip(values, times["off"], strict=True)]
        low, high = interval(ratios)
        middle = statistics.median(ratios)
        lines.append(f"| {name} | {middle:.4f} | {low:.4f} to {high:.4f} | {dropped[name]} |")
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_section("step_cost", "What tracing costs a step", text)


if __name__ == "__main__":
    main()
