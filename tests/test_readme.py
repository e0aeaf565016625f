"""What the README says is so: its Python runs, and its table of metrics is the schema's."""
import fnmatch
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import instrument
from instrument import AttentionProbe, InstrumentedStep, NormStats, TrainingMonitor
from instrument.joining import Spread, own_norm
from instrument.learning_rate import learning_rates
from instrument.taps import ALL_STATS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
# {heading: the Python below it}; one block a heading, each complete in itself
BLOCKS = {heading: block for heading, text in re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
          for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)}
PROGRAM, NAN, LOOP = "A MindSpore program", "Where did the NaN come from?", "Loops written with `ms.value_and_grad`"
EVERY, SCALING, LOSSES, CELLS = "Every k-th step", "Loss scaling, clipping, accumulation", "Several losses", "Which cells"
ATTENTION, HISTOGRAMS, WATCHED = "Attention", "Histograms", "Watching a run"
OWN_LOOP = "A loop of your own"
TENSORBOARD, WANDB = "TensorBoard", "Weights & Biases"
MONITOR = "monitor"


@pytest.fixture
def run_block(tmp_path, monkeypatch):
    """Runs a block of the README in an empty working directory; returns its namespace."""
    names = []

    def run(heading):
        name = f"readme_block_{list(BLOCKS).index(heading)}"
        file = tmp_path / f"{name}.py"
        file.write_text(BLOCKS[heading], "utf-8")  # a file, because MindSpore compiles from the source
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.chdir(tmp_path)
        names.append(name)
        sys.modules[name] = module  # the graph compiler imports the module of a construct by its name
        spec.loader.exec_module(module)
        return vars(module)

    yield run
    for name in names:
        del sys.modules[name]
    ms.set_context(mode=ms.GRAPH_MODE)


@pytest.mark.compiles
def test_the_program_trains_and_leaves_a_run(run_block, tmp_path, capsys):
    names = run_block(PROGRAM)
    assert "name='grad/norm', unit='1', scope='global'" in capsys.readouterr().out
    # 256 rows in batches of 32, three epochs, after one step by hand
    [run] = (tmp_path / "runs").iterdir()
    records = [json.loads(line) for line in (run / "metrics-00000.jsonl").read_text("utf-8").splitlines()]
    assert [record["step"] for record in records] == list(range(2, 26))
    assert records[-1]["loss"] < names["values"]["loss"]
    told = re.findall(r"^\| `(\S+)` \|", README[README.index("| file |"):README.index("A line of")], re.MULTILINE)
    files = {file.name for file in run.iterdir()}
    assert {"config.json", "metrics-00000.jsonl", "summary.json", "events.out.tfevents.*"} <= set(told)
    assert all(any(fnmatch.fnmatch(file, each) for each in told) for file in files), files
    undocumented = [name for name in records[0] if name != "time" and not _rows_of(name)]
    assert not undocumented and {"learning_rate", "step_time"} <= set(records[0])


@pytest.mark.compiles
def test_a_loop_of_ones_own_is_recorded(run_block):
    run_block(OWN_LOOP)
    run = instrument.read("runs/loop")
    assert run["grad/norm"].step.tolist() == list(range(1, 25)) and run["epoch"].value[-1] == 3
    assert run["val/accuracy"].step.tolist() == [8, 16, 24] and run["val/accuracy"].value[-1] > 0.5


@pytest.mark.compiles
def test_the_first_bad_weight_is_found(run_block, capsys):
    run_block(NAN)
    assert capsys.readouterr().out.splitlines() == ["weight 2.bias (after weight 2.weight, which was finite)",
                                                    "weight 2.bias 2.weight"]


@pytest.mark.compiles
def test_histograms_are_counted(run_block, capsys):
    names = run_block(HISTOGRAMS)
    counts = names["step"].schema.histograms(names["stats"])
    assert {name: int(each.sum()) for name, each in counts.items()} == {
        "histogram/weight/0.weight": 1024, "histogram/weight/2.weight": 128, "histogram/gradient/2.weight": 128,
        "histogram/activation/_backbone.1": 2048}
    assert len(capsys.readouterr().out.splitlines()) >= 4


@pytest.mark.compiles
def test_every_kth_step_is_measured(run_block, capsys):
    names = run_block(EVERY)
    assert capsys.readouterr().out.splitlines() == ["20.0", "[ 1. 10. 16. 20.] 0"]
    assert names["step"].schema.unpack(names["stats"])["update/norm"] > 0


@pytest.mark.compiles
def test_the_loop_of_value_and_grad_runs(run_block):
    values = run_block(LOOP)["values"]
    assert values["grad/norm"] > 0 and values["weight/norm"] > 0
    run = instrument.read("runs/functional")
    assert run["loss"].step.tolist() == [1, 2, 3] and run["grad/norm"].value[-1] == values["grad/norm"]
    assert run["learning_rate"].value.tolist() == [np.float32(1e-3)] * 3


