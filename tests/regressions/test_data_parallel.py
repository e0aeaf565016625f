"""Real processes on a CPU: what is measured is that of the joined batch, on every rank, and the one bad rank is named."""
import functools
import math
import pathlib

import mindspore as ms
import numpy as np
import pytest
from data_parallel_rank import CEILING

import instrument
import reference
from instrument import _compat, bins
from networks import MLP, mlp_batches
from ranks import job as job_of

HERE = pathlib.Path(__file__).parent
NEAR = 5e-6  # float32 forward, backward and reduction
CALLS = {"local": 4, "joined": 4, "summed": 8, "stock": 4, "scaled": 4}
# Mode, number of processes, and what they run. Four are slow on a machine of two cores, so that one run has to do.
JOBS = ("graph", 2, tuple(CALLS)), ("pynative", 2, tuple(CALLS)), ("graph", 4, ("joined",)), ("pynative", 4, ("joined",))

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(
    _compat.RELEASE.release < (2, 7), reason="2.0.0 has no msrun, and refuses PyNative data parallel on a CPU")]


class Job:
    """What the processes of a job told: `rows[name][rank]` is a list of one entry a call, and the directory they ran in."""

    def __init__(self, mode, ranks, runs, directory):
        self.ranks, self.directory = ranks, directory
        self.rows, printed = job_of(HERE / "data_parallel_rank.py", ranks, directory, mode, *runs)
        errors, self.weights = self.rows.pop("errors", []), self.rows.pop("weights", [])
        self.served = self.rows.pop("served", [])  # by Prometheus' writer, of each rank
        lengths = {name: [len(of_rank) for of_rank in rows] for name, rows in self.rows.items()}
        assert lengths == {name: [CALLS[name]] * ranks for name in runs}, f"{lengths}\n{printed}"
        assert errors == [[{}]] * ranks * ("local" in runs), printed

    def parts(self, array):
        """What each rank had of a joined array."""
        return np.split(np.asarray(array), self.ranks)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    @functools.cache
    def job(mode, ranks, runs):
        return Job(mode, ranks, runs, tmp_path_factory.mktemp(f"{mode}-{ranks}"))

    return job


@pytest.fixture(params=JOBS, ids=lambda job: f"{job[0]}-{job[1]}")
def job(request, jobs):
    return jobs(*request.param)


@pytest.fixture(params=JOBS[:2], ids=lambda job: job[0])
def pair(request, jobs):
    return jobs(*request.param)


def first_weights():
    weights = [p.asnumpy().astype(np.float64) for p in MLP().trainable_params()]
    ms.set_context(mode=ms.GRAPH_MODE)
    return weights


def clipped(gradients):
    """Gradients as the joined run's optimizer gets them."""
    factor = min(1, CEILING / reference.norm(*gradients))
    return [factor * each for each in gradients]


def near(value, rel=NEAR, absolute=1e-6):
    return pytest.approx(value, rel=rel, abs=absolute)


def test_norms_are_those_of_the_joined_batch_and_each_rank_records_its_own(pair):
    rows = pair.rows["local"]
    # Rank 0 has recorded what is one number for all, and each rank what is its own.
    run = instrument.read(pair.directory / "run")
    assert set(run.ranks) == set(range(1, pair.ranks)) and "grad/norm" in run and "grad/norm" not in run.ranks[1]
    for rank, recorded in ((0, run), *run.ranks.items()):
        for name in ("loss", "activation/rms/act"):
            assert recorded[name].value.tolist() == [values[name] for _, values, *_ in rows[rank]]
    assert run["grad/norm"].value.tolist() == [values["grad/norm"] for _, values, *_ in rows[0]]
    recorded = [run, *run.ranks.values()]
    for name in ("step_time", "data_wait"):  # known from step 2 on, and told with the step after
        told = [run[f"rank/{what}/{name}"] for what in ("min", "max", "argmax")]
        assert [each.step.tolist() for each in told] == [[3, 4]] * 3
        for i in (0, 1):
            known = [np.float32(each[name].value[i]) for each in recorded]
            assert [each.value[i] for each in told] == [min(known), max(known), np.argmax(known)]
    assert run["rank/argmax/data_wait"].value.tolist() == [1, 1] and min(run["rank/max/data_wait"].value) >= 0.2
    weights, history = first_weights(), []
    for i, (x, y) in enumerate(mlp_batches(4)):
        loss, gradients, outputs, _ = reference.MLP(weights).step(x, y)
        norm = reference.norm(*gradients)
        for rank in range(pair.ranks):
            own_loss, values, _, scopes = rows[rank][i]
            assert values["step"] == i + 1 and values["loss"] == near(own_loss)
            assert values["grad/norm"] == near(norm)
            assert values["grad/norm_clipped"] == near(min(norm, 0.5))
            assert values["weight/norm"] == near(reference.norm(*weights))
            assert values["update/norm"] == near(0.5 * min(norm, 0.5)) and values["skipped"] == 0
            if i < 2:
                assert np.isnan(values["spike/score"])
            else:  # of the loss of the joined batch, so that the ranks decide alike
                mean, deviation = np.mean(history[-2:], 0), np.std(history[-2:], 0)
                assert values["spike/score"] == near(np.max(([loss, norm] - mean) / deviation), rel=1e-3)
                assert values["spike/score"] == rows[1 - rank % 2][i][1]["spike/score"]
            own = reference.activation(pair.parts(outputs["act"])[rank])
            assert values["activation/rms/act"] == near(own["rms"])
            assert scopes["loss"] == ["local", "mean"] and scopes["activation/rms/act"] == ["local", "rms"]
        history.append([loss, norm])
        weights = [w - 0.5 * min(1, 0.5 / norm) * g for w, g in zip(weights, gradients)]


