"""TensorBoard's files: what each part of a record becomes, purging on resume, the checksum, and a full disk."""
import errno
import math
import os
import sys
import time

import numpy as np
import pytest
import tensorboardX.crc32c
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from hostile import BEGUN, ENDED, NAMES, counts, events_of
from instrument import bins
from instrument.record import Record, RunInfo
from instrument.writers import TensorBoardWriter, event_file
from instrument.writers.tensorboard import histogram


def written(run, *records, info=None):
    """{tag: [(step, value)]} of everything in the run, after these records."""
    with TensorBoardWriter(run) as writer:
        if info is not None:
            writer.start(info)
        for record in records:
            writer.write(record)
    found = {}
    for event in events_of(run):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value))
    return found


def texts_of(found, tag):
    return [(step, value.tensor.string_val[0].decode()) for step, value in found[f"{tag}/text_summary"]]


def test_names_are_tags_as_they_are(tmp_path):
    found = written(tmp_path, Record(1, 0.0, {name: float(place) for place, name in enumerate(NAMES)}))
    assert {tag: value.simple_value for tag, ((_, value),) in found.items()} == {
        name: place for place, name in enumerate(NAMES)}


def test_one_event_holds_all_scalars_of_a_record_whichever_were_there_before(tmp_path):
    # Events are made from earlier ones of the same names: nothing of those may be left over.
    records = [Record(1, 10.0, {"a": 1.0, "b": 2.0}), Record(2, 20.0, {"a": 3.0}), Record(3, 30.0, {"b": 4.0, "a": 5.0}),
               Record(4, 40.0, {"a": 6.0, "b": math.nan})]
    written(tmp_path, *records)
    scalars = [event for event in events_of(tmp_path) if event.summary.value]
    assert [(event.step, event.wall_time) for event in scalars] == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]
    assert [[(value.tag, value.simple_value) for value in event.summary.value] for event in scalars[:3]] == [
        [("a", 1.0), ("b", 2.0)], [("a", 3.0)], [("b", 4.0), ("a", 5.0)]]
    assert math.isnan(scalars[3].summary.value[1].simple_value)


def test_more_sets_of_names_than_are_kept(tmp_path):
    found = written(tmp_path, *(Record(step, 0.0, {f"metric {step % 40}": float(step)}) for step in range(1, 100)))
    assert sorted(step for values in found.values() for step, _ in values) == list(range(1, 100))
    assert all(step == value.simple_value for values in found.values() for step, value in values)


# Histograms

def buckets(counted):
    """[(lower edge, upper edge, count)] as TensorBoard reads it: the first begins at `min`, the last ends at `max`."""
    histo = histogram(counted)
    limits = list(histo.bucket_limit)
    return list(zip([histo.min, *limits[:-1]], [*limits[:-1], histo.max], histo.bucket))


def test_buckets_are_the_bins_without_empty_ones_at_the_ends():
    assert buckets(counts(octave_0=3, octave_2=1)) == [(1.0, 2.0, 3), (2.0, 4.0, 0), (4.0, 8.0, 1)]


def test_many_empty_bins_are_one_bucket():
    assert buckets(counts(octave_0=3, octave_20=1)) == [(1.0, 2.0, 3), (2.0, 2.0 ** 20, 0), (2.0 ** 20, 2.0 ** 21, 1)]


def test_zeros_alone_are_zero():
    histo = histogram(counts(ZERO=5))
    assert buckets(counts(ZERO=5)) == [(0.0, 0.0, 5)] and (histo.num, histo.sum, histo.sum_squares) == (5, 0, 0)


def test_zeros_at_an_end_show_no_sign_that_was_not_there():
    assert buckets(counts(ZERO=5, octave_0=1)) == [(0.0, 2.0 ** bins.LOWEST, 5), (2.0 ** bins.LOWEST, 1.0, 0), (1.0, 2.0, 1)]
    negative = counts(ZERO=5)
    negative[bins.ZERO - 1] = 2
    assert buckets(negative) == [(-2.0 ** (bins.LOWEST + 1), -2.0 ** bins.LOWEST, 2), (-2.0 ** bins.LOWEST, 0.0, 5)]


@pytest.mark.parametrize("counted", [counts(), counts(NONFINITE=9)])
def test_nothing_finite_is_an_empty_histogram(counted):
    histo = histogram(counted)
    assert (histo.num, len(histo.bucket), len(histo.bucket_limit)) == (0, 0, 0)


