"""Joining what ranks have measured, without processes: the sum over ranks is made here. The real ones are in regressions."""
import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor, nn

from instrument import InstrumentedStep, _compat
from instrument.joining import Extremes, Joining, Spread
from instrument.schema import Metric, Schema
from instrument.upgrade import StepOptions, upgrade
from networks import MLP, adam

NAN, INF = float("nan"), float("inf")
# Slots as of two taps: calls, sum, sum of maxima; calls, sum of maxima.
EXTREMES = Extremes([2, 4], [0, 3], [0, 3], 5)


@pytest.fixture(autouse=True, scope="module")
def pynative():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.GRAPH_MODE)


def join(losses, carried, counted=None, mine=None, extremes=EXTREMES):
    """What each rank gets, of arrays with a row for each rank: `[(losses, carried, counted, table)]`."""
    ranks = len(losses)
    cells = [Joining(ranks, rank, extremes, mine is not None) for rank in range(ranks)]

    def call(cell, rank):
        vectors = [(Tensor(np.array(each[rank], np.float32)),) if each is not None else () for each in (carried, counted)]
        return cell(Tensor(np.array(losses[rank], np.float32)), *vectors,
                    Tensor(np.array([0.0] if mine is None else mine[rank], np.float32)))

    sent = []
    for rank, cell in enumerate(cells):
        cell.all_reduce = lambda vector: sent.append(vector.asnumpy()) or vector
        call(cell, rank)
    total = Tensor(np.sum(sent, 0, dtype=np.float32))
    results = []
    for rank, cell in enumerate(cells):
        cell.all_reduce = lambda vector: total
        means, joined, histograms, table = call(cell, rank)
        results.append([each.asnumpy() for each in (means, joined[0], histograms[0], table)])
    return results


def test_sums_are_added_calls_averaged_and_the_largest_quotient_is_found():
    carried = [[2, 10, 6, 1, -4], [2, 20, 8, 1, -1], [2, 30, 2, 1, -9]]
    for means, joined, histograms, table in join([[1, 6], [2, 0], [3, 0]], carried, [[1, 2], [3, 4], [5, 6]],
                                                 [[7, 8, 5, 4], [9, 1, 6, 0], [2, 3, 7, 9]]):
        assert means.tolist() == [2, 2] and joined.tolist() == [2, 60, 4, 1, -1] and histograms.tolist() == [9, 12]
        assert table.tolist() == [[7, 8, 5, 4], [9, 1, 6, 0], [2, 3, 7, 9]]


def test_a_rank_that_did_not_call_a_cell_has_no_say_in_its_maximum():
    for _, joined, *_ in join([[1], [1]], [[0, 0, 0, 1, -4], [1, 5, 3, 0, 0]]):
        assert joined.tolist() == [0.5, 5, 3, 0.5, -4]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_on_one_rank_comes_through_and_spoils_nothing_else(bad):
    for means, joined, _, table in join([[1, 1], [bad, 1]], [[1, 5, bad, 1, 2], [1, 5, 4, 1, 3]], None,
                                       [[bad, 0, NAN, 1], [1, 0, 2, NAN]]):
        np.testing.assert_array_equal(means, [bad, 1])
        np.testing.assert_array_equal(joined, [1, 10, 4 if bad == -INF else bad, 1, 3])
        np.testing.assert_array_equal(table, [[bad, 0, NAN, 1], [1, 0, 2, NAN]])


def test_losses_alone_are_joined_where_nothing_else_is():
    for means, *_ in join([[1.0], [3.0]], None, extremes=Extremes()):
        assert means.tolist() == [2.0]


def test_the_spread_without_anything_else():
    for means, *_, table in join([[1.0], [3.0]], None, None, [[1, 5, 0, 0], [3, 4, 0, 1]], Extremes()):
        assert means.tolist() == [2.0] and table.tolist() == [[1, 5, 0, 0], [3, 4, 0, 1]]


# No subnormal ones: a processor may be set to make zeros of them, by a library and at any time.
number = st.floats(-100, 100, width=32, allow_subnormal=False) | st.sampled_from([NAN, INF, -INF])
seconds = st.floats(0, 100, width=32, allow_subnormal=False) | st.just(NAN)


@settings(max_examples=30)
@given(st.lists(st.tuples(number, number, seconds, seconds), min_size=2, max_size=9))
def test_spread_is_what_a_loop_finds(rows):
    found = Spread(len(rows))(Tensor(np.array(rows, np.float32))).asnumpy().reshape(3, 4)
    for i, (smallest, largest, rank, column) in enumerate(zip(*found, zip(*rows))):
        known = [value for value in column if value == value]
        if i < 2:
            score = [value if abs(value) < INF else INF for value in column]
            expected = [min(known, default=INF), max(column) if len(known) == len(column) else NAN, score.index(max(score))]
        else:  # what hosts tell, or do not
            expected = [min(known), max(known), column.index(max(known))] if known else [NAN] * 3
        np.testing.assert_array_equal([smallest, largest, rank], expected)


def test_times_that_no_rank_knows_are_absent():
    schema = Schema([Metric("step", "step", "global", "identical"), *Spread.metrics()])
    told = [name for name in schema.names if name.endswith(("step_time", "data_wait"))]
    assert len(told) == 6 and [schema[name].unit for name in told] == ["s"] * 4 + ["rank"] * 2
    vector = np.arange(13.0)
    assert schema.unpack(vector) == dict(zip(schema.names, vector))
    vector[[3, 7, 11]] = NAN  # step_time; a loss that is NaN is a value
    vector[1] = NAN
    values = schema.unpack(vector)
    assert set(schema.names) - set(values) == {f"rank/{what}/step_time" for what in ("min", "max", "argmax")}
    assert np.isnan(values["rank/min/loss"]) and values["rank/argmax/data_wait"] == 12


def test_in_a_single_process_ranks_has_no_effect_and_says_so(told):
    network = MLP()
    InstrumentedStep(network, adam(network), ranks=True)
    assert told == ["UserWarning: ranks=True has no effect: this is no data parallel job of several processes."]
    told.clear()
    network = MLP()
    step = upgrade(nn.TrainOneStepCell(network, adam(network)), StepOptions(ranks=True, scope="global"))
    assert not step.joins and len(told) == 1 and "ranks=True has no effect" in told[0]
    told.clear()


@pytest.mark.parametrize("scope", ["global", "local"])
def test_in_a_single_process_the_scope_changes_the_schema_alone(scope):
    network = MLP()
    step = InstrumentedStep(network, adam(network), scope=scope)
    assert not step.joins
    assert {metric.scope for metric in step.schema if metric.name.startswith(("loss", "activation"))} == {scope}


@pytest.mark.parametrize("kind", ["instrumented", "upgraded"])
def test_processes_that_train_by_themselves_have_numbers_of_their_own(kind, monkeypatch):
    monkeypatch.setattr(_compat, "rank_and_size", lambda: (1, 4))  # as under a launcher, in the mode stand_alone
    network = MLP()
    step = (InstrumentedStep(network, adam(network)) if kind == "instrumented"
            else upgrade(nn.TrainOneStepCell(network, adam(network)), StepOptions()))
    assert {metric.scope for metric in step.schema} == {"local"}
    assert "identical" not in {metric.merge for metric in step.schema}


def test_a_wrong_scope_is_refused():
    network = MLP()
    with pytest.raises(ValueError, match="`scope` must be 'global' .* but it is 'all'"):
        InstrumentedStep(network, adam(network), scope="all")