def test_each_rank_serves_its_own_numbers_at_a_port_of_its_own(pair):
    assert len({port for [[port, *_]] in pair.served}) == pair.ranks
    for rank, [[_, [line], has_norm]] in enumerate(pair.served):
        labels, value = line.split()
        assert f'rank="{rank}"' in labels and has_norm == (rank == 0)
        run = instrument.read(pair.directory / "run")
        recorded = run if rank == 0 else run.ranks[rank]
        assert float(value) in recorded["loss"].value[-2:].tolist()  # the last step is read when training ends


def test_everything_is_that_of_one_process_on_the_joined_batch(job):
    """Three steps, of which the spike score needs the first two."""
    weights, history = first_weights(), []
    for i, (x, y) in enumerate(mlp_batches(3)):
        loss, gradients, outputs, d_outputs = reference.MLP(weights).step(x, y)
        norm = reference.norm(*gradients)
        expected = {"step": i + 1, "loss": loss, "loss/part": np.sum(outputs["second"] - y) / job.ranks, "grad/norm": norm,
                    "grad/norm_clipped": reference.norm(*clipped(gradients)), "attention/count/probe": 1,
                    "overflow": 0, "skipped": 0,
                    **{f"attention/{name}/probe": each for name, each in reference.attention(outputs["second"]).items()}}
        for cell in ("first", "act", "second"):
            expected.update({f"activation/{name}/{cell}": each for name, each in reference.activation(outputs[cell]).items()})
            expected.update({f"activation_grad/{name}/{cell}": each
                             for name, each in reference.activation(d_outputs[cell]).items() if name != "count"})
        if i == 2:
            mean, deviation = np.mean(history, 0), np.std(history, 0)
            assert job.rows["joined"][0][i][1]["spike/score"] == near(np.max(([loss, norm] - mean) / deviation), rel=1e-3)
        counts = bins_of(outputs["act"])
        for rank in range(job.ranks):
            own_loss, values, histograms, _ = job.rows["joined"][rank][i]
            assert {name: values[name] for name in expected} == {name: near(each) for name, each in expected.items()}
            assert own_loss == near(np.mean((job.parts(outputs["second"] - y)[rank]) ** 2))  # what is returned is the rank's
            assert ("histogram/activation/act" in histograms) == (i != 2)
            if i != 2:
                assert histograms["histogram/activation/act"] == counts
            assert ("histogram/gradient/second.weight" in histograms) == (i == 0)
            if i == 0:  # of the reduced gradient; both signs together
                found = np.array(histograms["histogram/gradient/second.weight"][:bins.NONFINITE])
                found[bins.ZERO + 1:] += found[bins.ZERO - 1::-1]
                true = bins_of(np.abs(gradients[2]))
                assert found[bins.ZERO:].tolist() == true[bins.ZERO:bins.NONFINITE] and sum(found[bins.ZERO:]) == 128
        history.append([loss, norm])
        weights = [w - 0.5 * g for w, g in zip(weights, clipped(gradients))]


