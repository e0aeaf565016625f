"""Who may ask: the token, the names under which the server may be asked, and where a socket may be opened from.

An ASGI middleware in front of everything, the page, its files and both kinds of socket alike. On 127.0.0.1 without a token any
program of this machine may ask, but no web page that a browser has open may: a page elsewhere has another origin, and one
that lets its own name point to 127.0.0.1 has another host name.
"""
from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

_LOCAL = ("localhost", "127.0.0.1", "::1")

# With every answer. Whatever got into the page could ask nobody but this server, and no other site can put the page in a
# frame. NiceGUI's own page has scripts and styles in it, and its Vue makes functions of text.
_HEADERS = [(b"content-security-policy",
             b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
             b"img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'none'; "
             b"form-action 'none'; frame-ancestors 'none'"),
            (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
Scope = dict[str, Any]


class Guard:
    """Lets a request pass or answers it with 403 or 401.

    Args:
        app: The application behind it.
        token: What a browser must know; None for no token. It comes as `?token=…` in the first address, and is kept as a
            cookie.
        port: Of the server. Cookies are not told apart by ports, so its name has the port in it.
        hosts: Names under which the server may be asked besides the local ones, where there is no token.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], *, token: str | None, port: int, hosts: Iterable[str] = ()):
        self.app, self.token = app, token
        self.cookie = f"instrument_token_{port}"
        self.hosts = {*_LOCAL, *hosts}

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        send = _with_headers(send)
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if self.token is None and _hostname(host) not in self.hosts:
            return await _refuse(scope, receive, send, 403, "This host name is not one of the server's.")
        origin = headers.get(b"origin")
        if origin is not None and _netloc(origin) != host:
            return await _refuse(scope, receive, send, 403, "Another site may not ask here.")
        if self.token is None:
            return await self.app(scope, receive, send)
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"))
        given = next((value for name, value in query if name == "token"), None)
        if given is not None and self._is_right(given):
            if scope["type"] == "http" and scope["method"] == "GET":
                # Out of the address bar, where it would be copied with a link.
                rest = [(name, value) for name, value in query if name != "token"]
                where = "/" + quote(scope["path"].lstrip("/")) + ("?" + urlencode(rest) if rest else "")
                # Lax: with Strict, a link in somebody's mail would lead here without the cookie that it has just got.
                return await _answer(send, 303, "", [(b"location", where.encode()), (
                    b"set-cookie", f"{self.cookie}={quote(given)}; Path=/; HttpOnly; SameSite=Lax".encode())])
            return await self.app(scope, receive, send)
        if self._is_right(self._kept(headers)) or self._is_right(headers.get(b"authorization", "").removeprefix("Bearer ")):
            return await self.app(scope, receive, send)
        return await _refuse(scope, receive, send, 401, "This page needs its token: open the address that the server has "
                                                        "printed, which ends with ?token=…")

    def _kept(self, headers: dict[bytes, str]) -> str:
        # One by one: other programs of this host have cookies here too, with which the library gives up on all of them.
        for each in headers.get(b"cookie", "").split(";"):
            name, _, value = each.strip().partition("=")
            if name == self.cookie:
                return unquote(value)
        return ""

    def _is_right(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _with_headers(send: Any) -> Any:
    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
        await send(message)

    return sending


async def _refuse(scope: Scope, receive: Any, send: Any, status: int, text: str) -> None:
    if scope["type"] == "websocket":
        await receive()  # the request to connect, before which nothing may be sent
        await send({"type": "websocket.close", "code": 1008, "reason": text})
    else:
        await _answer(send, status, text, [])


async def _answer(send: Any, status: int, text: str, headers: list[tuple[bytes, bytes]]) -> None:
    body = text.encode()
    await send({"type": "http.response.start", "status": status,
                "headers": [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()),
                            (b"cache-control", b"no-store"), *headers]})
    await send({"type": "http.response.body", "body": body})
