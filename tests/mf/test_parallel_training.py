"""MindFormers' Trainer in data parallel, two processes on a CPU: what is measured is that of one process on the joined batch.

One job makes all runs, since most of its time is the compiler's.
"""
from __future__ import annotations

import functools
import pathlib
import pickle

import numpy as np
import pytest

import instrument
import ranks
from instrument import _compat
from test_training import check_outputs, check_twin, norm_of, records, same

pytestmark = [pytest.mark.skipif(_compat.RELEASE.release < (2, 7), reason="2.0.0 has no msrun"),
              pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")]
CALLS, RANKS = 4, 2
MEASURED = ("global", "pynative")


@pytest.fixture(scope="module")
def job(trainer, tmp_path_factory):
    """`job(name, rank)`: what this rank did in a run of this name, and what there is to know of it besides."""
    folder = tmp_path_factory.mktemp("parallel")
    _, printed = ranks.job(pathlib.Path(__file__).with_name("parallel_rank.py"), RANKS, folder, str(folder))
    names = ("stock", "local", *MEASURED)
    assert sorted(path.name for path in folder.glob("*.pickle")) == sorted(
        f"{name}_{rank}.pickle" for name in names for rank in range(RANKS)), printed

    @functools.cache
    def run(name, rank):
        return pickle.loads((folder / f"{name}_{rank}.pickle").read_bytes())

    run.folder = folder
    return run


@pytest.fixture(scope="module")
def batches(job):
    """The joined batch of each step, int32 [rows, LENGTH + 1]."""
    rows = [job("global", rank)[1]["rows"] for rank in range(RANKS)]
    assert all(len(of_rank) == CALLS for of_rank in rows) and not np.array_equal(*rows)
    return [np.concatenate(parts) for parts in zip(*rows)]


@pytest.fixture(scope="module")
def joined(trainer, job, batches):
    """One process on the joined batches."""
    size = len(batches[0])
    assert size == RANKS * trainer.BATCH
    sizes = {"model": {"model_config": {"batch_size": size}}, "runner_config": {"batch_size": size},
             "train_dataset": {"batch_size": size}, "runner_wrapper": {"scale_sense": 4.0}}
    callbacks = trainer.with_monitor(job.folder / "runs" / "joined", activations="leaves", activation_gradients=True,
                                     updates=True, spike_window=2)
    return trainer.run(job.folder / "joined", rows=np.concatenate(batches), callbacks=callbacks, **sizes)


def tolerance(name, values):
    """Of float32 sums in another order."""
    kind, *rest = name.split("/", 2)
    if rest[:1] == ["mean"]:  # of numbers of both signs: it has the rounding of these
        return {"rel": 0, "abs": 1e-6 * values[f"{kind}/rms/{rest[1]}"]}
    # A small second moment magnifies the rounding of a gradient in AdamW's update, and a small deviation that of a score.
    return {"rel": 1e-5 if kind in ("update", "spike") else 2e-6, "nan_ok": True}


@pytest.mark.parametrize("name", MEASURED)
def test_each_number_is_that_of_one_process_on_the_joined_batch(trainer, job, joined, name):
    expected_mode = trainer.ms.GRAPH_MODE if name == "global" else trainer.ms.PYNATIVE_MODE
    for rank in range(RANKS):
        run, about = job(name, rank)
        assert about["step"] == "MFInstrumentedStep" and run.mode == expected_mode
        for call in range(CALLS):
            values, expected = run.vectors[call], joined.vectors[call]
            assert values["step"] == call + 1 and {name for name in values if name not in expected} == {
                "grad/norm_local", *(f"rank/{what}/{of}" for what in ("min", "max", "argmax")
                                     for of in ("loss", "grad/norm_local", *("step_time", "data_wait") * (call > 0)))}
            for each, number in expected.items():
                assert values[each] == pytest.approx(number, **tolerance(each, expected)), (each, call, rank)
    assert np.isfinite(run.vectors[-1]["spike/score"]) and run.vectors[-1]["update/norm"] > 0  # or this compares nothing


@pytest.mark.parametrize("name", MEASURED)
def test_numbers_equal_numpy(trainer, job, joined, batches, name):
    run, _ = job(name, 0)
    run.step = joined.step  # its network is computed again, with the weights that the rank had
    for call in (0, 3):
        assert "model.layers.0.attention.wq" in check_twin(trainer, run, call, batches[call][None])


def test_norms_over_ranks_are_those_of_mindformers_and_what_is_clipped(job):
    for name in ("local", *MEASURED):
        for rank in range(RANKS):
            run, _ = job(name, rank)
            for outputs, values in zip(run.outputs, run.vectors):
                if norm_of(outputs) is not None:
                    assert values["grad/norm"] == pytest.approx(norm_of(outputs), rel=1e-6)  # another order of the same sums
                assert values["grad/norm"] > 0.5 and values["grad/norm_clipped"] == pytest.approx(0.5, rel=1e-5)


def test_training_in_parallel_is_what_it_was_to_the_bit(job):
    for rank in range(RANKS):
        stock, about = job("stock", rank)
        assert about["step"] == "MFTrainOneStepCell"
        for name in ("local", "global"):
            assert same(stock, job(name, rank)[0])
            check_outputs(stock, job(name, rank)[0])
    for name in ("stock", "pynative"):
        assert same(job(name, 0)[0], job(name, 1)[0])


def test_by_default_each_rank_has_its_own_loss_and_activations(job, joined):
    own = [job("local", rank)[0] for rank in range(RANKS)]
    for call in range(CALLS):
        values = [run.vectors[call] for run in own]
        assert [each["loss"] for each in values] == [run.outputs[call][0].item() for run in own]
        assert values[0]["loss"] != values[1]["loss"] and values[0]["grad/norm"] == values[1]["grad/norm"]
        for cell in ("lm_head", "model.layers.1"):
            rms = [each[f"activation/rms/{cell}"] for each in values]
            assert rms[0] != rms[1]
            if cell == "lm_head":  # the other one is no leaf, which the joined run measures
                joined_rms = joined.vectors[call][f"activation/rms/{cell}"]
                assert np.sqrt(np.mean(np.square(rms))) == pytest.approx(joined_rms, rel=2e-6)


@pytest.mark.parametrize("name", ["local", *MEASURED])
def test_both_ranks_have_recorded_their_numbers(job, name):
    folder = job.folder / "runs" / name
    found = instrument.read(folder)
    assert set(found.ranks) == {1}
    lines = [records(folder), records(folder / "rank_1")]
    vectors = [job(name, rank)[0].vectors for rank in range(RANKS)]
    of_rank = {"loss", "activation/rms/lm_head"} if name == "local" else {"grad/norm_local"}
    for rank in range(RANKS):
        assert [line["step"] for line in lines[rank]] == [1, 2, 3, 4]
        for line, values in zip(lines[rank], vectors[rank]):
            assert {each: line[each] for each in of_rank} == {each: values[each] for each in of_rank}
            assert ("grad/norm" in line) == (rank == 0)  # one number for all is recorded once
            if rank == 0:
                assert line["grad/norm"] == values["grad/norm"] and line["loss"] == values["loss"]
