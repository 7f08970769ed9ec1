"""The gate in front of every route: Host, origin, rate, token and scope; every refusal counted."""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from moetrace_collectors.access.control import AccessControl, token_of
from moetrace_collectors.access.gate import AccessGate
from moetrace_collectors.access.posture import check_posture, is_loopback
from moetrace_collectors.access.rate_limit import RateLimiter, client_key
from moetrace_collectors.access.scopes import Scope
from moetrace_collectors.access.tokens import TokenBook
from moetrace_collectors.errors import UsageError
from moetrace_schemas.enums import RefuseReason

INGEST, READ, ADMIN = "i" * 32, "r" * 32, "a" * 32
NS_PER_S = 10**9


@dataclass
class Clock:
    """Told what time it is."""

    now_ns: int = 0

    def __call__(self) -> int:
        """The time."""
        return self.now_ns


@dataclass
class Door:
    """A gate in front of an application that remembers what came through."""

    per_second: float = 0.0
    burst: int = 1
    with_tokens: bool = True
    loopback_only: bool = True
    clock: Clock = field(default_factory=Clock)
    refused: Counter[RefuseReason] = field(default_factory=Counter)
    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        async def page(request: Request) -> PlainTextResponse:
            self.seen.append(request.url.path)
            return PlainTextResponse("in")

        book = TokenBook(
            file=None, environment=f"ranks ingest {INGEST};people read {READ};boss admin {ADMIN}"
        )
        paths = ("/", "/v1/traces", "/healthz", "/new", "/-/reload")
        gate = AccessGate(
            Starlette(routes=[Route(path, page, methods=["GET", "POST"]) for path in paths]),
            control=AccessControl(
                tokens=book if self.with_tokens else None,
                limiter=RateLimiter(per_second=self.per_second, burst=self.burst, clock_ns=self.clock),
                on_refused=lambda reason: self.refused.update([reason]),
            ),
            scopes={"/healthz": None, "/v1/traces": Scope.INGEST, "/-/reload": Scope.ADMIN},
            loopback_only=self.loopback_only,
        )
        self.client = TestClient(gate, base_url="http://127.0.0.1:4318", follow_redirects=False)

    def status(self, path: str, token: str = "", **headers: str) -> int:
        """Status of a GET."""
        shown = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            shown["authorization"] = f"Bearer {token}"
        return self.client.get(path, headers=shown).status_code


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [
        ("/healthz", "", 200),
        ("/", "", 401),
        ("/new", "", 401),
        ("/nowhere", "", 401),
        ("/v1/traces", "", 401),
        ("/new", "x" * 32, 401),
        ("/new", INGEST, 403),
        ("/v1/traces", READ, 403),
        ("/-/reload", READ, 403),
        ("/v1/traces", INGEST, 200),
        ("/new", READ, 200),
        ("/nowhere", READ, 404),
        ("/-/reload", ADMIN, 200),
        ("/new", ADMIN, 200),
        ("/healthz/", "", 401),
        ("//healthz", "", 401),
        ("/%68ealthz", "", 200),
        ("/new?x=/healthz", "", 401),
    ],
)
def test_a_token_opens_its_scope_and_nothing_else(path: str, token: str, status: int) -> None:
    """401 without a right token, 403 with another scope's; nothing of it reaches a route."""
    door = Door()
    assert door.status(path, token) == status
    assert (door.seen != []) == (status == 200)
    assert sum(door.refused.values()) == (status in (401, 403))


def test_a_refusal_is_one_line_that_helps_and_holds_no_token() -> None:
    """What is needed, and a challenge that makes a browser ask; never what was sent."""
    door = Door()
    answer = door.client.get("/", headers={"authorization": "Bearer wrongwrongwrongwrongwrong"})
    assert (answer.status_code, answer.text) == (401, "this token is not known here\n")
    assert answer.headers["www-authenticate"].startswith("Basic realm=")
    answer = door.client.get("/", headers={"authorization": f"Bearer {INGEST}"})
    assert answer.text == "token ranks has scope ingest, read is needed here\n"
    assert "www-authenticate" not in answer.headers
    assert door.refused == {RefuseReason.UNKNOWN_TOKEN: 1, RefuseReason.MISSING_SCOPE: 1}


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {READ}"},
        {"authorization": f"bearer  {READ} "},
        {"authorization": "Basic " + base64.b64encode(f"anyone:{READ}".encode()).decode()},
        {"authorization": "Basic " + base64.b64encode(f"{READ}:".encode()).decode()},
        {"x-clickhouse-key": READ, "x-clickhouse-user": "default"},
    ],
)
def test_a_token_can_be_shown_as_clients_can(headers: dict[str, str]) -> None:
    """Bearer, a browser's or driver's password, or ClickHouse's own header."""
    assert Door().client.get("/new", headers=headers).status_code == 200


def test_a_token_in_the_address_is_not_read() -> None:
    """Addresses end up in logs and histories."""
    assert Door().status(f"/new?token={READ}&password={READ}&user={READ}") == 401


