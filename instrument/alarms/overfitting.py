"""`Overfitting`: the network goes on learning its training data, and gets worse on others."""
from __future__ import annotations

import math
from collections import deque

from instrument.alarms.arguments import number, whole
from instrument.alarms.base import NOT_JUDGED, Alarm, Finding, Policy, Verdict, passed_over
from instrument.record import Record


class Overfitting(Alarm):
    """A validation loss that rises from validation to validation while the training loss falls.

    The training loss of a validation is the mean since the one before. The alarm is given when in the last `validations`
    validations the validation loss has risen each time, by `rise` in all, and the training loss has fallen from the first
    to the last of them; and lasts until the validation loss falls.

    Args:
        validations: How many rises in a row. By default 3: at a loss that only varies, three rises come once in 24
            validations, and `rise` keeps most of these out.
        rise: By which part of itself the validation loss must have risen over all of them.
        validation: Name of the validation loss.
        training: Name of the training loss.
        policy: As for each `Alarm`, and so `name` and `quiet`.
    """

    quiet = 1

    def __init__(self, *, validations: int = 3, rise: float = 0.02, validation: str = "val/loss", training: str = "loss",
                 policy: Policy = "log", name: str | None = None, quiet: int | None = None):
        super().__init__(policy=policy, name=name, quiet=quiet)
        self.validations = whole("validations", validations)
        self.rise = number("rise", rise)
        self.validation, self.training = validation, training
        self.needs = (validation,)
        self.hint = f"Train with Model.fit, and metrics that have {validation.rpartition('/')[2]!r}."
        self.reset()

    def reset(self) -> None:
        self._sum, self._number = 0.0, 0  # of training losses since the last validation
        self._pairs: deque[tuple[float, float]] = deque(maxlen=self.validations + 1)
        self._found: Finding | None = None  # in the validation before

    def check(self, record: Record) -> Verdict:
        loss = record.values.get(self.training)
        if loss is not None and math.isfinite(loss) and not passed_over(record):
            self._sum, self._number = self._sum + loss, self._number + 1
        validation = record.values.get(self.validation)
        if validation is None or not math.isfinite(validation) or not self._number:
            return NOT_JUDGED
        self._pairs.append((validation, self._sum / self._number))
        self._sum, self._number = 0.0, 0
        if len(self._pairs) <= self.validations:
            return None
        validations, trainings = zip(*self._pairs)
        if self._found is not None and validations[-1] >= validations[-2]:
            return self._found
        self._found = None
        rises = all(a < b for a, b in zip(validations, validations[1:]))
        if not rises or validations[-1] - validations[0] < self.rise * abs(validations[0]) or trainings[-1] >= trainings[0]:
            return None
        self._found = Finding(
            f"{self.validation} has risen {self.validations} times in a row, from {validations[0]:.4g} to "
            f"{validations[-1]:.4g}, while {self.training} fell from {trainings[0]:.4g} to {trainings[-1]:.4g} "
            "(means between validations)", self.validation, validation)
        return self._found
