"""`run`: one run of MindFormers' Trainer, with what a test wants to know of it."""
from __future__ import annotations

import copy
import inspect
import os
import warnings
from dataclasses import dataclass, field

import mindformers
import mindspore as ms
import numpy as np
from mindformers import MindFormerConfig, Trainer, build_context
from mindformers.core import callback
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.trainer.base_trainer import BaseTrainer
from mindformers.wrapper import MFPipelineWithLossScaleCell, MFTrainOneStepCell  # noqa: F401
from mindspore import Tensor, nn, ops
from mindspore.mindrecord import FileWriter
from mindspore.train import Callback, RunContext  # noqa: F401

import instrument.mindformers  # noqa: F401
import old_layers
from instrument import Histogram, TrainingMonitor  # noqa: F401
from instrument.observer import Observer
from instrument.upgrade import CannotUpgrade, StepOptions, upgrade  # noqa: F401

old_layers.patch()
TrainingStateMonitor = getattr(callback, "TrainingStateMonitor", None)  # 1.6 and later

# Its spelling up to 1.1.
CHECKPOINTS = "CheckpointMonitor" if hasattr(callback, "CheckpointMonitor") else "CheckpointMointor"
# PyNative mode of MindSpore 2.0.0 hands MindFormers' loss what it has made of the first batch, for ever: the gradients of the
# stock step are wrong there, and so are those that are measured.
TRAINS_IN_PYNATIVE = ms.__version__ != "2.0.0"
# 0.8 merges the settings into those of a task, and its general one has no text.
TASK = {} if hasattr(mindformers, "__version__") else {"task": "text_generation"}

VOCABULARY, LENGTH, BATCH, WIDTH = 64, 16, 4, 32

DATASET = {"data_loader": {"type": "MindDataset", "dataset_dir": "", "shuffle": False}, "input_columns": ["input_ids"],
           "num_parallel_workers": 1, "python_multiprocessing": False, "drop_remainder": True, "batch_size": BATCH,
           "repeat": 1, "numa_enable": False, "prefetch_size": 1}
