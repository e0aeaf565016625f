"""How far recorded ranks are apart."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import instrument
from instrument import runs
from instrument.record import Record
from instrument.spread import spread
from instrument.writers import JsonlWriter

NAN, INF = float("nan"), float("inf")


def of(*ranks):
    """The spread of `{step: value}` of each rank."""
    return spread((rank, np.array(sorted(values), np.int64), np.array([values[step] for step in sorted(values)], float))
                  for rank, values in enumerate(ranks))


def rows(found):
    return list(zip(*(column.tolist() for column in found)))


def test_the_smallest_the_largest_and_whose_it_is():
    assert rows(of({1: 5.0, 2: 1.0}, {1: 7.0, 2: 0.5}, {1: 6.0, 2: 1.0})) == [(1, 5.0, 7.0, 1, 3), (2, 0.5, 1.0, 0, 3)]


def test_a_rank_that_ended_early_or_began_late_is_left_out_where_it_has_nothing():
    found = of({3: 1.0, 4: 1.0}, {1: 2.0, 2: 2.0, 3: 2.0})
    assert rows(found) == [(1, 2, 2, 1, 1), (2, 2, 2, 1, 1), (3, 1, 2, 1, 2), (4, 1, 1, 0, 1)]


def test_what_is_not_finite_names_its_rank():
    found = of({1: 1.0, 2: INF, 3: -INF, 4: NAN}, {1: NAN, 2: 9.0, 3: 9.0, 4: NAN}, {1: 2.0, 2: NAN, 3: 1.0, 4: NAN})
    assert found.rank.tolist() == [1, 0, 0, 0] and found.ranks.tolist() == [3] * 4
    np.testing.assert_array_equal(found.max, [NAN, NAN, 9.0, NAN])
    np.testing.assert_array_equal(found.min, [1.0, 9.0, -INF, NAN])


def test_nothing_is_nothing():
    assert rows(of()) == [] and rows(of({})) == []


values = st.floats(-10, 10) | st.sampled_from([NAN, INF, -INF])


@given(st.lists(st.dictionaries(st.integers(1, 5), values, max_size=5), max_size=4))
def test_it_is_what_a_loop_over_steps_finds(ranks):
    expected = []
    for step in sorted({step for values in ranks for step in values}):
        there = [(rank, values[step]) for rank, values in enumerate(ranks) if step in values]
        known = [value for _, value in there if value == value]
        score = [value if abs(value) < INF else INF for _, value in there]
        expected.append((step, min(known) if known else NAN, max(known) if len(known) == len(there) else NAN,
                         there[score.index(max(score))][0], len(there)))
    found = of(*ranks)
    for column, each in zip(found, zip(*expected) if expected else [()] * 5):
        np.testing.assert_array_equal(column, each)


def write(path, rank, values):
    with runs.create(path, rank=rank, ranks=3) as run, JsonlWriter(run) as writer:
        for step, value in enumerate(values, 1):
            writer.write(Record(step, 0.0, {"step_time": value}))


def test_the_ranks_of_a_run_are_compared_without_being_kept(tmp_path):
    write(tmp_path, 0, [1.0, 1.0, 1.0])
    write(tmp_path / "rank_1", 1, [1.0, 3.0])
    write(tmp_path / "rank_2", 2, [2.0, 1.0, 1.0])
    run = instrument.read(tmp_path)
    assert rows(run.spread("step_time")) == [(1, 1.0, 2.0, 2, 3), (2, 1.0, 3.0, 1, 3), (3, 1.0, 1.0, 0, 2)]
    assert not run.ranks._read
    with pytest.raises(KeyError, match="no rank of the run .* has recorded 'data_wait'"):
        run.spread("data_wait")
