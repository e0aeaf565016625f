"""`Sockets`: the socket of each browser, and when something is sent over it.

There is one message on the way to a browser at most: the next one is made when the browser has said that it has the last one,
and who says nothing for long is let go. Nothing waits for a browser but its own task, and nothing is queued for it.
"""
from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from typing import Any

import orjson
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from instrument.dashboard.curves import of_axis
from instrument.dashboard.desk import Desk
from instrument.dashboard.discovery import Directories
from instrument.dashboard.follow import Follower
from instrument.dashboard.session import Session, moved
from instrument.dashboard.view import View

# Seconds between two messages to one browser; more where there are many.
_PAUSE = 0.25
# "Stalled since" and "time left" change by themselves.
_TICK = 1.0
# A message that is not taken off the network in so many seconds: the browser sleeps, or its network is gone.
_SEND = 20.0
# A page in the background may say nothing for long, which costs next to nothing; then it is let go, and comes back by itself.
_IDLE = 600.0
_log = logging.getLogger(__name__)
_LARGEST = 1 << 16  # bytes that a browser says at once


class Sockets:
    """The sockets of all browsers, and the follower of the runs that they show.

    Args:
        directories: Where runs are looked for.

    Attributes:
        desks: The views of open pages, by the names that their sockets give.
    """

    def __init__(self, directories: Directories):
        self.follower = Follower(directories, self._changed)
        self.desks: weakref.WeakValueDictionary[str, Desk] = weakref.WeakValueDictionary()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[asyncio.Event] = set()
        self._cost = 0.0  # seconds of the processor that a message takes, on average

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> Any:
        self._loop = asyncio.get_running_loop()
        self.follower.start()
        yield
        for event in self._open:
            event.set()
        await asyncio.to_thread(self.follower.close)

    def _changed(self) -> None:
        """Called from the threads that read."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for event in self._open:
            event.set()

    async def serve(self, websocket: WebSocket) -> None:
        await websocket.accept()
        new, got = asyncio.Event(), asyncio.Event()
        try:
            first = await asyncio.wait_for(_receive(websocket), _SEND)
            desk = self.desks.get(str(first.get("desk")))
            if desk is None:  # the server was started anew: the page will load itself again, and until then shows what it did
                desk = Desk(View.of_query(str(first.get("address") or "")))
            session = Session(self.follower, desk.view)

            def listen() -> None:
                session.view = desk.view
                new.set()

            desk.listeners.append(listen)
            self._open.add(new)
            new.set()
            writer = asyncio.create_task(self._write(websocket, session, new, got))
            try:
                await self._read(websocket, session, desk, new, got, writer)
            finally:
                self._open.discard(new)
                desk.listeners.remove(listen)
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
        except (WebSocketDisconnect, asyncio.TimeoutError, ValueError, RuntimeError):
            with contextlib.suppress(Exception):
                await websocket.close(1008)

    async def _read(self, websocket: WebSocket, session: Session, desk: Desk, new: asyncio.Event, got: asyncio.Event,
                    writer: asyncio.Task[None]) -> None:
        while not writer.done():
            receive = asyncio.ensure_future(_receive(websocket))
            done, _ = await asyncio.wait({receive, writer}, return_when=asyncio.FIRST_COMPLETED)
            if receive not in done:
                receive.cancel()
                break
            message = receive.result()
            wish = message.get("do")
            if wish == "got":
                got.set()
            elif wish == "look" and isinstance(message.get("visible"), list):
                session.visible = {str(each) for each in message["visible"][:500]}
                new.set()
            elif wish == "set":
                desk.view = moved(desk.view, str(message.get("name")), message.get("value"))
            elif wish == "steps":
                ends = _two_numbers(message.get("range"))
                if ends is not None:
                    desk.view = desk.view.zoomed(*ends)
            elif wish == "zoom":
                ends = _two_numbers(message.get("x"))
                if ends is None:
                    desk.view = desk.view.zoomed(None, None)
                else:
                    steps = [of_axis(each, session.view) for each in ends]
                    desk.view = desk.view.zoomed(*steps)

    async def _write(self, websocket: WebSocket, session: Session, new: asyncio.Event, got: asyncio.Event) -> None:
        number = 0
        # Up to Python 3.11 `wait_for` loses a cancellation that comes at the moment in which it is done: hence the condition.
        while new in self._open:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(new.wait(), _TICK)
            if new not in self._open:
                break
            new.clear()
            content, seconds = await asyncio.to_thread(_made, session, number + 1)
            self._cost += 0.1 * (seconds - self._cost)
            if content is not None:
                number += 1
                got.clear()
                await asyncio.wait_for(websocket.send_text(content), _SEND)
                await asyncio.wait_for(got.wait(), _IDLE)
            # With many browsers each one is served less often, so that all are served.
            await asyncio.sleep(max(_PAUSE, 1.5 * self._cost * len(self._open)))


def _made(session: Session, number: int) -> tuple[str | None, float]:
    """The next message as text, None where nothing is new, and the processor's seconds that it took."""
    start = time.thread_time()  # by the clock, messages that are made at the same time would count each other
    try:
        message = session.message()
    except Exception:
        _log.exception("A page could not be made, and its browser will ask again. Please report this with the run's files.")
        raise
    if not message:
        return None, time.thread_time() - start
    message["n"] = number
    content = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS, default=str).decode()
    return content, time.thread_time() - start


async def _receive(websocket: WebSocket) -> dict[str, Any]:
    try:
        text = await websocket.receive_text()
    except KeyError:
        raise ValueError("no text") from None
    if len(text) > _LARGEST:
        raise ValueError("too long")
    message = orjson.loads(text)
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def _two_numbers(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(each, (int, float)) for each in value):
        return None
    low, high = (min(max(float(each), -1e15), 1e15) for each in value)
    return low, high