def test_gradients_are_clipped_by_the_norm_of_the_joined_batch(job):
    """Twice the joined norm is above the ceiling, and once below while some rank's own is above it; one step is skipped."""
    weights, norms = first_weights(), []
    for i, (x, y) in enumerate(mlp_batches(3)):
        gradients = reference.MLP(weights).step(x, y)[1]
        norms.append(reference.norm(*gradients))
        own = [values["grad/norm_local"] for [_, values, *_] in (rows[i] for rows in job.rows["joined"])]
        assert max(own) > CEILING and max(own) > 1.1 * norms[-1]  # or this tells nothing of the norm that clips
        for rows in job.rows["joined"]:
            assert rows[i][1]["grad/norm"] == near(norms[-1])
            assert rows[i][1]["grad/norm_clipped"] == near(min(norms[-1], CEILING))
        weights = [w - 0.5 * g for w, g in zip(weights, clipped(gradients))]
    assert [norm > CEILING for norm in norms] == [True, True, False]
    assert len(job.weights) == job.ranks and all(each == job.weights[0] for each in job.weights)  # the same to the bit
    for found, expected in zip(job.weights[0][0], weights):
        # Each step subtracts float32 gradients, whose rounding stays.
        assert np.allclose(found, expected, rtol=NEAR, atol=3e-6), np.abs(np.array(found) - expected).max()


@pytest.mark.parametrize("name", ["stock", "scaled"])
def test_a_stock_step_that_is_made_to_measure_is_joined_too(pair, name):
    weights, history = first_weights(), []
    for i, (x, y) in enumerate(mlp_batches(4)):
        loss, gradients, outputs, d_outputs = reference.MLP(weights).step(x, y)
        norm = reference.norm(*gradients)
        parts = [reference.MLP(weights).step(*each) for each in zip(pair.parts(x), pair.parts(y))]
        own = [(part[0], reference.norm(*part[1])) for part in parts]
        if name == "stock" or i % 2 or i == 0:  # the others are not measured with every=2
            history.append((loss, norm))
            expected = {"step": i + 1, "loss": loss, "grad/norm": norm, "weight/norm": reference.norm(*weights)}
            for cell in ("first", "act", "second"):
                expected.update({f"activation/{stat}/{cell}": each
                                 for stat, each in reference.activation(outputs[cell]).items()})
                expected.update({f"activation_grad/{stat}/{cell}": each
                                 for stat, each in reference.activation(d_outputs[cell]).items() if stat != "count"})
            for column, metric in enumerate(("loss", "grad/norm_local")):
                values = [each[column] for each in own]
                expected.update({f"rank/min/{metric}": min(values), f"rank/max/{metric}": max(values),
                                 f"rank/argmax/{metric}": np.argmax(values)})
            expected.update({"rank/min/step_time": 1, "rank/max/step_time": 2, "rank/argmax/step_time": 1,
                             "rank/max/data_wait": 0.5})
        for rank in range(pair.ranks):
            own_loss, values, histograms, scopes = pair.rows[name][rank][i]
            assert own_loss == near(own[rank][0])  # what the step returns is the rank's
            assert {each: values[each] for each in expected} == {each: near(value) for each, value in expected.items()}
            if name == "stock" or i % 2 or i == 0:
                assert values["grad/norm_local"] == near(own[rank][1])
            if name == "stock" and i != 2:
                assert histograms["histogram/activation/act"] == bins_of(outputs["act"])
            if name == "stock" and i == 2:
                mean, deviation = np.mean(history[:2], 0), np.std(history[:2], 0)
                assert values["spike/score"] == near(np.max((np.array([loss, norm]) - mean) / deviation), rel=1e-3)
            assert scopes["loss"] == scopes["activation/rms/act"] == ["global", "identical"]
        weights = [w - 0.5 * g for w, g in zip(weights, gradients)]


def bins_of(x):
    """Counts of magnitudes of what is not negative."""
    where = [bins.ZERO if value == 0 else bins.ZERO + 1 + math.floor(math.log2(value)) - bins.LOWEST for value in np.ravel(x)]
    return np.bincount(where, minlength=bins.BINS).tolist()


def test_all_ranks_have_the_same_numbers_of_scope_global(job):
    for name in {"joined", "summed"} & set(job.rows):
        for rows in zip(*job.rows[name]):
            scopes = rows[0][3]
            shared = [{metric: each for metric, each in values.items() if scopes[metric][0] == "global"}
                      for _, values, *_ in rows]
            assert all(repr(each) == repr(shared[0]) for each in shared[1:])  # the same to the bit; repr, because of NaN
            assert {metric for metric, scope in scopes.items() if scope[0] == "local"} == {"grad/norm_local"}
            assert scopes["activation/absmax/act"] == ["global", "identical"]


