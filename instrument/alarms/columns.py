"""A record's values as arrays: which names begin how is found out once, and not once a record and alarm.

Owns the selection of metrics by the beginning of their names. Judges nothing.
"""
from __future__ import annotations

import numpy as np

from instrument.record import Record

# Records of training, of validation, with histograms or without: each kind has its own names.
_KINDS = 8


class Group:
    """The metrics of one kind of record that begin with `prefix`.

    Attributes:
        prefix: What their names begin with, such as `activation/rms/`.
        metrics: Their names, in the record's order.
        names: The rest of each name: that of the layer or parameter.
        positions: Where their values are in the record, int64 [N].
    """

    def __init__(self, prefix: str, all_names: list[str]):
        positions = [i for i, name in enumerate(all_names) if name.startswith(prefix)]
        self.prefix = prefix
        self.metrics = tuple(all_names[i] for i in positions)
        self.names = tuple(name[len(prefix):] for name in self.metrics)
        self.positions = np.array(positions, np.int64)

    def __len__(self) -> int:
        return len(self.metrics)


class _Kind:
    def __init__(self, names: list[str]):
        self.names = names
        self.position = {name: i for i, name in enumerate(names)}
        self.groups: dict[str, Group] = {}
        self.aligned: dict[tuple[Group, str], np.ndarray] = {}


class Columns:
    """Selects values of the record at hand. Names repeat from record to record, so selections are kept.

    Attributes:
        kinds: How many kinds of records, which differ in their names, it has sorted out.

    Examples:
        >>> columns = Columns()
        >>> record = Record(1, 0.0, {"loss": 2.0, "grad/norm/a": 0.5, "grad/norm/b": 0.25})
        >>> group, values = columns.select(record, "grad/norm/")
        >>> group.names, values
        (('a', 'b'), array([0.5 , 0.25]))
    """

    def __init__(self) -> None:
        self._record: Record | None = None
        self._vector = np.empty(0)
        self._kinds: list[_Kind] = []
        self.kinds = 0

    def select(self, record: Record, prefix: str) -> tuple[Group, np.ndarray]:
        """The metrics that begin with `prefix`, and their values, float64 [N]; N is 0 where there are none."""
        kind = self.look(record)
        group = kind.groups.get(prefix)
        if group is None:
            group = kind.groups[prefix] = Group(prefix, kind.names)
        return group, self._vector[group.positions]

    def beside(self, record: Record, group: Group, prefix: str) -> np.ndarray:
        """The values of the metrics `prefix` + name for each name of `group`, float64 [N]; NaN where there is none."""
        kind = self.look(record)
        key = group, prefix
        positions = kind.aligned.get(key)
        if positions is None:
            missing = len(kind.names)  # the vector has one NaN behind its values
            positions = kind.aligned[key] = np.array([kind.position.get(prefix + name, missing) for name in group.names],
                                                     np.int64)
        return self._vector[positions]

    def look(self, record: Record) -> _Kind:
        """Take `record` in hand."""
        if record is self._record:
            return self._kinds[0]
        values = record.values
        names = list(values)
        for i, kind in enumerate(self._kinds):
            if kind.names == names:
                if i:
                    self._kinds.insert(0, self._kinds.pop(i))
                break
        else:
            self._kinds = [_Kind(names), *self._kinds[:_KINDS - 1]]
            self.kinds += 1
        vector = np.full(len(names) + 1, np.nan)
        vector[:-1] = np.fromiter(values.values(), np.float64, len(names))
        self._record, self._vector = record, vector
        return self._kinds[0]
