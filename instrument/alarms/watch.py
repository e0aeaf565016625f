"""`AlarmSet`: makes incidents, which begin and end, of what alarms find in record after record.

Owns when an incident begins and when it is over. What becomes of it (its policy) is the monitor's.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from instrument.alarms.base import NOT_JUDGED, Alarm, Finding, Policy
from instrument.alarms.columns import Columns
from instrument.alarms.nonfinite import NonFinite
from instrument.nonfinite import FirstNonfinite
from instrument.record import Incident, Record


class AlarmSet:
    """Lets alarms look at each record, and reports each incident twice: when it begins, and when it is over.

    An incident is over after `alarm.quiet` records in a row in which all is well for its alarm; what is found again before is
    the same incident. Records that have nothing for the alarm do not count. It keeps no lock: call it from one thread.

    Args:
        alarms: The alarms, with names of their own each.

    Attributes:
        errors: (name of the alarm, exception) of each alarm that failed in the last call of `observe`. The others have
            judged the record; the incidents of one that failed neither end nor go on.

    Raises:
        TypeError: One of `alarms` is no `Alarm`.
        ValueError: Two have the same name.

    Examples:
        >>> watch = AlarmSet([NonFinite()])
        >>> [str(each) for each in watch.observe(Record(7, 0.0, {"loss": float("nan")}))]
        ['NonFinite at step 7: loss is nan. First not finite: loss (nothing measured before it was finite)']
        >>> [str(each) for each in watch.finish()]
        ['NonFinite was not over when training ended: it was seen in 1 step, from step 7 to step 7']
    """

    def __init__(self, alarms: Sequence[Alarm]):
        self.alarms: tuple[Alarm, ...] = tuple(alarms)
        for alarm in self.alarms:
            if not isinstance(alarm, Alarm):
                raise TypeError(f"`alarms` must hold instances of instrument.alarms.Alarm, but {alarm!r} is none. "
                                + (f"Use {alarm.__name__}()." if isinstance(alarm, type) else "Derive its class from Alarm."))
        names = [alarm.name for alarm in self.alarms]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"alarms must have different names, but {', '.join(twice)} occurs twice. Give one of them "
                             "another by name=...")
        self.errors: tuple[tuple[str, Exception], ...] = ()
        self._columns = Columns()
        for alarm in self.alarms:
            alarm.columns = self._columns
        self._open: dict[str, dict[str, _Open]] = {name: {} for name in names}
        self._blind = list(self.alarms)
        self._kinds = 0

    def __iter__(self) -> Iterator[Alarm]:
        return iter(self.alarms)

    def __len__(self) -> int:
        return len(self.alarms)

    def observe(self, record: Record) -> tuple[Incident, ...]:
        """Judge one record.

        Args:
            record: The next one. Its own `alarms` are passed over.

        Returns:
            The incidents that begin with it or that it shows to be over.
        """
        changes: list[Incident] = []
        errors = []
        self._look(record)
        for alarm in self.alarms:
            opened = self._open[alarm.name]
            try:
                verdict = alarm.check(record)
                if verdict is NOT_JUDGED or (verdict is None and not opened):
                    continue
                findings = _by_key(verdict)
            except Exception as error:
                errors.append((alarm.name, error))
                continue
            for key, finding in findings.items():
                if isinstance(finding, Finding):
                    if key in opened:
                        opened[key].seen_again(record.step)
                    else:
                        opened[key] = _Open(alarm.name, finding, record.step)
                        changes.append(opened[key].incident("begin"))
            for key in [key for key in opened if key not in findings]:
                opened[key].quiet += 1
                if opened[key].quiet >= alarm.quiet:
                    changes.append(opened.pop(key).incident("end"))
        self.errors = tuple(errors)
        return tuple(changes)

    def finish(self) -> tuple[Incident, ...]:
        """Say that training has ended.

        Returns:
            An incident for each one that was open: `end` where the last records showed it no more, otherwise `open`. What is
            seen again where training goes on is a new incident, so that its alarm's policy acts again.
        """
        told = [each.incident("end" if each.quiet else "open") for opened in self._open.values() for each in opened.values()]
        self._drop()
        return tuple(sorted(told, key=lambda incident: incident.first_step))

    def reset(self) -> None:
        """Forget all earlier records and what is open: another run begins."""
        self._drop()
        for alarm in self.alarms:
            alarm.reset()

    def policy_of(self, incident: Incident) -> Policy:
        """The policy of the alarm that made `incident`."""
        return next(alarm.policy for alarm in self.alarms if alarm.name == incident.alarm)

    def locate_by(self, first_nonfinite: Callable[[Mapping[str, float]], FirstNonfinite | None] | None) -> None:
        """Give `NonFinite` alarms the step's `schema.first_nonfinite`; one that was made with a function keeps its own."""
        for alarm in self.alarms:
            if isinstance(alarm, NonFinite):
                alarm.locate = first_nonfinite

    def blind(self) -> tuple[str, ...]:
        """A sentence for each alarm that no record so far had anything for."""
        return tuple(alarm.unmet for alarm in self._blind if alarm.needs)

    def _look(self, record: Record) -> None:
        self._columns.look(record)
        if self._columns.kinds != self._kinds:
            self._kinds = self._columns.kinds
            self._blind = [alarm for alarm in self._blind if not alarm.sees(record.values)]

    def _drop(self) -> None:
        for opened in self._open.values():
            opened.clear()


class _Open:
    """An incident that is not over."""

    def __init__(self, alarm: str, finding: Finding, step: int):
        self.alarm, self.finding, self.first, self.last = alarm, finding, step, step
        self.steps = 1
        self.quiet = 0  # records since, in which all was well

    def seen_again(self, step: int) -> None:
        self.quiet = 0
        self.steps += step != self.last  # a record of training and one of validation may have the same step
        self.last = step

    def incident(self, state: Any) -> Incident:
        found = self.finding
        return Incident(self.alarm, state, self.first, self.last, self.steps, found.message, found.metric, found.value,
                        found.where)


def _by_key(verdict: Any) -> Mapping[str, Any]:
    if verdict is None:
        return {}
    if isinstance(verdict, Finding):
        return {"": verdict}
    if isinstance(verdict, Mapping) and all(isinstance(each, Finding) or each is NOT_JUDGED for each in verdict.values()):
        return verdict
    raise TypeError(f"check must return a Finding, None, NOT_JUDGED or a dict of them, but it returned {verdict!r}.")
