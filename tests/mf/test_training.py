"""MindFormers' Trainer with the callback, against the same run without it, and against NumPy.

A run takes about ten seconds, nearly all of it the compiler's; so several tests look at one.
"""
from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import reference

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

CLIPS = {"use_clip_grad": True, "max_grad_norm": 0.5}
EVERYTHING = {"activations": "leaves", "activation_gradients": True, "counts": True, "updates": True, "moments": True,
              "spike_window": 3, "window": 8,
              "histograms": [{"kind": "weight", "pattern": "wq", "every": 2}, {"kind": "activation", "pattern": "lm_head",
                                                                               "every": 1}]}


def records(folder):
    [file] = folder.glob("metrics-*.jsonl")
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def same(left, right):
    """Whether two runs ended with the same weights and the same state of the optimizer, to the bit."""
    assert left.keys == right.keys
    return all(np.array_equal(left.after[name], right.after[name], equal_nan=True) for name in left.keys)


def check_outputs(left, right):
    for one, other in zip(left.outputs, right.outputs):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            assert type(a) is type(b)
            assert a is None or (a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=True))


def check_twin(trainer, run, call, batches, tolerance=2e-6):
    """Everything that the vector of a call says of loss, gradients, weights and activations, computed again in float64.

    The tolerance is that of two orders of float32 sums, of which the compiler and PyNative mode choose their own.
    """
    losses, gradients, outputs = trainer.reference(run, call, batches)
    values = run.vectors[call]
    assert values["loss"] == pytest.approx(sum(losses), rel=tolerance)
    assert values["grad/norm"] == pytest.approx(reference.norm(*gradients.values()), rel=tolerance)
    for name, gradient in gradients.items():
        # A gradient that is a difference of large numbers has their rounding, not its own.
        assert values[f"grad/norm/{name}"] == pytest.approx(reference.norm(gradient), rel=1e-4, abs=1e-8), name
    weights = run.before[call]
    for name, weight in weights.items():
        assert values[f"weight/norm/{name}"] == pytest.approx(reference.norm(weight), rel=tolerance), name
    measured = [name.split("/", 2)[2] for name in values if name.startswith("activation/rms/")]
    for name in measured:
        output = np.stack(outputs[name])
        assert values[f"activation/count/{name}"] == len(output)
        assert values[f"activation/rms/{name}"] == pytest.approx(np.sqrt(np.mean(output ** 2)), rel=1e-5), name
        assert values[f"activation/absmax/{name}"] == pytest.approx(np.mean([np.abs(one).max() for one in output]), rel=1e-5)
        assert values[f"activation/mean/{name}"] == pytest.approx(output.mean(), abs=1e-6), name
    return measured


def norm_of(outputs):
    """The gradient norm that MindFormers returns: None without clipping, and up to 1.2."""
    return None if len(outputs) == 4 or outputs[4] is None else outputs[4].item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mindformers")


@pytest.fixture(scope="module")
def stock(trainer, folder):
    return trainer.run(folder / "stock", stock=True, batches=6)


@pytest.fixture(scope="module")
def measured(trainer, folder):
    return trainer.run(folder / "measured", batches=6, callbacks=[
        *trainer.with_monitor(folder / "runs" / "measured", **EVERYTHING),
        {"type": trainer.CHECKPOINTS, "directory": str(folder / "checkpoints"),
         "prefix": "tiny", "save_checkpoint_steps": 3, "integrated_save": False,
         "async_save": False}])


def test_the_step_is_upgraded_in_place(trainer, measured):
    assert type(measured.step).__name__ == "MFInstrumentedStep"
    assert isinstance(measured.step, trainer.MFTrainOneStepCell)


def test_training_is_what_it_was_to_the_bit(stock, measured):
    assert same(stock, measured)


def test_the_tuple_is_element_for_element_what_it_was(stock, measured):
    assert len(measured.outputs) == 6
    check_outputs(stock, measured)


def test_what_is_measured_is_in_no_checkpoint(stock, measured, folder):
    import mindspore as ms

    [*_, file] = sorted((folder / "checkpoints").rglob("tiny*.ckpt"))
    assert not [name for name in ms.load_checkpoint(str(file)) if "instrument" in name]
    assert not [name for name in measured.keys if "instrument" in name]


@pytest.mark.parametrize("call", [0, 2, 5])
def test_numbers_equal_numpy(trainer, measured, call):
    names = check_twin(trainer, measured, call, trainer.tokens(6)[call:call + 1])
    assert {"model.tok_embeddings", "lm_head", "model.layers.0.attention.wq"} <= set(names)


