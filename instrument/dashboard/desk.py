"""`Desk`: the view that one page's controls, built by `page.py`, and its socket, served by `server.py`, have in common."""
from __future__ import annotations

from collections.abc import Callable

from instrument.dashboard.view import View


class Desk:
    """Holds a view, and tells who listens when it changes.

    Attributes:
        listeners: Called without arguments after a change, in the thread of the event loop.
    """

    def __init__(self, view: View):
        self._view = view
        self.listeners: list[Callable[[], None]] = []

    @property
    def view(self) -> View:
        return self._view

    @view.setter
    def view(self, view: View) -> None:
        if view != self._view:
            self._view = view
            for listener in list(self.listeners):
                listener()
