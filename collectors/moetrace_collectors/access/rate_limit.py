"""How many requests one client may make: a token bucket per client address. Pure but for its lock."""

from __future__ import annotations

import ipaddress
import threading
from collections import OrderedDict
from collections.abc import Callable

MAX_CLIENTS = 10_000
"""Buckets kept; beyond it the one unused longest is forgotten, and begins full when it comes again."""
NS_PER_S = 1e9
_IPV6_PREFIX_BITS = 64


class RateLimiter:
    """A bucket per client: `burst` requests at once, `per_second` for good."""

    def __init__(
        self, *, per_second: float, burst: int, clock_ns: Callable[[], int], max_clients: int = MAX_CLIENTS
    ) -> None:
        """Make it; `per_second` 0 lets everything pass."""
        self._per_ns = per_second / NS_PER_S
        self._burst = float(burst)
        self._clock_ns = clock_ns
        self._max_clients = max_clients
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def wait_s(self, client: str) -> float:
        """Take one request of a client: 0 where it may pass, else seconds until one would."""
        if self._per_ns <= 0:
            return 0.0
        key = client_key(client)
        now = self._clock_ns()
        with self._lock:
            level, before = self._buckets.pop(key, (self._burst, now))
            level = min(self._burst, level + (now - before) * self._per_ns)
            allowed = level >= 1.0
            self._buckets[key] = (level - 1.0 if allowed else level, now)
            if len(self._buckets) > self._max_clients:
                self._buckets.popitem(last=False)
        return 0.0 if allowed else (1.0 - level) / self._per_ns / NS_PER_S


def client_key(client: str) -> str:
    """What one client is: an IPv4 address, or an IPv6 network of 64 bits, within which addresses are free."""
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, _IPV6_PREFIX_BITS), strict=False))
    return str(address)