@pytest.mark.compiles
def test_the_loop_of_value_and_grad_runs_in_pynative_mode(run_block):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    assert run_block(LOOP)["values"]["grad/norm"] > 0


@pytest.mark.compiles
def test_loss_scaling_clipping_and_accumulation_run(run_block):
    values = run_block(SCALING)["values"]
    assert values["step"] == 2 and values["loss_scale"] == 2 ** 16 and values["skipped"] == 0
    assert values["grad/norm_clipped"] == pytest.approx(min(values["grad/norm"], 1), rel=1e-6)  # float32


@pytest.mark.compiles
def test_several_losses_run(run_block):
    values = run_block(LOSSES)["values"]
    assert values["loss"] == pytest.approx(values["loss/box"] + 0.5 * values["loss/class"], rel=1e-6)  # float32


@pytest.mark.compiles
def test_the_choice_of_cells_runs(run_block):
    names = run_block(CELLS)["step"].schema.names
    assert "activation_grad/zero_fraction/_backbone.1" in names and "activation/rms/_backbone.2" in names
    assert not any(name.startswith("grad/norm/") for name in names)


@pytest.mark.compiles
def test_a_watched_run_is_read_back(run_block, tmp_path):
    names = run_block(WATCHED)
    assert names["number"].tolist() == list(range(1, 25)) and names["loss"][-1] < names["loss"][0]
    assert not names["monitor"].errors and names["run"].config["hyper_parameters"] == {"rate": 1e-3}
    assert len((tmp_path / "runs" / "watched.csv").read_text("utf-8").splitlines()) == 25
    # What the monitor adds is in the table.
    rows = {row for name in names["run"] for row in _rows_of(name)}
    told = {row for row, (*_, present) in _table().items() if present.startswith(MONITOR)}
    assert {"learning_rate", "step_time", "data_wait", "epoch", "samples_per_second", "host/memory"} <= rows & told
    assert all(_rows_of(name) for name in names["run"])


@pytest.mark.compiles
def test_tensorboard_has_its_files(run_block, tmp_path):
    names = run_block(TENSORBOARD)
    [file] = (tmp_path / "runs" / "board").glob("events.out.tfevents.*")
    content = file.read_bytes()
    assert not names["monitor"].errors
    assert all(tag in content for tag in (b"grad/norm/0.weight", b"histogram/weight/0.weight", b"rate"))


@pytest.mark.compiles
def test_weights_and_biases_is_written_offline(run_block, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason='needs wandb: pip install "mindspore-instrument[wandb]"')
    monkeypatch.delenv("WANDB_MODE", raising=False)
    names = run_block(WANDB)
    [folder] = (tmp_path / "runs" / "tracked" / "wandb").glob("offline-run-*")
    assert not names["monitor"].errors and [file.stat().st_size > 1000 for file in folder.glob("*.wandb")] == [True]


@pytest.mark.compiles
def test_attention_is_measured(run_block):
    values = run_block(ATTENTION)["values"]
    assert 0 < values["attention/entropy/_backbone.0.self_attn"] <= np.log(8)
    assert 0 < values["attention/entropy/_backbone.1.probe"] < np.log(8)
    assert values["attention/max_logit/_backbone.1.probe"] > 0


def test_every_python_block_is_run():
    assert set(BLOCKS) == {PROGRAM, OWN_LOOP, WATCHED, NAN, EVERY, LOOP, SCALING, LOSSES, CELLS, ATTENTION, HISTOGRAMS,
                           TENSORBOARD, WANDB}
    assert README.count("```python") == len(BLOCKS)


class _Parts(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4)
        self.act = nn.ReLU()
        self.probe = AttentionProbe()

    def construct(self, x):
        loss = ops.ReduceMean()(self.probe(self.act(self.dense(x))))
        return {"total": loss, "part": loss * 2}


def _metrics(**kwargs):
    network = _Parts()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    step = InstrumentedStep(network, nn.Adam(network.trainable_params(), 0.1), **kwargs)
    if "loss_key" in kwargs:
        step(Tensor(np.ones((2, 4), np.float32)))
    ms.set_context(mode=ms.GRAPH_MODE)
    return step.schema.metrics


def _table():
    """`{name or pattern: (unit, scope, present)}` of the README's table of metrics."""
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", README[README.index("## Metrics"):], re.MULTILINE)
    assert len(rows) == len({row[0] for row in rows}) > 20
    return {name: (unit, scope, present) for name, unit, scope, present in rows}


