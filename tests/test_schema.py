"""The schema: what each element of the vector is called, and the vector as named floats."""
import dataclasses
import math
import warnings

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor

from instrument import Metric, Schema

METRICS = [Metric("step", "step", "global", "identical"), Metric("loss", "loss", "local", "mean"),
           Metric("grad/norm", "1", "global", "identical"), Metric("grad/norm/dense.weight", "1", "global", "identical")]

names = st.text(min_size=1, max_size=20)
float32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


def named(*given_names):
    return Schema([Metric(name, "1", "local", "mean") for name in given_names])


def tapped(*cells, gradients=False):
    """The schema of a step with taps on these cells."""
    stats = ["activation/count", "activation/rms"] + ["activation_grad/rms"] * gradients
    return named("step", *(f"{stat}/{cell}" for cell in cells for stat in stats))


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


def test_order_is_the_vectors_order():
    schema = Schema(METRICS)
    assert schema.metrics == tuple(METRICS) == tuple(schema)
    assert schema.names == ("step", "loss", "grad/norm", "grad/norm/dense.weight")
    assert [schema.index(name) for name in schema.names] == list(range(len(schema))) == [0, 1, 2, 3]
    assert list(schema.unpack([4, 3, 2, 1]).items()) == list(zip(schema.names, [4.0, 3.0, 2.0, 1.0]))


def test_a_metric_is_found_by_name():
    schema = Schema(METRICS)
    assert schema["grad/norm"] is METRICS[2]
    assert "grad/norm" in schema
    assert "grad/norm/other" not in schema and 2 not in schema and METRICS[2] not in schema


def test_a_metric_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        METRICS[0].name = "other"


def test_names_are_unique():
    with pytest.raises(ValueError, match=r"occur twice: loss/a, loss/b\. Rename the parameter, the cell or the loss part"):
        named("loss/b", "loss/a", "step", "loss/a", "loss/b")


def test_index_of_an_unknown_name_lists_near_names():
    with pytest.raises(KeyError, match=r"no metric 'grad/norm/dense\.wieght'; near names: grad/norm/dense\.weight, grad/norm"):
        Schema(METRICS).index("grad/norm/dense.wieght")
    with pytest.raises(KeyError, match="near names: none"):
        Schema(METRICS)["0123456789"]


PACKED = {"list": list, "tuple": tuple, "float32": lambda vector: np.array(vector, np.float32), "float64": np.array,
          "Tensor": lambda vector: Tensor(vector, ms.float32)}


@pytest.mark.parametrize("kind", PACKED)
def test_unpacks_any_vector(kind):
    values = Schema(METRICS).unpack(PACKED[kind]([3.0, 0.5, -2.0, 1e10]))
    assert values == {"step": 3.0, "loss": 0.5, "grad/norm": -2.0, "grad/norm/dense.weight": 1e10}
    assert {type(value) for value in values.values()} == {float}


@given(st.dictionaries(names, float32, min_size=1, max_size=8))
def test_every_float32_comes_back_exactly(expected):
    schema = named(*expected)
    vector = np.array(list(expected.values()), np.float32)
    for values in (schema.unpack(vector), schema.unpack(Tensor(vector, ms.float32))):
        assert list(values) == list(expected)
        assert all(same(values[name], expected[name]) for name in expected)


def test_a_float32_is_not_rounded_to_its_shortest_decimal():
    assert named("x").unpack(np.array([0.1], np.float32)) == {"x": 0.10000000149011612}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_values(value):
    assert same(named("x", "y").unpack(np.array([1, value], np.float32))["y"], value)


@pytest.mark.parametrize("shape", [(3,), (5,), (0,), (), (4, 1), (1, 4)])
def test_wrong_length_says_the_right_one_and_the_one_given(shape):
    with pytest.raises(ValueError, match=r"of shape \(4,\).*shape is \(" + ", ".join(map(str, shape))):
        Schema(METRICS).unpack(np.zeros(shape, np.float32))


def test_one_copy_from_the_device():
    class OnDevice:
        copies = 0

        def asnumpy(self):
            self.copies += 1
            return np.zeros(4, np.float32)

    stats = OnDevice()
    Schema(METRICS).unpack(stats)
    assert stats.copies == 1


def test_values_do_not_follow_the_tensor():
    tensor = Tensor(np.zeros(4, np.float32))
    values = Schema(METRICS).unpack(tensor)
    tensor.asnumpy()[:] = 1  # a view on a CPU: this is how the next step writes into it
    assert set(values.values()) == {0.0}


def test_a_silent_cell_is_absent_and_never_zero():
    schema = tapped("a.b", "c", gradients=True)
    with pytest.warns(UserWarning, match=r"cell 'a\.b' was not measured.*`activations`"):
        values = schema.unpack(np.array([1, 0, np.nan, np.nan, 2, 5, 6], np.float32))
    assert values == {"step": 1, "activation/count/a.b": 0, "activation/count/c": 2, "activation/rms/c": 5,
                      "activation_grad/rms/c": 6}


def test_one_warning_a_cell_however_often_it_is_silent():
    schema = tapped("a", "b", gradients=True)
    silent, calling = np.zeros(7, np.float32), np.ones(7, np.float32)
    with pytest.warns(UserWarning) as caught:
        schema.unpack(silent)
        schema.unpack(calling)
        schema.unpack(silent)
    assert sorted(str(warning.message)[:8] for warning in caught) == ["cell 'a'", "cell 'b'"]
    assert {warning.filename for warning in caught} == {__file__}  # the warning points at the caller


def test_a_silent_cell_says_nothing_of_a_cell_whose_name_begins_alike():
    schema = tapped("block", "block.dense")
    with pytest.warns(UserWarning, match="cell 'block' was"):
        values = schema.unpack(np.array([1, 0, 3, 1, 4], np.float32))
    assert "activation/rms/block" not in values and values["activation/rms/block.dense"] == 4


def test_a_cell_that_fired_has_all_its_statistics_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = tapped("a", gradients=True).unpack(np.array([1, 1, 0, 0], np.float32))
    assert values == {"step": 1, "activation/count/a": 1, "activation/rms/a": 0, "activation_grad/rms/a": 0}


def test_activations_without_a_count_are_taken_as_they_are():
    assert named("activation/rms/a").unpack([0.0]) == {"activation/rms/a": 0.0}