def test_the_spread_over_ranks_and_who_has_the_largest(job):
    weights = first_weights()
    for i, (x, y) in enumerate(mlp_batches(3)):
        own = [reference.MLP(weights).step(*part) for part in zip(job.parts(x), job.parts(y))]
        for kind, numbers in (("loss", [each[0] for each in own]),
                              ("grad/norm_local", [reference.norm(*each[1]) for each in own])):
            for rank in range(job.ranks):
                values = job.rows["joined"][rank][i][1]
                assert values[f"rank/min/{kind}"] == near(min(numbers)) and values[f"rank/max/{kind}"] == near(max(numbers))
                assert values[f"rank/argmax/{kind}"] == np.argmax(numbers)
                if kind != "loss":
                    assert values[kind] == near(numbers[rank])
        times = {name: value for name, value in job.rows["joined"][0][i][1].items() if "_time" in name or "_wait" in name}
        told = [3.0 - rank for rank in range(job.ranks) if rank != 1]  # from the second step on, and no rank waits
        assert times == ({"rank/min/step_time": min(told), "rank/max/step_time": 3, "rank/argmax/step_time": 0} if i else {})
        weights = [w - 0.5 * g for w, g in zip(weights, clipped(reference.MLP(weights).step(x, y)[1]))]


def test_nan_on_one_rank_names_that_rank_and_is_skipped_on_all(job):
    for rank in range(job.ranks):
        own_loss, values, histograms, _ = job.rows["joined"][rank][3]
        assert np.isnan(own_loss) == (rank == 1) and np.isnan(values["loss"]) and np.isnan(values["grad/norm"])
        assert values["overflow"] == values["skipped"] == 1
        assert values["rank/argmax/loss"] == values["rank/argmax/grad/norm_local"] == 1
        assert np.isnan(values["rank/max/loss"]) and np.isnan(values["rank/max/grad/norm_local"])
        others = [job.rows["joined"][other][3] for other in range(job.ranks) if other != 1]
        assert values["rank/min/loss"] == near(min(each[0] for each in others))
        assert values["rank/min/grad/norm_local"] == near(min(each[1]["grad/norm_local"] for each in others))
        assert np.isnan(values["grad/norm_local"]) == (rank == 1)
        # Only the labels were bad: activations are those of all ranks, and finite.
        assert values["activation/nonfinite/act"] == 0 and np.isfinite(values["activation/absmax/act"])
        assert values["activation_grad/nonfinite/second"] == 1 and np.isnan(values["activation_grad/absmax/second"])
        assert values["activation_grad/nonfinite_elements/second"] == 8 // job.ranks * 4
        assert sum(histograms["histogram/activation/act"]) == 8 * 32


def test_summed_gradients_two_calls_a_step_and_steps_that_are_not_measured(pair):
    weights, batches = first_weights(), mlp_batches(8)
    for rank in range(pair.ranks):
        steps = [values["step"] for _, values, *_ in pair.rows["summed"][rank]]
        assert steps == [0, 1, 1, 1, 1, 3, 3, 3]
    for at, calls in ((1, batches[:2]), (5, batches[4:6])):
        twins = [[reference.MLP(weights).step(*part) for part in zip(pair.parts(x), pair.parts(y))] for x, y in calls]
        # Each rank's mean over its calls; then the sum over ranks.
        own = [[np.mean(each, 0) for each in zip(*(call[rank][1] for call in twins))] for rank in range(pair.ranks)]
        total = [np.sum(each, 0) for each in zip(*own)]
        acts = np.concatenate([each[2]["act"] for call in twins for each in call])
        d_acts = np.concatenate([each[3]["act"] for call in twins for each in call])
        maxima = [np.mean([np.abs(call[rank][2]["act"]).max() for call in twins]) for rank in range(pair.ranks)]
        for rank in range(pair.ranks):
            values = pair.rows["summed"][rank][at][1]
            assert values["grad/norm"] == near(reference.norm(*total))
            assert values["grad/norm_local"] == near(reference.norm(*own[rank]))
            assert values["loss"] == near(np.mean([each[0] for call in twins for each in call]))
            assert values["activation/count/act"] == 2
            assert values["activation/rms/act"] == near(reference.activation(acts)["rms"])
            assert values["activation/mean/act"] == near(acts.mean())
            assert values["activation/absmax/act"] == near(max(maxima))
            assert values["activation_grad/rms/act"] == near(reference.activation(d_acts)["rms"])  # of the sum of losses
            assert values["update/norm"] == 0  # of a learning rate of 0
