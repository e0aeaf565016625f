"""`ActingAlarms`: the alarms that may act on training, which are looked at in the training thread.

Owns what becomes of their incidents: everything is queued for the writers first, and then a policy stops training, raises or
calls a function. Alarms that only tell are the background's.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from instrument.alarms import Alarm, AlarmRaised, AlarmSet
from instrument.outlet import Outlet
from instrument.outputs import Reading
from instrument.record import Incident, Record


class ActingAlarms:
    """Looks at readings before they are queued.

    Args:
        alarms: Those whose policy is another one than `"log"`.
        outlet: Where readings go, and where errors of alarms are counted.
        measure_next: Called where an incident wants the next step measured.
    """

    def __init__(self, alarms: Sequence[Alarm], outlet: Outlet, measure_next: Callable[[], None]):
        self._alarms = AlarmSet(list(alarms))
        self._outlet, self._measure_next = outlet, measure_next
        self._to_put: deque[tuple[Any, list[Incident]]] = deque()  # not queued yet; with the incidents to act on

    def locate_by(self, first_nonfinite: Callable[..., Any]) -> None:
        """How the first bad layer is found. Args: first_nonfinite: as `Schema.first_nonfinite`."""
        self._alarms.locate_by(first_nonfinite)

    def look(self, readings: Sequence[Reading]) -> None:
        """Take steps that are to be queued by the next `put`, after the alarms have seen them."""
        for reading in readings:
            item: Any = reading
            begun: list[Incident] = []
            if len(self._alarms):
                with self._outlet.reported("alarms"):
                    record = reading.record()
                    incidents = self._alarms.observe(record)
                    for name, error in self._alarms.errors:
                        self._outlet.background.report(name, error)
                    begun = [each for each in incidents if each.state == "begin"]
                    item = Record(record.step, record.time, record.values, record.histograms, record.texts, incidents)
            self._to_put.append((item, begun))

    def put(self, run_context: Any, training: Any) -> None:
        """Queue what was looked at, and then act on incidents. Interrupted, as by Ctrl-C, it goes on when it is called again.

        Args:
            run_context: The context of the hook that we are in; None while the end of training is dealt with: nothing raises.
            training: The context of training that can be stopped, or None.

        Raises:
            AlarmRaised: By an incident of an alarm with the policy `"raise"`.
        """
        acting: list[Incident] = []
        while self._to_put:
            item, begun = first = self._to_put[0]
            self._outlet.put(item)
            acting += begun
            if self._to_put and self._to_put[0] is first:
                self._to_put.popleft()
        for incident in sorted(acting, key=lambda each: self._alarms.policy_of(each) == "raise"):  # which ends it, so last
            self._act(incident, run_context, training)

    def finish(self, step: int, time: float) -> None:
        """Tell of the incidents that are still open. Args: step, time: of the record that tells it."""
        with self._outlet.reported("alarms"):
            ended = self._alarms.finish()
            if ended:
                self._outlet.put(Record(step, time, {}, alarms=ended))

    def _act(self, incident: Incident, run_context: Any, training: Any) -> None:
        policy: Any = self._alarms.policy_of(incident)
        self._measure_next()
        if policy == "raise":
            if run_context is not None:
                raise AlarmRaised(incident)
        elif policy == "stop":
            if training is not None:
                self._outlet.status = f"stopped: {incident}"
                training.request_stop()
        else:
            with self._outlet.reported(f"{incident.alarm}'s policy"):
                policy(incident)