def test_numbers_equal_those_of_mindformers(measured):
    for outputs, values in zip(measured.outputs, measured.vectors):
        assert values["loss"] == outputs[0].item()
        norm = values["grad/norm"] if norm_of(outputs) is None else norm_of(outputs)
        assert values["grad/norm"] == pytest.approx(norm, rel=1e-6)  # another order of the same float32 sums
        assert values["grad/norm_clipped"] == pytest.approx(min(0.5, norm), rel=1e-5)
        assert (values["overflow"], values["skipped"], values["loss_scale"]) == (0, 0, 1)


def test_updates_and_moments(measured):
    for call, values in enumerate(measured.vectors):
        before, after = measured.before[call], measured.before[call + 1]
        assert values["step"] == call + 1
        change = reference.norm(*(after[name].astype(np.float64) - before[name] for name in before))
        assert values["update/norm"] == pytest.approx(change, rel=1e-4, abs=1e-12)  # a difference of rounded weights
        assert (values["moment1/norm"] > 0) == (call > 0)


def test_histograms_and_window(measured, trainer):
    rows, overwritten = measured.step.read_window(after=0)
    assert list(rows[:, 0]) == [1, 2, 3, 4, 5, 6] and overwritten == 0
    counted = [measured.step.schema.histograms(row) for row in rows]
    name = "histogram/weight/model.layers.0.attention.wq.weight"
    assert [name in each for each in counted] == [True, True, False, True, False, True]
    assert counted[0][name].sum() == trainer.WIDTH ** 2


def test_records(measured, folder):
    lines = records(folder / "runs" / "measured")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line, outputs, values in zip(lines, measured.outputs, measured.vectors):
        assert line["loss"] == outputs[0].item() and line["grad/norm"] == values["grad/norm"]
        rate = line.get("learning_rate")
        assert rate is None or rate == pytest.approx(outputs[3].item(), rel=1e-6)  # a schedule, evaluated again
    assert sum("learning_rate" in line for line in lines) >= 5


def test_settings_are_printed_once_and_nothing_is_warned_of(measured):
    assert not [message for message in measured.messages if "nstrument" in message]


def test_step_numbers_go_on_after_a_resume(trainer, measured, folder):
    [checkpoint] = (folder / "checkpoints").rglob("tiny*-1_3.ckpt")
    (folder / "third" / "rank_0").mkdir(parents=True)
    shutil.copy(checkpoint, folder / "third" / "rank_0")  # alone, so that it is the last one
    changes = {"load_checkpoint": str(folder / "third")}
    steps = [4, 5, 6]
    if trainer.TASK:  # 0.8 goes on with the next epoch, and takes a directory for the shards of a distributed checkpoint
        changes = {"load_checkpoint": str(folder / "third" / "rank_0" / checkpoint.name), "runner_config": {"epochs": 2}}
        steps = [4, 5, 6, 7, 8, 9]
    resumed = trainer.run(folder / "resumed", batches=6, sets_weights=False, resume_training=True,
                          callbacks=trainer.with_monitor(folder / "runs" / "resumed"), **changes)
    assert [values["step"] for values in resumed.vectors] == steps
    assert [line["step"] for line in records(folder / "runs" / "resumed")] == steps
    for now, then in zip(resumed.vectors, () if trainer.TASK else measured.vectors[3:]):
        assert now["loss"] == pytest.approx(then["loss"], rel=1e-6)


def test_pynative_mode(trainer, folder):
    stock = trainer.run(folder / "pynative_stock", mode="pynative", stock=True)
    ours = trainer.run(folder / "pynative", mode="pynative", callbacks=trainer.with_monitor(
        folder / "runs" / "pynative", activations=["attention$", "lm_head"], activation_gradients=True))
    assert (stock.mode, ours.mode) == (trainer.ms.PYNATIVE_MODE, trainer.ms.PYNATIVE_MODE)
    if not same(stock, ours):  # on 2.7 the first run of a process differs in the last bit from those after it
        stock = trainer.run(folder / "pynative_again", mode="pynative", stock=True)
    assert same(stock, ours)
    check_outputs(stock, ours)
    for call in (0, 3) if trainer.TRAINS_IN_PYNATIVE else (0,):
        assert len(check_twin(trainer, ours, call, trainer.tokens(4)[call:call + 1])) == 3


