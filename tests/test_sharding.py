"""Norms of sharded parameters: the arithmetic on made-up shards, against the norm of the whole."""
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument import sharding


def shards(whole, parts, ranks):
    """What each rank holds of a parameter cut into so many equal parts, each on as many ranks: rank r has part r % parts."""
    pieces = np.split(whole.ravel(), parts)
    return [pieces[rank % parts] for rank in range(ranks)]


def measured(wholes, parts, ranks):
    """(sums after the AllReduce, local sizes, global sizes), as the ranks would have them."""
    held = [shards(whole, each, ranks) for whole, each in zip(wholes, parts)]
    return ([sum(np.sum(piece ** 2) for piece in of_ranks) for of_ranks in held], [of_ranks[0].size for of_ranks in held],
            [whole.size for whole in wholes])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_mix_of_sharded_and_replicated_parameters_has_the_norm_of_the_whole(ranks):
    random = np.random.default_rng(ranks)
    possible = [parts for parts in (1, 2, 4, 8) if ranks % parts == 0]
    for parts in itertools.product(possible, repeat=3):
        wholes = [random.normal(size=shape) for shape in ((8, 5), (16,), (2, 4, 3))]
        each, total = sharding.norms(*measured(wholes, parts, ranks), ranks)
        np.testing.assert_allclose(each, [np.linalg.norm(whole) for whole in wholes], rtol=1e-14)  # float64 rounding
        np.testing.assert_allclose(total, np.linalg.norm(np.concatenate([whole.ravel() for whole in wholes])), rtol=1e-14)
        assert sharding.replication(*measured(wholes, parts, ranks)[1:], ranks).tolist() == [ranks // part for part in parts]


def test_a_plain_norm_of_a_shard_is_wrong_and_so_is_the_sum_without_replication():
    """What the formula is there for."""
    whole = np.arange(1.0, 9.0)
    sums, local, sizes = measured([whole, whole], [4, 1], 4)
    right = np.linalg.norm(whole)
    assert np.linalg.norm(shards(whole, 4, 4)[0]) < right < np.sqrt(sums[1])
    assert sharding.norms(sums, local, sizes, 4)[0] == pytest.approx([right, right])


@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 50))
def test_replication_from_one_to_all(cuts, copies, size):
    parts, ranks = 2 ** cuts, 2 ** (cuts + copies)
    assert sharding.replication([size], [size * parts], ranks).tolist() == [2 ** copies]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays(bad):
    each, total = sharding.norms([bad, 4.0], [2, 2], [2, 2], 1)
    assert not np.isfinite(each[0]) and each[1] == 2 and not np.isfinite(total)


@pytest.mark.parametrize("local, whole, ranks", [(3, 8, 4), (2, 8, 2), (0, 8, 4), (8, 4, 4), (2, 6, 4)])
def test_sizes_that_cannot_be_are_refused(local, whole, ranks):
    with pytest.raises(ValueError, match=f"parameter 1 of {whole} elements has {local} on this rank.*on {ranks} ranks"):
        sharding.norms([1.0, 1.0], [1, local], [1, whole], ranks)


def test_wrong_lengths_and_numbers_are_refused():
    with pytest.raises(ValueError, match=r"one number a parameter, but their shapes are \(2,\) and \(1,\)"):
        sharding.replication([1, 1], [1], 1)
    with pytest.raises(ValueError, match=r"one number a parameter, 1, but its shape is \(2,\)"):
        sharding.norms([1.0, 1.0], [1], [1], 1)
    with pytest.raises(ValueError, match="`ranks` must be a number of processes from 1, but it is 0"):
        sharding.replication([1], [1], 0)