OPTIMIZER = {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
if not MindFormerRegister.is_exist(MindFormerModuleType.OPTIMIZER, "AdamW"):  # 0.8
    OPTIMIZER = {"type": "AdamWeightDecay", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01}
CONFIG = {
    "seed": 1, "use_legacy": True, "run_mode": "train", "output_dir": "", "load_checkpoint": "", "auto_trans_ckpt": False,
    "only_save_strategy": False, "resume_training": False, "use_legacy_format": True, "ckpt_use_legacy_format": True,
    "load_ckpt_format": "ckpt",
    "context": {"mode": 0, "device_target": "CPU", "device_id": 0, "save_graphs": False}, "use_parallel": False,
    "parallel": {"parallel_mode": 0, "gradients_mean": True, "enable_parallel_optimizer": False},
    "parallel_config": {"data_parallel": 1, "model_parallel": 1, "pipeline_stage": 1, "micro_batch_num": 1},
    "micro_batch_interleave_num": 1, "moe_config": {"expert_num": 1}, "recompute_config": {"recompute": False},
    "runner_config": {"epochs": 1, "batch_size": BATCH, "sink_mode": False, "sink_size": 1},
    "runner_wrapper": {"type": "MFTrainOneStepCell", "scale_sense": 1 if TASK else 1.0,  # 0.8 takes no float
                       "use_clip_grad": True, "max_grad_norm": 0.5},
    "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "tiny"}, "profile": False, "auto_tune": False,
    "train_dataset": DATASET, "train_dataset_task": {"type": "CausalLanguageModelDataset", "dataset_config": DATASET},
    "model": {"model_config": {
        "type": "LlamaConfig", "batch_size": BATCH, "seq_length": LENGTH, "hidden_size": WIDTH, "num_layers": 2,
        "num_heads": 4, "vocab_size": VOCABULARY, "multiple_of": 16, "rms_norm_eps": 1e-5, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "ignore_token_id": -100, "compute_dtype": "float32",
        "layernorm_compute_type": "float32",
        "softmax_compute_type": "float32", "rotary_dtype": "float32", "param_init_type": "float32", "use_past": False,
        "use_flash_attention": False, "fused_rms_norm": False, "use_rope_slice": True, "checkpoint_name_or_path": ""},
        "arch": {"type": "LlamaForCausalLM"}},
    "lr_schedule": {"type": "CosineWithWarmUpLR", "learning_rate": 3e-3, "lr_end": 1e-4, "warmup_steps": 2, "total_steps": 20},
    "layer_scale": False, "layer_decay": 0.65, "lr_scale": False, "lr_scale_factor": 256,
    "optimizer": OPTIMIZER,
    "callbacks": [{"type": "MFLossMonitor"}], "processor": {"return_tensors": "ms"}, "monitor_config": {"dump_path": ""},
}


def tokens(batches):
    """int32 [batches, BATCH, LENGTH + 1]: sequences that can be learned."""
    random = np.random.RandomState(0)
    start, stride = random.randint(3, VOCABULARY, (batches * BATCH, 1)), random.randint(1, 4, (batches * BATCH, 1))
    rows = (start + stride * np.arange(LENGTH + 1)) % (VOCABULARY - 3) + 3
    return rows.astype(np.int32).reshape(batches, BATCH, LENGTH + 1)


@dataclass
class Run:
    """What a run did, step by step."""

    numbers: list[int] = field(default_factory=list)  # of calls
    outputs: list[tuple] = field(default_factory=list)  # what the step returned
    before: list[dict] = field(default_factory=list)  # weights before each step
    vectors: list[dict] = field(default_factory=list)  # what the step measured; {} for a stock one
    after: dict = field(default_factory=dict)  # weights and the optimizer's state at the end
    keys: list[str] = field(default_factory=list)  # of a checkpoint
    messages: list[str] = field(default_factory=list)  # warnings
    step: nn.Cell | None = None
    mode: int | None = None  # in which the steps ran


class Probe(Callback):
    """Sets the weights to the same numbers in every run, and writes down what happens."""

    def __init__(self, run, sets_weights):
        super().__init__()
        self.run, self.sets_weights = run, sets_weights

    def on_train_begin(self, run_context):
        step = self.run.step = run_context.original_args().network
        if self.sets_weights:
            random = np.random.RandomState(7)
            for parameter in step.network.get_parameters():
                if parameter.ndim > 1:
                    parameter.set_data(Tensor(random.normal(size=parameter.shape) * 0.05, parameter.dtype))
        self.run.before.append(values_of(step.network))

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        step = self.run.step
        self.run.numbers.append(params.cur_step_num)
        self.run.mode = ms.get_context("mode")
        self.run.outputs.append(tuple(plain(each) for each in params.net_outputs))
        self.run.vectors.append(step.schema.unpack(step.snapshot()) if isinstance(step, Observer) else {})
        self.run.before.append(values_of(step.network))

    def on_train_end(self, run_context):
        self.run.after = {name: plain(parameter) for name, parameter in self.run.step.parameters_dict().items()}
        self.run.keys = sorted(self.run.after)


def plain(value):
    """A copy in NumPy, of float32 where NumPy has not the type."""
    if not hasattr(value, "asnumpy"):
        return value
    is_bfloat16 = value.dtype == getattr(ms, "bfloat16", None)
    return np.array((value.astype(ms.float32) if is_bfloat16 else value).asnumpy())


def values_of(network):
    return {parameter.name: plain(parameter) for parameter in network.get_parameters()}


def merged(config, changes):
    """A copy of nested settings with some of them changed."""
    config = copy.deepcopy(config)
    for key, value in changes.items():
        old = config.get(key)
        config[key] = merged(old if isinstance(old, dict) else {}, value) if isinstance(value, dict) else value
    return config


class OnCpu:
    """What the stock step needs to run on a CPU: its own operators that look for an overflow have no kernel there."""

    def start_overflow_check(self, pre_cond, compute_input):
        return Tensor([0] * 8, ms.int32), compute_input

    def get_overflow_status(self, status, compute_output):
        bad = ()
        for grad in compute_output:
            bad = bad + (ops.ReduceSum()(1.0 - ops.cast(ops.IsFinite()(grad), ms.float32)),)
        return ops.AddN()(bad) >= 1.0


def run(folder, *, batches=4, rows=None, mode="graph", stock=False, sets_weights=True, more=(), **changes):
    """Train, and say what happened.

    Args:
        rows: The sequences, int32 [any, LENGTH + 1], in place of the first `batches` of `tokens`.
        more: Callbacks that the caller has made.
        changes: Nested settings.
    """
    folder.mkdir(exist_ok=True, parents=True)
    file = str(folder / "data.mindrecord")
    writer = FileWriter(file, shard_num=1)
    writer.add_schema({"input_ids": {"type": "int32", "shape": [-1]}}, "tokens")
    writer.write_raw_data([{"input_ids": row} for row in (tokens(batches).reshape(-1, LENGTH + 1) if rows is None else rows)])
    writer.commit()
    config = merged(CONFIG, {"output_dir": str(folder / "output"), "context": {"mode": 0 if mode == "graph" else 1}})
    config["train_dataset"]["data_loader"]["dataset_dir"] = file
    config = merged(config, changes)
    config["train_dataset_task"]["dataset_config"] = config["train_dataset"]
    stock_methods = {name: getattr(MFTrainOneStepCell, name) for name in ("start_overflow_check", "get_overflow_status")}
    result = Run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if stock:
            for name in stock_methods:
                setattr(MFTrainOneStepCell, name, getattr(OnCpu, name))
        directory = os.getcwd()
        os.chdir(folder)  # 0.8 copies its configurations to where it is
        try:
            settings = MindFormerConfig(**config)
            build_context(settings)
            # 1.9 sets the mode of the first run of a process alone.
            ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
            trainer = Trainer(args=settings, callbacks=[Probe(result, sets_weights), *more], **TASK)
            trainer.train()
        finally:
            os.chdir(directory)
            for name, method in stock_methods.items() if stock else ():
                delattr(MFTrainOneStepCell, name)
                if method.__qualname__.startswith(MFTrainOneStepCell.__name__):
                    setattr(MFTrainOneStepCell, name, method)
            ms.set_context(mode=ms.GRAPH_MODE)
    result.messages = [str(each.message) for each in caught]
    return result


def with_monitor(folder, **settings):
    """The callbacks of a run that is recorded."""
    return [{"type": "MFLossMonitor"}, {"type": "InstrumentMonitor", "run_dir": str(folder), **settings}]


def register_wrapper(cls):
    MindFormerRegister.register_cls(cls, MindFormerModuleType.WRAPPER)


def reference(run_, call, batches):
    """Losses, gradients and outputs of cells of one call, in PyNative mode, by nothing of ours.

    Args:
        run_: The run; its network is used, and gets the weights that this call found.
        call: From 0.
        batches: int32 [micro-batches, rows, LENGTH + 1].

    Returns:
        (losses, gradients by parameter, summed over micro-batches; for each cell its outputs).
    """
    network = run_.step.observed_network()
    trained = run_.step.weights
    outputs, handles, total = {}, [], {}
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        for parameter in network.get_parameters():
            parameter.set_data(Tensor(run_.before[call][parameter.name], parameter.dtype))
        losses = [float(plain(network(Tensor(batch))).mean()) for batch in batches]
        if ms.__version__ == "2.0.0":  # PyNative mode there gives the first gradients again and again
            ms.set_context(mode=ms.GRAPH_MODE)

        def loss_of(x):
            return network(x)

        gradient_of = ms.grad(loss_of, None, trained)
        for batch in batches:
            for parameter, gradient in zip(trained, gradient_of(Tensor(batch))):
                total[parameter.name] = total.get(parameter.name, 0) + plain(gradient).astype(np.float64)
        ms.set_context(mode=ms.PYNATIVE_MODE)
        for name, cell in network.cells_and_names():
            def keep(cell, inputs, output, name=name):
                output = output[0] if isinstance(output, tuple) else output
                outputs.setdefault(name, []).append(plain(output).astype(np.float64))
            handles.append(cell.register_forward_hook(keep))
        for batch in batches:
            network(Tensor(batch))
    finally:
        for handle in handles:
            handle.remove()
        ms.set_context(mode=ms.GRAPH_MODE)
    return losses, total, outputs


def has_grouped_rates():
    """Whether MindFormers has `grouped_lr_schedule`: 1.9 and later."""
    return hasattr(BaseTrainer, "_create_grouped_lr_scheduler")


def number_of_parts():
    """How many losses MindFormers takes from a network of its new kind: 0 where it tells none, up to 1.6."""
    method = getattr(MFTrainOneStepCell, "grads_for_mcore", None)
    return 0 if method is None else 4 if "indexer_loss" in inspect.getsource(method) else 3
