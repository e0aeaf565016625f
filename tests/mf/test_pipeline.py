"""MindFormers' step for pipelines and accumulated gradients, measured: against NumPy, and against the step by itself.

It runs outside semi-automatic parallel here, which no CPU has; `pipelines.py` says what stands in for the compiler there.
"""
from __future__ import annotations

import json
import types
import warnings

import numpy as np
import pytest

import reference

pytestmark = [pytest.mark.core,
              pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")]
NAMES = ("first.weight", "first.bias", "second.weight", "second.bias")


@pytest.fixture
def pipelines(trainer):
    """What builds the step; where this MindFormers has one that can be measured."""
    if not trainer.instrument.mindformers.releases.PIPELINE_SHOWS_GRADIENTS:
        pytest.skip("this MindFormers has a pipeline step that cannot be measured")
    import pipelines
    return pipelines


class Run:
    """Three or more steps of one class, with what there is to know of each."""

    def __init__(self, pipelines, monkeypatch, *, measure=None, steps=3, network=None, rate=0.1, data=None, opt_shard=False,
                 **settings):
        from mindspore import Tensor, nn

        from instrument.upgrade import StepOptions, upgrade

        self.network = network = network or pipelines.Accumulating(1.0 if opt_shard else -3.0)
        optimizer = nn.Momentum(network.trainable_params(), rate, 0.9)
        cls = pipelines.StockOnCpu if measure is None else pipelines.MFPipelineWithLossScaleCell
        self.step = step = pipelines.build(monkeypatch, network, optimizer, cls=cls, **settings)
        step.opt_shard = opt_shard
        if measure is not None:
            upgrade(step, StepOptions(allow_unverified=True, **measure))
        self.outputs, self.before, self.vectors = [], [], []
        for x, y in data or pipelines.batches(steps):
            self.before.append([parameter.asnumpy().copy() for parameter in network.trainable_params()])
            self.outputs.append([plain(each) for each in step(Tensor(x), Tensor(y))])
            self.vectors.append(step.schema.unpack(step.snapshot()) if measure is not None else {})
        self.after = {name: parameter.asnumpy().copy() for name, parameter in step.parameters_dict().items()}


def plain(value):
    """A copy in NumPy; of a number or None itself, and of a tuple each element."""
    if isinstance(value, tuple):
        return np.array([plain(each) for each in value])
    return value.asnumpy().copy() if hasattr(value, "asnumpy") else value


def twin(before, batch, micro=2):
    """(loss, gradients, outputs by cell, gradients of outputs by cell): means over micro-batches, and one of each."""
    x, y = batch
    parts = [reference.MLP(before).step(*each) for each in zip(np.split(x, micro), np.split(y, micro))]
    gradients = [np.mean(each, axis=0) for each in zip(*(part[1] for part in parts))]
    outputs, deltas = ({name: np.stack([part[i][name] for part in parts]) for name in parts[0][i]} for i in (2, 3))
    return np.mean([part[0] for part in parts]), gradients, outputs, deltas


def check(run, batches, call, scale=1.0):
    """What a vector says, against the twin. The tolerance is that of float32 sums in another order."""
    loss, gradients, outputs, deltas = twin(run.before[call], batches[call])
    values = run.vectors[call]
    assert values["loss"] == pytest.approx(loss, rel=2e-6)
    assert run.outputs[call][0].item() == pytest.approx(2 * loss, rel=2e-6)  # the step itself returns the sum
    assert values["grad/norm"] == pytest.approx(reference.norm(*gradients), rel=2e-6)
    assert values["weight/norm"] == pytest.approx(reference.norm(*run.before[call]), rel=2e-6)
    for name, gradient, weight in zip(NAMES, gradients, run.before[call]):
        assert values[f"grad/norm/{name}"] == pytest.approx(reference.norm(gradient), rel=2e-6), name
        assert values[f"weight/norm/{name}"] == pytest.approx(reference.norm(weight), rel=2e-6), name
    for name, output in outputs.items():
        assert values[f"activation/count/{name}"] == 2
        assert values[f"activation/mean/{name}"] == pytest.approx(output.mean(), abs=1e-6), name
        assert values[f"activation/rms/{name}"] == pytest.approx(np.sqrt(np.mean(output ** 2)), rel=2e-6), name
        assert values[f"activation/absmax/{name}"] == pytest.approx(np.abs(output).max((1, 2)).mean(), rel=2e-6), name
        # Of the loss of each micro-batch.
        assert values[f"activation_grad/rms/{name}"] == pytest.approx(np.sqrt(np.mean(deltas[name] ** 2)), rel=2e-6), name
    assert values["loss_scale"] == scale
    assert values["step"] == call + 1


LEAVES = {"activations": ["first$", "act$", "second$"], "activation_gradients": True}


@pytest.mark.parametrize("opt_shard", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_numbers_equal_numpy(pipelines, monkeypatch, mode, clips, opt_shard):
    run = Run(pipelines, monkeypatch, measure=LEAVES, use_clip_grad=clips, max_grad_norm=0.25, scale_sense=8.0,
              opt_shard=opt_shard)
    assert type(run.step).__name__ == "MFInstrumentedPipelineStep"
    for call, (values, outputs) in enumerate(zip(run.vectors, run.outputs)):
        check(run, pipelines.batches(3), call, scale=8)
        assert values["grad/norm"] > 0.25
        assert ("grad/norm_clipped" in values) == clips
        if clips:
            assert values["grad/norm_clipped"] == pytest.approx(0.25, rel=1e-5)
            assert outputs[4].item() == pytest.approx(values["grad/norm"], rel=1e-6)
        assert (values["overflow"], values["skipped"]) == (0, 0)


@pytest.mark.parametrize("kind", ["PipelineCell", "GradAccumulationCell"])
@pytest.mark.parametrize("clips", [False, True])
def test_training_and_the_tuple_are_what_they_were(pipelines, monkeypatch, mode, clips, kind):
    settings = {"use_clip_grad": clips, "max_grad_norm": 0.25, "scale_sense": 8.0, "local_norm": clips,
                "wrap": getattr(pipelines.cell_wrapper, kind)}
    stock = Run(pipelines, monkeypatch, steps=5, **settings)
    measure = {**LEAVES, "updates": True, "moments": True, "counts": True}
    ours = Run(pipelines, monkeypatch, steps=5, measure=measure, **settings)
    same(stock, ours)
    assert not np.array_equal(stock.before[0][0], stock.before[-1][0])
    assert not [name for name in ours.after if "instrument" in name]


def test_the_trainer_makes_one(trainer, pipelines, monkeypatch, tmp_path):
    """MindFormers' own Trainer and a LLaMA. It trains by what differentiating returns, as with the optimizer parallel."""
    if not hasattr(trainer.BaseTrainer, "_check_grad_accumulation_steps"):
        pytest.skip("this MindFormers accumulates no gradients")
    pipelines.stand_alone(monkeypatch)
    monkeypatch.setattr(trainer.BaseTrainer, "_check_grad_accumulation_steps", lambda self: None)
    monkeypatch.setattr(pipelines.wrapper, "ParallelMode", types.SimpleNamespace(SEMI_AUTO_PARALLEL="stand_alone",
                                                                                 AUTO_PARALLEL="auto_parallel"))
    monkeypatch.setattr(pipelines.wrapper, "_get_enable_parallel_optimizer", lambda: True)
    changes = {"runner_config": {"gradient_accumulation_steps": 2}, "runner_wrapper": {
        "type": "MFPipelineWithLossScaleCell", "micro_batch_num": 2, "scale_sense": 16.0}}
    ours = trainer.run(tmp_path / "ours", batches=6, callbacks=trainer.with_monitor(
        tmp_path / "run", allow_unverified=True, activations=["lm_head"]), **changes)
    assert type(ours.step).__name__ == "MFInstrumentedPipelineStep"
    with monkeypatch.context() as patch:
        for name in ("start_overflow_check", "get_overflow_status"):
            patch.setattr(trainer.MFPipelineWithLossScaleCell, name, getattr(trainer.OnCpu, name))
        stock = trainer.run(tmp_path / "stock", batches=6, **changes)
    assert stock.keys == ours.keys
    assert all(np.array_equal(stock.after[name], ours.after[name]) for name in stock.keys)
    assert all(np.array_equal(a, b) for one, other in zip(stock.outputs, ours.outputs) for a, b in zip(one, other))
    for call in (0, 2):
        losses, gradients, outputs = trainer.reference(ours, call, trainer.tokens(6)[2 * call:2 * call + 2])
        values = ours.vectors[call]
        assert values["loss"] == pytest.approx(np.mean(losses), rel=2e-6)
        # The twin's gradients are float32, and those of two micro-batches can be of opposite signs.
        assert values["grad/norm"] == pytest.approx(reference.norm(*gradients.values()) / 2, rel=1e-5)
        assert values["activation/count/lm_head"] == len(outputs["lm_head"]) == 2
        assert values["activation/rms/lm_head"] == pytest.approx(np.sqrt(np.mean(np.square(outputs["lm_head"]))), rel=1e-5)
    [file] = (tmp_path / "run").glob("metrics-*.jsonl")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [line["grad/norm"] for line in lines] == [values["grad/norm"] for values in ours.vectors]


def same(stock, ours):
    """Equal to the bit: the tuples, the weights, the optimizer's state and the step's own."""
    assert sorted(stock.after) == sorted(ours.after)
    for name, value in stock.after.items():
        assert np.array_equal(value, ours.after[name], equal_nan=True), name
    for one, other in zip(stock.outputs, ours.outputs):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            assert type(a) is type(b)
            assert a is None or (a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=True))


@pytest.mark.parametrize("clips", [False, True])
def test_a_dynamic_loss_scale_and_an_overflow(pipelines, monkeypatch, mode, clips):
    from mindspore import nn

    def scaling():
        return nn.DynamicLossScaleUpdateCell(loss_scale_value=2.0 ** 127, scale_factor=2 ** 20, scale_window=2)

    data = pipelines.batches(6)
    data = [(100 * x, y) for x, y in data]  # for gradients that overflow float32 with the first scale
    stock = Run(pipelines, monkeypatch, data=data, use_clip_grad=clips, scale_sense=scaling(), rate=1e-5)
    ours = Run(pipelines, monkeypatch, data=data, use_clip_grad=clips, scale_sense=scaling(), rate=1e-5, measure={})
    same(stock, ours)
    assert [values["overflow"] for values in ours.vectors] == [1, 0, 0, 1, 0, 0]
    assert [values["skipped"] for values in ours.vectors] == [1, 0, 0, 1, 0, 0]
    scales = [2.0 ** power for power in (127, 107, 107, 127, 107, 107)]
    assert [values["loss_scale"] for values in ours.vectors] == scales  # the one that the step used
    for call, values in enumerate(ours.vectors):
        assert values["overflow"] == ours.outputs[call][1].item()
        if values["overflow"]:
            assert not np.isfinite(values["grad/norm"])
        else:
            _, gradients, *_ = twin(ours.before[call], data[call])
            assert values["grad/norm"] == pytest.approx(reference.norm(*gradients), rel=2e-6)


def test_a_step_that_is_skipped_for_its_norm(pipelines, monkeypatch, mode):
    import inspect

    if "use_skip_data_by_global_norm" not in inspect.signature(pipelines.MFPipelineWithLossScaleCell.__init__).parameters:
        pytest.skip("this MindFormers skips no data")
    data = pipelines.batches(4)
    data[2] = (10 * data[2][0], data[2][1])
    settings = {"data": data, "use_skip_data_by_global_norm": True, "global_norm_spike_threshold": 20.0}
    stock, ours = Run(pipelines, monkeypatch, **settings), Run(pipelines, monkeypatch, measure={}, **settings)
    same(stock, ours)
    assert [values["skipped"] for values in ours.vectors] == [0, 0, 1, 0]
    assert [values["overflow"] for values in ours.vectors] == [0] * 4
    assert np.array_equal(ours.before[2][0], ours.before[3][0])


@pytest.mark.parametrize("clips", [False, True])
def test_a_loss_per_token(pipelines, monkeypatch, mode, clips):
    settings = {"calculate_per_token_loss": True, "wrap": pipelines.wrapper.PipelineCellWithTwoOutput, "use_clip_grad": clips,
                "scale_sense": 4.0}
    tells = pipelines.TELLS_DIVISOR
    stock = Run(pipelines, monkeypatch, network=pipelines.PerToken(), **settings)
    measure = {**LEAVES, "activation_gradients": tells}
    ours = Run(pipelines, monkeypatch, network=pipelines.PerToken(), measure=measure, **settings)
    same(stock, ours)
    for call, values in enumerate(ours.vectors):
        loss, gradients, _, deltas = twin(ours.before[call], pipelines.batches(3)[call])
        assert values["loss"] == ours.outputs[call][0].item() == pytest.approx(loss, rel=2e-6)
        assert values["grad/norm"] == pytest.approx(reference.norm(*gradients), rel=2e-6)
        if tells:  # of the whole loss, of which a micro-batch has half of the tokens
            rms = np.sqrt(np.mean((deltas["second"] / 2) ** 2))
            assert values["activation_grad/rms/second"] == pytest.approx(rms, rel=2e-6)


def test_losses_that_mindformers_keeps_apart(trainer, pipelines, monkeypatch, mode):
    number = trainer.number_of_parts()
    if not number:
        pytest.skip("this MindFormers keeps no losses apart")
    monkeypatch.setattr(pipelines.wrapper, "is_legacy_model", lambda: False)
    monkeypatch.setattr(pipelines.Parts, "get_gpt_transformer_config", lambda self: types.SimpleNamespace(
        moe_router_load_balancing_type="none", experimental_attention_variant=None))
    settings = {"wrap": pipelines.wrapper.PipelineCellWithMultiOutputs, "scale_sense": 4.0}
    stock = Run(pipelines, monkeypatch, network=pipelines.Parts(number), **settings)
    ours = Run(pipelines, monkeypatch, network=pipelines.Parts(number), measure=LEAVES, **settings)
    same(stock, ours)
    for call, values in enumerate(ours.vectors):
        loss, gradients, *_ = twin(ours.before[call], pipelines.batches(3)[call])  # a quarter of the sum over the 4 elements
        assert values["loss"] == pytest.approx(4 * loss, rel=2e-6)
        assert values["grad/norm"] == pytest.approx(4 * reference.norm(*gradients), rel=2e-6)
        assert "loss/lm" not in values


def test_every_and_a_window(pipelines, monkeypatch, mode):
    stock = Run(pipelines, monkeypatch, steps=5)
    ours = Run(pipelines, monkeypatch, steps=5, measure={"every": 2, "window": 4, "spike_window": 2})
    same(stock, ours)
    assert [values["step"] for values in ours.vectors] == [1, 2, 2, 4, 4]
    rows, overwritten = ours.step.read_window()
    assert list(rows[:, 0]) == [1, 2, 4] and overwritten == 0
    for call in (0, 1, 3):
        _, gradients, *_ = twin(ours.before[call], pipelines.batches(5)[call])
        assert ours.vectors[call]["grad/norm"] == pytest.approx(reference.norm(*gradients), rel=2e-6)


def test_it_is_refused_without_allow_unverified(trainer, pipelines, monkeypatch):
    network = pipelines.Accumulating()
    step = pipelines.build(monkeypatch, network, trainer.nn.SGD(network.trainable_params()))
    for options in (None, trainer.StepOptions(activations=LEAVES["activations"])):
        with pytest.raises(trainer.CannotUpgrade, match="semi-automatic parallel.*allow_unverified: True.*overflow flag"):
            trainer.upgrade(step, options)
        assert type(step) is trainer.MFPipelineWithLossScaleCell
    assert not [name for name, cell in network.cells_and_names() if "_instrument_class" in vars(type(cell))]


def test_in_semi_automatic_parallel_norms_are_of_whole_tensors_and_the_rest_of_shards(trainer, pipelines, monkeypatch, told):
    def wrap(network, micro_batches):  # as the Trainer does there
        return pipelines.cell_wrapper._VirtualDatasetCell(pipelines.cell_wrapper.GradAccumulationCell(network, micro_batches))

    network = pipelines.Accumulating()
    step = pipelines.build(monkeypatch, network, trainer.nn.SGD(network.trainable_params()), wrap=wrap)
    trainer.ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    try:
        trainer.upgrade(step, trainer.StepOptions(allow_unverified=True, activations=["first$"]))
    finally:
        trainer.ms.reset_auto_parallel_context()
    assert "activation/rms/first" in step.schema  # as it is called in the network itself
    scopes = {metric.name: metric.scope for metric in step.schema}
    assert scopes["grad/norm"] == scopes["weight/norm/first.weight"] == "unverified"
    assert scopes["activation/rms/first"] == scopes["loss"] == "shard"
    told.clear()  # once a process, that nothing has been verified there


@pytest.mark.parametrize("rank, scheduler, known", [(0, "1f1b", False), (1, "1f1b", True), (0, "zero_bubble_v", True),
                                                   (1, "zero_bubble_v", False)])
def test_one_stage_of_a_pipeline(trainer, pipelines, monkeypatch, told, rank, scheduler, known):
    """What one of two stages measures. The step is called as if there was one: only its schema is of a stage."""
    network = pipelines.Accumulating()
    network.first.pipeline_stage, network.second.pipeline_stage = 0, 1
    for layer in (network.first, network.second):
        layer.bias.requires_grad = False  # a frozen weight can be one of another stage
    name = ("first", "second")[rank]
    step = pipelines.build(monkeypatch, network, trainer.nn.SGD(getattr(network, name).trainable_params(), 0.1))
    in_pipeline(trainer, monkeypatch, rank, scheduler)
    try:
        trainer.upgrade(step, trainer.StepOptions(
            allow_unverified=True, activations=LEAVES["activations"], spike_window=2))
    finally:
        trainer.ms.reset_auto_parallel_context()
    told.clear()
    names = set(step.schema.names)
    assert ("loss" in names) == known
    assert {each for each in names if each.startswith(("grad/norm/", "weight/norm/"))} == {
        f"grad/norm/{name}.weight", f"weight/norm/{name}.weight"}
    # The ReLU has no stage of its own: it is called where a cell around it says so, and here none does.
    assert {each[15:] for each in names if each.startswith("activation/rms/")} == {name, "act"}
    assert {metric.scope for metric in step.schema} == {"shard"}
    values = []
    for x, y in pipelines.batches(12):
        before = [parameter.asnumpy().copy() for parameter in network.get_parameters()]
        loss, *_ = step(trainer.Tensor(x), trainer.Tensor(y))
        values.append(step.schema.unpack(step.snapshot()))
        _, gradients, outputs, _ = twin(before, (x, y))
        norm = reference.norm(gradients[2 * rank])
        assert values[-1]["grad/norm"] == pytest.approx(norm, rel=2e-6)
        assert values[-1]["activation/absmax/act"] == pytest.approx(np.abs(outputs["act"]).max((1, 2)).mean(), rel=2e-6)
        assert values[-1].get("loss") == (pytest.approx(loss.item() / 2, rel=1e-6) if known else None)
    if not known:  # of the norm alone
        norms = [each["grad/norm"] for each in values]
        score = (norms[-1] - np.mean(norms[-3:-1])) / np.std(norms[-3:-1])
        assert values[-1]["spike/score"] == pytest.approx(score, rel=1e-3)  # a difference of near numbers


def in_pipeline(trainer, monkeypatch, rank, scheduler):
    """As in a process of a pipeline of two stages with one rank each; for MindSpore itself until steps are made."""
    monkeypatch.setattr("instrument._compat.sharded_by", lambda: "the parallel mode 'semi_auto_parallel'")
    monkeypatch.setattr("instrument._compat.rank_and_size", lambda: (rank, 2))
    trainer.ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", pipeline_stages=2,
        pipeline_config={"pipeline_interleave": scheduler != "1f1b", "pipeline_scheduler": scheduler})


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("allows", [False, True])
def test_what_the_monitor_records_on_a_stage(trainer, pipelines, monkeypatch, allows, rank):
    """The loss is on the last stage alone, and a mean over micro-batches as MFLossMonitor prints it."""
    network = pipelines.Accumulating()
    for name in () if allows else ("start_overflow_check", "get_overflow_status"):
        monkeypatch.setattr(trainer.MFPipelineWithLossScaleCell, name, getattr(trainer.OnCpu, name))
    step = pipelines.build(monkeypatch, network, trainer.nn.SGD(network.trainable_params(), 0.1))
    records = []
    monitor = trainer.instrument.mindformers.InstrumentMonitor(writers=[records.append], allow_unverified=allows)
    params = {"train_network": step, "network": step, "optimizer": step.optimizer, "cur_step_num": 0, "batch_num": 3,
              "epoch_num": 1, "cur_epoch_num": 1, "mode": "train"}
    context = trainer.RunContext(params)
    in_pipeline(trainer, monkeypatch, rank, "1f1b")
    monkeypatch.setattr(monitor, "rank", rank)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monitor.on_train_begin(context)
    finally:
        trainer.ms.reset_auto_parallel_context()
    messages = [str(each.message) for each in caught if "cannot measure" in str(each.message)]
    if allows:
        assert type(step).__name__ == "MFInstrumentedPipelineStep" and not messages
    else:
        assert type(step) is trainer.MFPipelineWithLossScaleCell
        assert len(messages) == 1 and "allow_unverified: True" in messages[0] and "left alone" in messages[0]
    for number, (x, y) in enumerate(pipelines.batches(3), 1):
        params["net_outputs"] = step(trainer.Tensor(x), trainer.Tensor(y))
        params["cur_step_num"] = number
        monitor.on_train_step_end(context)
    monitor.on_train_end(context)
    monitor.close()
    assert [record.step for record in records] == [1, 2, 3]
    for record in records:
        assert ("loss" in record.values) == (rank == 1)
        assert record.values["overflow"] == 0 and record.values["grad/norm"] > 0
    if rank == 1:
        assert records[-1].values["loss"] == pytest.approx(params["net_outputs"][0].item() / 2, rel=1e-6)