@given(header=st.text(max_size=60))
def test_any_header_shows_a_token_or_none(header: str) -> None:
    """Whatever stands in the header, reading it raises nothing."""
    assert token_of(header) is None or isinstance(token_of(header), str)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
    ],
)
def test_a_page_of_another_site_cannot_use_a_browsers_token(headers: dict[str, str], status: int) -> None:
    """A link is followed; images, frames and scripts of other sites are refused, also without tokens."""
    for with_tokens in (True, False):
        door = Door(with_tokens=with_tokens)
        assert (
            door.client.get("/", headers={"authorization": f"Bearer {READ}", **headers}).status_code == status
        )
        assert door.refused[RefuseReason.CROSS_SITE] == (status == 403)


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://127.0.0.1:4318", 200), ("https://evil.example", 403), ("null", 403), ("http://[", 403)],
)
def test_an_old_browsers_post_is_told_by_its_origin(origin: str, status: int) -> None:
    """Without fetch metadata a foreign Origin of a POST is refused."""
    headers = {"authorization": f"Bearer {READ}", "origin": origin}
    assert Door().client.post("/", headers=headers).status_code == status


def test_a_foreign_host_is_refused_on_loopback_only() -> None:
    """A name that was pointed at this machine is refused where only this machine may ask."""
    door = Door(with_tokens=False)
    assert door.status("/healthz", host="attacker.example:4318") == 421
    assert door.refused == {RefuseReason.FOREIGN_HOST: 1}
    for host in ("localhost:4318", "[::1]:4318", "127.0.0.2"):
        assert door.status("/healthz", host=host) == 200
    assert Door(with_tokens=False, loopback_only=False).status("/healthz", host="collector:4318") == 200


def test_every_answer_says_that_data_is_data() -> None:
    """Refused or not, a browser neither guesses a type nor frames the page."""
    door = Door()
    for path in ("/healthz", "/new"):
        headers = door.client.get(path).headers
        assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")


def test_a_client_that_asks_too_often_waits() -> None:
    """Beyond the burst 429 with Retry-After, counted; later it may ask again; health is never limited."""
    door = Door(per_second=0.5, burst=2)
    assert [door.status("/new", READ) for _ in range(3)] == [200, 200, 429]
    answer = door.client.get("/new", headers={"authorization": f"Bearer {READ}"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert door.status("/healthz") == 200
    door.clock.now_ns += 2 * NS_PER_S
    assert door.status("/new", READ) == 200
    assert door.refused == {RefuseReason.RATE_LIMITED: 2}


def test_guesses_of_tokens_are_limited_too() -> None:
    """Rate comes before the comparison."""
    door = Door(per_second=1.0, burst=3)
    assert [door.status("/new", f"{number:032d}") for number in range(5)] == [401, 401, 401, 429, 429]


def test_clients_do_not_share_a_bucket_and_buckets_are_bounded() -> None:
    """Each address its own rate, an IPv6 network one, and a bound on how many are remembered."""
    limiter = RateLimiter(per_second=1.0, burst=1, clock_ns=lambda: 0, max_clients=3)
    assert [limiter.wait_s(f"10.0.0.{number}") for number in range(5)] == [0.0] * 5
    assert limiter.wait_s("10.0.0.4") == pytest.approx(1.0)
    assert limiter.wait_s("10.0.0.0") == 0.0  # forgotten
    assert client_key("2001:db8::1") == client_key("2001:db8::ffff") != client_key("2001:db8:0:1::1")
    assert client_key("::ffff:10.0.0.1") == "10.0.0.1"
    assert client_key("testclient") == "testclient"


@given(st.lists(st.integers(0, 5 * NS_PER_S), max_size=60), st.floats(0.1, 100), st.integers(1, 20))
def test_no_client_gets_more_than_burst_and_rate(pauses_ns: list[int], rate: float, burst: int) -> None:
    """However requests are spaced, what passes is at most burst + rate x time."""
    clock = Clock()
    limiter = RateLimiter(per_second=rate, burst=burst, clock_ns=clock)
    passed = 0
    for pause_ns in pauses_ns:
        clock.now_ns += pause_ns
        passed += limiter.wait_s("client") == 0.0
    assert passed <= burst + rate * clock.now_ns / NS_PER_S + 1e-6


@pytest.mark.parametrize(
    ("given_", "adds"),
    [
        ({}, "add tls_certificate and tls_key, and token_file (or tls_client_ca);"),
        ({"tokens": True}, "add tls_certificate and tls_key;"),
        ({"tls": True}, "add token_file (or tls_client_ca);"),
    ],
)
def test_listening_in_the_open_is_refused_with_what_to_add(given_: dict[str, bool], adds: str) -> None:
    """Beyond loopback without TLS or a proof of who asks: one line that names what is missing."""
    rest = {"tls": False, "client_ca": False, "tokens": False, "insecure": False, **given_}
    with pytest.raises(UsageError) as error:
        check_posture(host="10.1.2.3", **rest)
    assert adds in str(error.value)
    assert str(error.value).endswith("add --insecure on a network you trust")
    check_posture(host="10.1.2.3", **{**rest, "insecure": True})
    check_posture(host="127.0.0.1", **rest)


@pytest.mark.parametrize("proof", ["tokens", "client_ca"])
def test_tls_with_tokens_or_client_certificates_may_listen(proof: str) -> None:
    """Either proof of who asks is enough beside TLS."""
    rest = {"client_ca": False, "tokens": False, "insecure": False, proof: True}
    check_posture(host="0.0.0.0", tls=True, **rest)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "collector.example", "", "127.0.0.1.example"])
def test_other_spellings_are_not_loopback(host: str) -> None:
    """Whatever is not clearly this machine alone counts as reachable."""
    assert not is_loopback(host)
