"""`Alarm`: what looks at records and says what is wrong. One file a kind of alarm beside this one.

Owns the interface of an alarm: `Alarm`, the `Finding` that it makes, and what becomes of one (`Policy`, `AlarmRaised`).
`watch.py` turns the findings of record after record into incidents; the monitor acts on policies.
"""
from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from instrument.alarms.arguments import whole
from instrument.alarms.columns import Columns
from instrument.record import Incident, Record

Policy = Union[Literal["log", "stop", "raise"], Callable[[Incident], None]]


class NotJudged(enum.Enum):
    NOT_JUDGED = "not judged"

    def __repr__(self) -> str:
        return self.name


NOT_JUDGED = NotJudged.NOT_JUDGED
"""What a `check` returns of a record that has nothing for it to look at: an incident then neither ends nor goes on."""


@dataclass(frozen=True)
class Finding:
    """What an alarm found in one record.

    Attributes:
        message: What is wrong, where, and what it was measured by: one sentence for people.
        metric: The metric that shows it; empty where no single one does.
        value: Its value; None where there is none.
        where: The layer, parameter or loss part that is named; empty where none is.
    """

    message: str
    metric: str = ""
    value: float | None = None
    where: str = ""


Verdict = Union[Finding, None, Literal[NotJudged.NOT_JUDGED],
                Mapping[str, Union[Finding, Literal[NotJudged.NOT_JUDGED]]]]


class Alarm(ABC):
    """Looks at each record, in the order of training, and says what is wrong in it.

    A class of your own has a `check`, and a `reset` where it keeps anything. It need not call this `__init__`:

        class LossTooHigh(Alarm):
            def check(self, record):
                loss = record.values.get("loss")
                if loss is None:                      # a validation record, or another step's
                    return NOT_JUDGED
                return Finding(f"the loss is {loss}", "loss", loss) if loss > 10 else None

    Args:
        policy: What becomes of an incident when it begins. It goes to every writer in any case; `"stop"` ends training after
            the step, `"raise"` ends it by `AlarmRaised`, and a function is called with the incident.
        name: Name of the alarm in incidents; that of its class by default. Two of one class need names of their own.
        quiet: After how many records in a row in which all is well an incident is over; records that have nothing for the
            alarm do not count. What comes back sooner is the same incident.

    Attributes:
        needs: Metrics without which it has nothing to look at; any of them is enough. What ends in `/` is the beginning of a
            name. Empty: not known.
        hint: How to get them.

    Raises:
        ValueError: `policy` is none of these, or `quiet` is not a whole number from 1.
    """

    policy: Policy = "log"
    name: str = ""
    quiet: int = 5
    needs: tuple[str, ...] = ()
    hint: str = ""
    _columns: Columns | None = None

    def __init__(self, *, policy: Policy = "log", name: str | None = None, quiet: int | None = None):
        if not callable(policy) and policy not in ("log", "stop", "raise"):
            raise ValueError(f"`policy` must be 'log', 'stop', 'raise' or a function that takes the incident, but it is "
                             f"{policy!r}.")
        self.policy = policy
        if name is not None:
            self.name = name
        if quiet is not None:
            self.quiet = whole("quiet", quiet)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @abstractmethod
    def check(self, record: Record) -> Verdict:
        """Judge one record. It is called for every record, in order.

        Returns:
            A `Finding`; None where all is well; `NOT_JUDGED` where the record has nothing to look at, as a validation record
            has not for an alarm of training. An alarm that can have several incidents at once returns them by a key of its
            own: `{key: Finding or NOT_JUDGED}`. Of a key that is missing, all is well.
        """

    def reset(self) -> None:  # noqa: B027 - an alarm that keeps nothing has nothing to forget
        """Forget all earlier records: a new run begins."""

    @property
    def columns(self) -> Columns:
        """The record's values as arrays. The alarms of an `AlarmSet` share one, so that names are sorted out once."""
        if self._columns is None:
            self._columns = Columns()
        return self._columns

    @columns.setter
    def columns(self, columns: Columns) -> None:
        self._columns = columns

    def sees(self, names: Iterable[str]) -> bool:
        """Whether one of `names`, a record's metrics, is one that it needs."""
        whole_names = {need for need in self.needs if not need.endswith("/")}
        beginnings = tuple(need for need in self.needs if need.endswith("/"))
        return not self.needs or any(name in whole_names or name.startswith(beginnings) for name in names)

    @property
    def unmet(self) -> str:
        """The sentence that says that it has nothing to look at, what it needs, and how to get that."""
        needs = " or ".join(f"{need}..." if need.endswith("/") else need for need in self.needs)
        return f"alarm {self.name} has nothing to look at: it needs {needs}" + (f". {self.hint}" if self.hint else ".")

    def __repr__(self) -> str:
        policy = self.policy if isinstance(self.policy, str) else getattr(self.policy, "__name__", repr(self.policy))
        return f"<{self.name}: {policy}>"


class AlarmRaised(RuntimeError):
    """Training was ended by an alarm whose policy is `"raise"`. The text is that of the incident.

    Attributes:
        incident: What it was.
    """

    def __init__(self, incident: Incident):
        super().__init__(incident)
        self.incident = incident


def passed_over(record: Record) -> bool:
    """Whether the step's update was left out, by loss scaling or as a spike: its numbers say nothing of training."""
    values = record.values
    return values.get("skipped", 0.0) > 0 or values.get("overflow", 0.0) > 0


def lost_its_numbers(record: Record) -> bool:
    """Whether loss, gradients or weights are not finite: what layers then show follows from that, which `NonFinite` tells.

    The loss alone does not say, since ReLU on a CPU makes 0 of NaN.
    """
    values = record.values
    finite = all(math.isfinite(values.get(name, 0.0)) for name in ("loss", "weight/norm"))
    return not finite or values.get("grad/nonfinite", 0.0) > 0