def test_dynamic_loss_scale_in_float16(trainer, folder):
    changes = {"model": {"model_config": {"compute_dtype": "float16"}},
               "runner_wrapper": {"scale_sense": {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 2 ** 22,
                                                  "scale_factor": 4, "scale_window": 2}}}
    stock = trainer.run(folder / "half_stock", batches=8, stock=True, **changes)
    ours = trainer.run(folder / "half", batches=8, callbacks=trainer.with_monitor(folder / "runs" / "half"), **changes)
    assert same(stock, ours)
    check_outputs(stock, ours)
    overflows = [values["overflow"] for values in ours.vectors]
    assert overflows[0] == 1 and 0 in overflows  # or this run tests nothing
    scale = 2.0 ** 22
    good = 0
    for outputs, values in zip(ours.outputs, ours.vectors):
        assert values["loss_scale"] == scale  # the one that this step used
        assert values["overflow"] == values["skipped"] == float(outputs[1])
        if values["overflow"]:
            scale, good = max(scale / 4, 1), 0
            assert not np.isfinite(values["grad/norm"])
        else:
            good += 1
            scale, good = (scale * 4, 0) if good == 2 else (scale, good)
            if norm_of(outputs) is not None:
                assert values["grad/norm"] == pytest.approx(norm_of(outputs), rel=1e-6)  # MindFormers' is unscaled too


def test_micro_batches_without_clipping(trainer, folder, monkeypatch):
    if not hasattr(trainer.BaseTrainer, "_check_grad_accumulation_steps"):
        pytest.skip("this MindFormers accumulates no gradients")
    # MindFormers accumulates in semi-automatic parallel mode alone, which no CPU has; the cell for it runs anywhere.
    monkeypatch.setattr(trainer.BaseTrainer, "_check_grad_accumulation_steps", lambda self: None)
    changes = {"runner_config": {"gradient_accumulation_steps": 2}, "runner_wrapper": {"use_clip_grad": False}}
    ours = trainer.run(folder / "micro_batches", batches=6, callbacks=trainer.with_monitor(folder / "runs" / "micro_batches"),
                       **changes)
    assert [norm_of(outputs) for outputs in ours.outputs] == [None] * 3  # MindFormers has no gradient norm here
    assert "grad/norm_clipped" not in ours.vectors[0]
    for call in (0, 2):
        names = check_twin(trainer, ours, call, trainer.tokens(6)[2 * call:2 * call + 2])
        assert {"model.layers.0", "model.layers.1", "model.tok_embeddings", "lm_head"} == set(names)


def test_recompute(trainer, folder):
    changes = {"recompute_config": {"recompute": True}}
    stock = trainer.run(folder / "recompute_stock", batches=3, stock=True, **changes)
    ours = trainer.run(folder / "recompute", batches=3, callbacks=trainer.with_monitor(
        folder / "runs" / "recompute", activations=["layers.\\d$", "feed_forward$"]), **changes)
    assert same(stock, ours)
    assert sum(name.startswith("activation/rms/") for name in ours.vectors[2]) == 4
    if trainer.TRAINS_IN_PYNATIVE:  # 2.0.0 refuses recompute there, where the twin is computed
        check_twin(trainer, ours, 2, trainer.tokens(3)[2:])


def test_lora(trainer, folder):
    pet = {"pet_type": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ".*wq|.*wv"}
    changes = {"model": {"model_config": {"pet_config": pet}}}
    stock = trainer.run(folder / "lora_stock", batches=3, stock=True, **changes)
    ours = trainer.run(folder / "lora", batches=3, callbacks=trainer.with_monitor(folder / "runs" / "lora"), **changes)
    is_exact = trainer.ms.__version__ != "2.0.0"
    if is_exact:
        assert same(stock, ours)
    else:
        # With frozen weights it adds the gradients of a tensor that is used twice in another order where a cell is measured;
        # 0.8 does so in float16.
        assert all(np.allclose(stock.after[name], ours.after[name], rtol=2 ** -9, atol=2e-6) for name in stock.keys)
    values = ours.vectors[2]
    trained = [parameter.name for parameter in ours.step.weights]
    assert trained and all("lora" in name for name in trained)
    assert {name[10:] for name in values if name.startswith("grad/norm/")} == set(trained)
    assert {name[12:] for name in values if name.startswith("weight/norm/")} == set(ours.before[0])
    if is_exact:
        check_twin(trainer, ours, 2, trainer.tokens(3)[2:])