@given(st.lists(st.integers(0, 2 ** 36), min_size=bins.BINS, max_size=bins.BINS), st.sets(st.integers(0, bins.BINS - 1)))
def test_a_histogram_holds_every_finite_element_in_ascending_buckets(numbers, empty):
    counted = np.array(numbers)
    counted[list(empty)] = 0
    histo = histogram(counted)
    edges = [edge for low, high, _ in buckets(counted) for edge in (low, high)]
    assert edges == sorted(edges)
    assert sum(histo.bucket) == histo.num == counted[:bins.NONFINITE].sum()
    assert not histo.bucket or (histo.bucket[0] > 0 and histo.bucket[-1] > 0)
    zeros = [number for low, high, number in buckets(counted) if low <= 0 <= high and number]
    assert sum(zeros) >= counted[bins.ZERO]


def test_sums_are_those_of_evenly_spread_logarithms():
    spread = 2.0 ** np.random.default_rng(0).uniform(-8, 8, 1_000_000)
    counted = counts()
    for octave in range(-8, 8):
        counted[bins.ZERO + 1 + octave - bins.LOWEST] = ((spread >= 2.0 ** octave) & (spread < 2.0 ** (octave + 1))).sum()
    histo = histogram(counted)
    # The standard error of either mean of 1,000,000 elements is about 0.2 % of it.
    assert histo.sum == pytest.approx(spread.sum(), rel=0.01)
    assert histo.sum_squares == pytest.approx((spread ** 2).sum(), rel=0.01)
    assert histogram(counted[bins.NONFINITE - 1::-1]).sum == -histo.sum


def test_elements_that_are_not_finite_are_a_scalar_beside_the_histogram(tmp_path):
    found = written(tmp_path, Record(1, 0.0, {}, {"histogram/weight/a": counts(octave_0=4)}),
                    Record(2, 0.0, {}, {"histogram/weight/a": counts(octave_0=3, NONFINITE=1)}))
    assert [(step, value.histo.num) for step, value in found["histogram/weight/a"]] == [(1, 4), (2, 3)]
    assert [(step, value.simple_value) for step, value in found["histogram/weight/a/nonfinite"]] == [(2, 1.0)]


# Texts and alarms

def test_a_text_is_shown_verbatim(tmp_path):
    found = written(tmp_path, Record(3, 1.0, {}, {}, {"sample/0": "# no *heading*\n  ü\n"}))
    assert texts_of(found, "sample/0") == [(3, "    # no *heading*\n      ü\n    ")]
    (_, value), = found["sample/0/text_summary"]
    assert value.metadata.plugin_data.plugin_name == "text"


def test_half_of_a_surrogate_pair_costs_only_itself(tmp_path):
    assert texts_of(written(tmp_path, Record(1, 0.0, {}, {}, {"a": "x\ud800y"})), "a") == [(1, "    x?y")]


def test_incidents_are_texts_by_their_alarm(tmp_path):
    found = written(tmp_path, Record(7, 0.0, {"loss": math.nan}, {}, {}, (BEGUN,)),
                    Record(10, 0.0, {}, {}, {}, (ENDED, BEGUN)))
    assert texts_of(found, "alarms/NonFinite") == [(7, str(BEGUN)), (10, f"{ENDED}\n\n{BEGUN}")]


# The run

def hparams(value):
    return HParamsPluginData.FromString(value.metadata.plugin_data.content)


def test_hyper_parameters_are_written_once_with_what_they_led_to(tmp_path):
    parameters = {"lr": 0.1, "layers": np.int64(3), "optimizer": "adam", "nesterov": True, "limit": math.inf, "warmup": None,
                  "betas": (0.9, 0.999)}
    info = RunInfo(config={"hyper_parameters": parameters})
    writer = TensorBoardWriter(tmp_path)
    for step in (1, 2):  # two calls of Model.train
        writer.start(info)
        writer.write(Record(step, 0.0, {"loss": 1.0, "grad/norm": 1.0}))
        writer.write(Record(step, 0.0, {"val/accuracy": 0.5}))
        writer.close()
    values = {}
    for event in events_of(tmp_path):
        for value in event.summary.value:
            if value.tag.startswith("_hparams_"):
                assert value.tag not in values
                values[value.tag] = hparams(value)
    session = values["_hparams_/session_start_info"].session_start_info.hparams
    assert {name: getattr(value, value.WhichOneof("kind")) for name, value in session.items()} == {
        "lr": 0.1, "layers": 3.0, "optimizer": "adam", "nesterov": True, "limit": "inf", "betas": "(0.9, 0.999)"}
    experiment = values["_hparams_/experiment"].experiment
    assert [metric.name.tag for metric in experiment.metric_infos] == ["loss", "val/accuracy"]


@pytest.mark.parametrize("config", [{}, {"hyper_parameters": {}}, {"hyper_parameters": None}])
def test_a_run_without_hyper_parameters_has_none(tmp_path, config):
    found = written(tmp_path, Record(1, 0.0, {"loss": 1.0}), info=RunInfo(config=config))
    assert list(found) == ["loss"]


