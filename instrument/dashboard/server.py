"""`serve`: the server of the live view. A process of its own, which reads run directories and writes nothing.

Owns the port, and how the parts are put together.
"""
from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from urllib.parse import quote

from fastapi import FastAPI

from instrument.dashboard.discovery import Directories
from instrument.dashboard.guard import Guard
from instrument.dashboard.sockets import Sockets

PORT = 8765
_PORTS = 100  # that many more are tried


def serve(paths: Sequence[str | os.PathLike[str]], *, host: str = "127.0.0.1", port: int = PORT, token: str | None = None,
          announce: Callable[[str], None] = print) -> None:
    """Serve the live view until the process is interrupted.

    Args:
        paths: Run directories, or directories of them. Nothing else can be read through the server.
        host: Address to listen at. Others than this machine's own need a token.
        port: The first port to try; where it is in use, the next free one is taken. 0 takes any.
        token: What a browser must know, as `?token=…` in its first address.
        announce: Gets lines for people, such as the address to open.

    Raises:
        ValueError: `host` is open to other machines and there is no token, or a token is too short.
        OSError: No port is free, or the host is none of this machine's.
    """
    run, _ = prepare(paths, host=host, port=port, token=token, announce=announce)
    run()


def check(host: str, token: str | None) -> None:
    """Raise the ValueError of `serve`."""
    if token is not None and len(token) < 8:
        raise ValueError("the token must have at least 8 characters, since others may guess. One that nobody guesses: "
                         "python -c 'import secrets; print(secrets.token_urlsafe(16))'")
    if token is None and not _is_local(host):
        raise ValueError(f"the host {host!r} is open to other machines, so a token is needed: --token followed by a secret of "
                         "8 characters or more. Or leave the host out, and reach this machine by ssh -L 8765:127.0.0.1:8765.")


def prepare(paths: Sequence[str | os.PathLike[str]], *, host: str = "127.0.0.1", port: int = PORT, token: str | None = None,
            announce: Callable[[str], None] = print) -> tuple[Callable[[], None], str]:
    """Take the port and make the application.

    Returns:
        What serves until it is interrupted, and the address to open.

    Raises:
        ValueError, OSError: As `serve`.
    """
    check(host, token)
    import uvicorn
    from nicegui import ui

    from instrument.dashboard import page

    taken = bind(host, port)
    actual = taken.getsockname()[1]
    directories = Directories(paths)
    live = Sockets(directories)
    application = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=live.lifespan)
    application.add_api_websocket_route("/live", live.serve)
    page.build(live.follower, live.desks)
    ui.run_with(application, title="instrument", language="en-US", dark=None, reconnect_timeout=10, message_history_length=100,
                tailwind=False, binding_refresh_interval=1.0, show_welcome_message=False, favicon=page.STATIC / "icon.svg")
    guarded = Guard(application, token=token, port=actual, hosts=[host])
    config = uvicorn.Config(guarded, log_level="warning", access_log=False, ws_max_size=1 << 20, ws_per_message_deflate=False,
                            timeout_graceful_shutdown=2, server_header=False, lifespan="on")
    shown = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host
    address = f"http://{shown}:{actual}/" + (f"?token={quote(token)}" if token else "")
    if port not in (0, actual):
        announce(f"Port {port} is in use, so this is port {actual}.")
    found = len(live.follower.found)
    announce(f"{found} run{'' if found == 1 else 's'} in {', '.join(map(str, directories.roots))}. Open {address}")
    for root in directories.roots:
        if not root.exists():
            announce(f"{root} does not exist yet; it is shown as soon as it does.")
    server = uvicorn.Server(config)

    def run() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[taken])

    return run, address


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at the first free port from this one on.

    Raises:
        OSError: None is free, or the host is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + _PORTS, 65536)) if port else [0]:
        taken = socket.socket(family, socket.SOCK_STREAM)
        # A port in TIME_WAIT is free; one on which another process listens is not, also with this.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((host, candidate))
            taken.listen(128)
            return taken
        except OSError as error:
            taken.close()
            if error.errno not in (98, 48, 13, 10048, 10013):  # in use, or not allowed: the next one may be
                raise OSError(f"cannot listen at host {host!r}: {error}") from error
    raise OSError(f"no free port from {port} to {port + _PORTS - 1} at {host!r}. Give another one by --port.")


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