def test_the_wrapper_takes_the_options_of_the_step(trainer, folder, stock, capsys):
    changes = {"runner_wrapper": {"type": "MFInstrumentedStep", "activations": ["lm_head"], "every": 2, "counts": None}}
    callbacks = trainer.with_monitor(folder / "runs" / "wrapper", counts=True)
    ours = trainer.run(folder / "wrapper", batches=6, callbacks=callbacks, **changes)
    assert same(stock, ours)
    check_outputs(stock, ours)
    assert [values["step"] for values in ours.vectors] == [1, 2, 2, 4, 4, 6]
    assert [line["step"] for line in records(folder / "runs" / "wrapper")] == [1, 2, 4, 6]
    assert [name for name in ours.vectors[0] if name.startswith("activation/rms/")] == ["activation/rms/lm_head"]
    assert any("counts have no effect" in message for message in ours.messages)
    output = capsys.readouterr().out
    assert output.count("MFInstrumentedStep: ") == 1 and "activations=['lm_head'], " in output and "every=2" in output
    check_twin(trainer, ours, 3, trainer.tokens(6)[3:4])


def test_a_step_of_an_unknown_class_is_left_alone(trainer, folder):
    class Own(trainer.MFTrainOneStepCell, trainer.OnCpu):
        start_overflow_check = trainer.OnCpu.start_overflow_check
        get_overflow_status = trainer.OnCpu.get_overflow_status

    trainer.register_wrapper(Own)
    ours = trainer.run(folder / "unknown", callbacks=trainer.with_monitor(folder / "runs" / "unknown"),
                       runner_wrapper={"type": "Own"})
    assert type(ours.step) is Own
    [message] = [message for message in ours.messages if "cannot measure" in message]
    assert "Own" in message and "left alone" in message and "gradient norm before clipping" in message
    lines = records(folder / "runs" / "unknown")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line, outputs in zip(lines, ours.outputs):
        assert (line["loss"], line.get("grad/norm"), line["loss_scale"], line["overflow"]) == (
            outputs[0].item(), norm_of(outputs), 1, 0)


def test_a_monitor_made_in_code_beside_the_state_monitor_of_mindformers(trainer, folder, monkeypatch):
    if trainer.TrainingStateMonitor is None:
        pytest.skip("this MindFormers has no TrainingStateMonitor")
    theirs = []
    monkeypatch.setattr(trainer.TrainingStateMonitor, "_output",
                        lambda self, tag, data, step, formats: theirs.append((tag, float(data))))
    monitor = trainer.TrainingMonitor(folder / "runs" / "state", measure=trainer.StepOptions(activations=None))
    ours = trainer.run(folder / "state", runner_wrapper={"local_norm": True}, more=[monitor], callbacks=[
        {"type": "MFLossMonitor"},
        {"type": "TrainingStateMonitor", "step_interval": 1, "config": {"weight_state_format": ["log"]}}])
    norms = [value for tag, value in theirs if tag == "weight_norm"]
    assert len(norms) == 4
    # Theirs is of the weights after the step; ours of those that it used.
    assert [values["weight/norm"] for values in ours.vectors[1:]] == pytest.approx(norms[:3], rel=1e-6)
    weights = [parameter.name for parameter in ours.step.weights]
    for outputs, values, line in zip(ours.outputs, ours.vectors, records(folder / "runs" / "state")):
        assert len(outputs) == 7 and len(outputs[5]) == len(weights)
        # Sums of the same float32 squares in another order; theirs of a parameter are the squares of norms.
        assert [values[f"grad/norm/{name}"] ** 2 for name in weights] == pytest.approx(list(outputs[5]), rel=1e-5, abs=1e-12)
        assert (line["loss"], line["grad/norm"]) == (outputs[0].item(), values["grad/norm"])


def test_a_rate_for_each_group(trainer, folder):
    if not trainer.has_grouped_rates():
        pytest.skip("this MindFormers has no grouped_lr_schedule")
    schedule = {"type": "CosineWithWarmUpLR", "lr_end": 1e-4, "warmup_steps": 2, "total_steps": 20}
    ours = trainer.run(folder / "groups", callbacks=trainer.with_monitor(folder / "runs" / "groups", activations="none"),
                       lr_schedule=None, grouped_lr_schedule={
                           "default": {**schedule, "learning_rate": 4e-3},
                           "grouped": [{**schedule, "learning_rate": 1e-3, "params": ["tok_embeddings"]}]})
    lines = records(folder / "runs" / "groups")
    assert (lines[1]["learning_rate/0"], lines[1]["learning_rate/1"]) == pytest.approx((0.5e-3, 2e-3))  # half of the warm-up
    for line, outputs in zip(lines, ours.outputs):
        assert line["learning_rate/1"] == pytest.approx(outputs[3].item(), rel=1e-6)  # the only one that MindFormers returns