def test_every_row_has_a_cost_and_a_meaning():
    section = README[README.index("## Metrics"):README.index("### What each number is")]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert {tuple(row) for row in rows if len(row) != 6 or not all(cell.strip() for cell in row)} == set()
    assert {row[0].strip("`") for row in rows} == set(_table())
    assert all((cost == "host") == present.startswith(MONITOR) for _, _, _, present, _, cost in rows)
    measured = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    for percent in {number for *_, cost in rows for number in re.findall(r"(\d+)(?= to|\s%)", cost)}:
        assert f"1.{int(percent):02}" in measured, percent


def _rows_of(name):
    return [row for row in _table() if re.fullmatch("(.+)".join(map(re.escape, re.split("<[a-z]+>", row))), name)]


def test_every_metric_is_in_the_table_and_every_row_is_a_metric():
    table, seen = _table(), set()
    metrics = _metrics(loss_scale=8.0, max_grad_norm=1.0, loss_key="total", activations="leaves", counts=True,
                       activation_gradients=True, updates=True, moments=True, spike_window=4)
    for metric in [*metrics, own_norm(), *Spread.metrics()]:
        rows = _rows_of(metric.name)
        assert len(rows) == 1, metric.name
        assert table[rows[0]][:2] == (metric.unit, metric.scope), metric.name
        seen.add(rows[0])
    parameters = list(nn.Dense(2, 2).trainable_params())
    grouped = nn.SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.2}], 0.1)
    assert all(_rows_of(name) == ["learning_rate/<group>"] for name in learning_rates(grouped))
    assert set(table) - seen == {row for row, (*_, present) in table.items() if present.startswith(MONITOR)}


def test_what_is_always_present_is_all_of_the_smallest_vector():
    names = [metric.name for metric in _metrics(activations=None, attention=False, per_parameter=False)]
    assert set(names) == {row for row, (*_, present) in _table().items() if present == "always"}


def test_what_is_present_by_default_is_marked():
    rows = {_rows_of(metric.name)[0] for metric in _metrics(activations="leaves")}
    assert rows == {row for row, (*_, present) in _table().items()
                    if present == "always" or ("*" in present and "`counts`" not in present.split(";")[0])}


def test_norm_stats_has_the_metrics_that_are_told():
    names = NormStats(nn.Dense(2, 2).trainable_params(), counts=True).schema.names
    assert {_rows_of(name)[0] for name in names} == {row for row in _table() if re.match("(grad|weight)/", row)} \
        - {"grad/norm_clipped", "grad/norm_local"}


@pytest.mark.parametrize("owner", [InstrumentedStep, TrainingMonitor])
def test_every_argument_is_told(owner):
    for name in list(inspect.signature(owner).parameters)[owner is InstrumentedStep and 2:]:
        assert re.search(rf"\b{name}\b", README), name
    assert all(f"`{stat}`" in README for stat in ALL_STATS)


def test_every_writer_and_alarm_is_told():
    from instrument import alarms, writers

    for name in writers.__all__:
        assert re.search(rf"`{name}\b", README) or name == "as_writer", name
    for alarm in [*alarms.default_alarms(), alarms.UpdateRatio()]:
        assert f"`{alarm.name}`" in README, alarm.name


CHINESE = (ROOT / "README.zh-CN.md").read_text("utf-8")


def anchors(text):
    """Those of the headings, as GitHub makes them."""
    headings = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("text", [README, CHINESE], ids=["English", "Chinese"])
def test_what_is_linked_exists(text):
    links = re.findall(r"\]\((?!http)([^)]+)\)", text)
    assert len(links) >= 3
    for file, _, anchor in (link.partition("#") for link in links):
        assert (ROOT / file).exists(), file
        if anchor and file.endswith((".md", "")):
            assert anchor in anchors((ROOT / file).read_text("utf-8") if file else text), anchor


def test_code_is_the_same_in_both_languages():
    blocks = re.findall(r"^```\w+\n.*?^```$", CHINESE, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6 and [block for block in blocks if block not in README] == []


def test_the_metrics_are_the_same_in_both_languages():
    def rows(text, begin):
        cells = [line.strip("| ").split(" | ") for line in text[text.index(begin):].splitlines() if line.startswith("| `")]
        numbers = [re.findall(r"\d+", row[-1]) for row in cells if len(row) == 6]
        return [(*row[:3], *number) for row, number in zip([row for row in cells if len(row) == 6], numbers)]

    assert len(rows(README, "## Metrics")) == len(_table()) and rows(CHINESE, "## 指标") == rows(README, "## Metrics")


def test_both_languages_tell_of_every_alarm_and_command():
    from instrument import alarms, cli

    for name in [alarm.name for alarm in alarms.default_alarms()]:
        assert f"`{name}`" in CHINESE, name
    (commands,) = [action for action in cli._parser()._actions if action.dest == "name"]
    for command in set(commands.choices) - {"demo"}:
        assert f"instrument {command}" in CHINESE and f"instrument {command}" in README, command