def starts_of(run):
    return [event.step for event in events_of(run) if event.session_log.status == SessionLog.START]


def test_a_resumed_run_drops_what_it_makes_again(tmp_path):
    written(tmp_path, *(Record(step, 0.0, {"loss": 1.0}) for step in range(1, 10)))
    assert starts_of(tmp_path) == []
    writer = TensorBoardWriter(tmp_path)
    for step in (6, 7):  # two calls of Model.train
        writer.start(RunInfo(resumed=True))
        writer.write(Record(step, 0.0, {"loss": 1.0}))
        writer.close()
    # Twice, since TensorBoard takes the first one of a run for its beginning; and not again for the second call.
    assert starts_of(tmp_path) == [6, 6]
    steps = [event.step for event in events_of(tmp_path) if event.summary.value]
    assert steps == [*range(1, 10), 6, 7]


def test_validation_right_after_a_resume_leaves_the_step_before_it(tmp_path):
    written(tmp_path, Record(5, 0.0, {"loss": 1.0}))
    written(tmp_path, Record(5, 0.0, {"val/loss": 1.0}), info=RunInfo(resumed=True))
    assert starts_of(tmp_path) == [6, 6]


# The file

def test_files_are_in_order_even_if_the_clock_was_set_back(tmp_path, monkeypatch):
    now = time.time()
    for step, back in enumerate((0, 0, 100, 50), 1):
        monkeypatch.setattr(time, "time", lambda back=back: now - back)
        written(tmp_path, Record(step, 0.0, {"loss": 1.0}))
    assert [event.step for event in events_of(tmp_path) if event.summary.value] == [1, 2, 3, 4]


@pytest.mark.parametrize("length", [0, 1, 8, 63, 64, 65, 511, 512, 513, 1024, 5000])
def test_the_checksum_is_the_one_of_tensorboardx(length, monkeypatch):
    monkeypatch.setattr(event_file, "_native", None)
    data = np.random.default_rng(length).bytes(length)
    assert event_file.crc32c(data) == tensorboardX.crc32c.crc32c(data)
    assert event_file.crc32c(bytes(length)) == tensorboardX.crc32c.crc32c(bytes(length))


def test_a_package_for_the_checksum_is_used(monkeypatch):
    monkeypatch.setattr(event_file, "_native", lambda data: 42)
    assert event_file.crc32c(b"123456789") == 42


class Disk:
    """A raw file on a disk that has room for so many bytes."""

    def __init__(self, file, room):
        self._file, self.room = file, room

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        if self._file.tell() >= self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data[:self.room - self._file.tell()])


def test_a_full_disk_leaves_whole_messages_and_nothing_is_lost_once_there_is_room(tmp_path):
    writer = TensorBoardWriter(tmp_path, flush_seconds=0)
    writer.write(Record(1, 1.0, {"loss": 1.0}))
    size = next(tmp_path.iterdir()).stat().st_size
    writer._file._file = disk = Disk(writer._file._file, size + 10)
    for step in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            writer.write(Record(step, float(step), {"loss": 1.0}))
        assert next(tmp_path.iterdir()).stat().st_size == size
    disk.room = 10 ** 6
    writer.write(Record(4, 4.0, {"loss": 1.0}))
    writer.close()
    assert [event.step for event in events_of(tmp_path) if event.summary.value] == [1, 2, 3, 4]


def test_a_disk_that_stays_full_costs_no_memory_and_close_still_closes(tmp_path):
    writer = TensorBoardWriter(tmp_path, flush_seconds=0)
    writer.write(Record(0, 1.0, {}))
    raw = writer._file._file
    writer._file._file = Disk(raw, 0)
    for step in range(3):
        with pytest.raises(OSError, match="No space left"):
            writer.write(Record(step, float(step + 2), {}, {}, {"a": "x" * 700_000}))
        assert len(writer._file._pending) < 1 << 20
    writer._file.add(b"one more")
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert raw.closed
    writer.close()


@pytest.mark.skipif(not hasattr(os, "fork") or sys.version_info >= (3, 12), reason="3.12 warns of a fork beside threads")
def test_a_forked_process_writes_nothing_at_its_end(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write(Record(1, 100.0, {"loss": 1.0}))
    writer.write(Record(2, 100.0, {"loss": 1.0}))  # held back
    size = next(tmp_path.iterdir()).stat().st_size
    child = os.fork()
    if child == 0:
        writer.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert next(tmp_path.iterdir()).stat().st_size == size
    writer.close()
    assert [event.step for event in events_of(tmp_path) if event.summary.value] == [1, 2]
