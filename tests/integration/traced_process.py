"""A model process that is traced and serves its own /metrics: `python traced_process.py ENDPOINT PORT`."""

from __future__ import annotations

import sys
import time

from prometheus_client import CollectorRegistry, start_http_server

import moetrace


def main(endpoint: str, port: str) -> None:
    """Steps without end; the test ends the process."""
    registry = CollectorRegistry()
    moetrace.init(run_id="traced", endpoint=endpoint, prometheus_registry=registry)
    moe = moetrace.wrap(layer=0, router=lambda tokens: tokens, experts=lambda tokens: tokens)
    start_http_server(int(port), addr="127.0.0.1", registry=registry)
    while True:
        with moetrace.step(forward_mode="prefill"):
            moe.experts(moe.router([1, 2, 3]))
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
