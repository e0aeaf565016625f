"""Writers for Weights & Biases, MLflow and SwanLab: the real clients, offline, and what they have stored afterwards."""
import json
import math
import os
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import orjson
import pytest

from instrument import bins
from instrument.record import Incident, Record, RunInfo
from instrument.writers import MlflowWriter, SwanLabWriter, WandbWriter, clients

pytestmark = [pytest.mark.filterwarnings(f"ignore::{category}") for category in (
    "DeprecationWarning", "PendingDeprecationWarning", "FutureWarning", "ResourceWarning")]  # the clients' own

PRINTED = "what the training prints"
WRITERS = {"wandb": WandbWriter, "mlflow": MlflowWriter, "swanlab": SwanLabWriter}
HYPER_PARAMETERS = {"lr": 0.1, "amp": True, "net": "gpt", "größe x": 3}
NAMES = ["loss", "loss/part", "grad/norm", "grad/norm/head.weight", "grad/norm/blocks.0 ä", "损失", "a:b(c)", "a/../b", "/a",
         "a/", "x" * 300, "x" * 299 + "y"]
SPIKE = Incident("LossSpike", "begin", 3, 3, 1, "loss is 9 deviations above its median", metric="loss", value=9.0)
SPIKE_ENDED = Incident("LossSpike", "end", 3, 4, 2, "loss is 9 deviations above its median", metric="loss", value=9.0)


def client(name):
    return pytest.importorskip(name, reason=f'needs {name}: pip install "mindspore-instrument[{name}]"')


@pytest.fixture(params=WRITERS)
def tracker(request):
    client(request.param)
    return request.param


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    """What is set on this machine for the clients is not the tests' business, nor is the working directory."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "SWANLAB_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def nothing_leaves():
    """Nothing but this machine may be asked for; who tries is found at the end, even where the client swallows the error."""
    attempts = []
    connect, resolve = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            attempts.append(address)
            raise OSError(f"the tests have no network, but {address} was to be connected to")
        return connect(self, address)

    def guarded_resolve(host, *args, **kwargs):
        if host not in (None, "127.0.0.1", "::1", "localhost"):
            attempts.append(host)
            raise socket.gaierror(f"the tests have no network, but {host} was looked up")
        return resolve(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket, "getaddrinfo", guarded_resolve)
        yield
    assert attempts == []


def write(writer, run, *records):
    """As the monitor does: from one thread that is not the main one. What it raises is raised here."""
    raised = []

    def work():
        try:
            writer.start(run)
            for record in records:
                writer.write(record)
            print(PRINTED)
            writer.flush()
        except BaseException as error:
            raised.append(error)
        finally:
            writer.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def some_counts():
    counts = np.zeros(bins.BINS, np.int64)
    counts[bins.ZERO] = 5
    counts[bins.ZERO + 1 - bins.LOWEST] = 7  # from 1 to 2
    counts[bins.NONFINITE] = 2
    return counts


def records():
    return [
        Record(2, 1735387200.125, {name: float(i) for i, name in enumerate(NAMES)}),
        Record(2, 1735387201.0, {"val/loss": 0.25}, texts={"samples/a b ä": "<b>once</b>\n  upon a time ä"}),
        Record(3, 1735387202.0, {"loss": math.nan, "grad/norm": math.inf, "weight/norm": -math.inf},
               histograms={"histogram/grad/head.weight": some_counts()}, alarms=(SPIKE,)),
        Record(4, 1735387203.0, {"loss": 1e-30, "grad/norm": math.inf}, alarms=(SPIKE_ENDED,)),
    ]


def info(directory, **more):
    return RunInfo(name="first", directory=directory, config={"hyper_parameters": HYPER_PARAMETERS}, **more)


# Weights & Biases

def wandb_messages(folder):
    """The messages in a finished run's file. Some releases of the client return from `finish` before it is written."""
    for _ in range(100):
        messages = list(messages_there(folder))
        if messages and messages[-1].HasField("exit"):
            return messages
        time.sleep(0.1)
    raise AssertionError(f"no end of the run in {folder}")


def messages_there(folder):
    """What is in the file now, which has the framing of LevelDB's log after 7 bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    file, = folder.glob("*.wandb")
    content, position, message = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        message += content[position + 7:position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""


def items(update):
    """{key, or keys joined by a line break: value} of a row, of the config or of the summary."""
    return {"\n".join(item.nested_key) or item.key: json.loads(item.value_json) for item in update}


def wandb_folders(directory):
    return sorted(directory.glob("wandb/offline-run-*"))


def wandb_id(folder):
    file, = folder.glob("*.wandb")
    return file.stem[len("run-"):]


def wandb_rows(folder):
    """{step: row}, without what W&B itself adds."""
    rows = {}
    for message in wandb_messages(folder):
        if message.HasField("history"):
            row = items(message.history.item)
            assert message.history.step.num not in rows
            rows[message.history.step.num] = {key: value for key, value in row.items()
                                              if key not in ("_step", "_timestamp", "_runtime")}
    return rows


@pytest.fixture(scope="module")
def wandb_run(tmp_path_factory):
    """The folder of one W&B run."""
    client("wandb")
    directory = tmp_path_factory.mktemp("wandb") / "run"
    writer = WandbWriter(project="tests")
    stdout, children = sys.stdout, set(children_of_this_process())
    write(writer, info(directory), *records())
    assert sys.stdout is stdout and writer.run is None
    service = " ".join(set(children_of_this_process()) - children)
    folder, = wandb_folders(directory)
    return folder, service


def children_of_this_process():
    import psutil

    return [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]


def test_wandb_has_one_row_a_step_with_the_validation_in_it(wandb_run):
    rows = wandb_rows(wandb_run[0])
    assert list(rows) == [2, 3, 4]
    assert {name: rows[2][name] for name in NAMES} == {name: i for i, name in enumerate(NAMES)}
    assert rows[2]["val/loss"] == 0.25


def test_wandb_keeps_what_is_not_finite(wandb_run):
    row = wandb_rows(wandb_run[0])[3]
    assert math.isnan(row["loss"]) and row["grad/norm"] == math.inf and row["weight/norm"] == -math.inf


def test_wandb_has_the_histogram_in_our_bins(wandb_run):
    row = wandb_rows(wandb_run[0])[3]
    name = "histogram/grad/head.weight"
    counts, edges = row[f"{name}\nvalues"], row[f"{name}\nbins"]
    assert len(edges) == len(counts) + 1
    assert [(edges[i], edges[i + 1], count) for i, count in enumerate(counts) if count] == [
        (-2.0 ** bins.LOWEST, 2.0 ** bins.LOWEST, 5), (1.0, 2.0, 7)]
    assert row[f"{name}/nonfinite"] == 2


def test_wandb_shows_a_text_as_it_is(wandb_run):
    row = wandb_rows(wandb_run[0])[2]
    file = wandb_run[0] / "files" / row["samples/a b ä\npath"]
    assert file.read_text(encoding="utf-8") == "<pre>&lt;b&gt;once&lt;/b&gt;\n  upon a time ä</pre>"


def test_wandb_gets_an_alert_when_an_alarm_begins_and_its_last_message_in_the_summary(wandb_run):
    messages = wandb_messages(wandb_run[0])
    alert, = (message.alert for message in messages if message.HasField("alert"))
    assert (alert.title, alert.text, alert.level) == ("LossSpike", str(SPIKE), "WARN")
    summary = {}
    for message in messages:
        summary.update(items(message.summary.update))
    assert summary["alarms/LossSpike"] == str(SPIKE_ENDED)


def test_wandb_has_hyper_parameters_name_and_project(wandb_run):
    config, runs = {}, []
    for message in wandb_messages(wandb_run[0]):
        config.update(items(message.config.update))
        if message.HasField("run"):
            runs.append(message.run)
            config.update(items(message.run.config.update))
    assert {key: value for key, value in config.items() if not key.startswith("_wandb")} == HYPER_PARAMETERS
    assert (runs[0].display_name, runs[0].project) == ("first", "tests")


def test_wandb_is_not_told_what_the_training_prints(wandb_run):
    assert not any(message.HasField("output") or message.HasField("output_raw") for message in wandb_messages(wandb_run[0]))
    assert not any(PRINTED in file.read_text() for file in wandb_run[0].glob("files/*.log"))


def test_wandb_has_its_own_reports_switched_off(wandb_run):
    assert "wandb-core" in wandb_run[1] and "--no-observability" in wandb_run[1]
    assert "WANDB_ERROR_REPORTING" not in os.environ


def test_wandb_drops_no_row_in_silence(tmp_path):
    client("wandb")
    with pytest.raises(ValueError, match="step 4 comes after step 5"):
        write(WandbWriter(), info(tmp_path), Record(5, 0.0, {"loss": 1.0}), Record(4, 0.0, {"loss": 2.0}))
    assert wandb_rows(wandb_folders(tmp_path)[0]) == {5: {"loss": 1}}


def test_wandb_goes_on_with_the_id_of_a_resumed_run(tmp_path):
    client("wandb")
    writer = WandbWriter()
    write(writer, info(tmp_path), Record(1, 0.0, {"loss": 1.0}))
    write(writer, info(tmp_path), Record(2, 0.0, {"loss": 2.0}))  # the same process once more, as after Model.train
    write(WandbWriter(), info(tmp_path, resumed=True), Record(3, 0.0, {"loss": 3.0}))
    write(WandbWriter(), info(tmp_path), Record(1, 0.0, {"loss": 4.0}))  # not resumed: another run
    folders = wandb_folders(tmp_path)
    stored = orjson.loads((tmp_path / clients.FILE).read_bytes())["wandb"]["id"]
    rows = {}
    for folder in folders:
        rows.setdefault(wandb_id(folder), {}).update(wandb_rows(folder))
    assert rows.pop(stored) == {1: {"loss": 4}}
    assert list(rows.values()) == [{1: {"loss": 1}, 2: {"loss": 2}, 3: {"loss": 3}}] and len(folders) == 4


def test_a_wandb_run_of_the_users_is_used_and_not_finished(tmp_path):
    wandb = client("wandb")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="mine", config={"lr": 5, "mine": 1},
                     settings=wandb.Settings(console="off"))
    try:
        for i in range(10):
            run.log({"mine": i})
        writer = WandbWriter()
        write(writer, info(tmp_path), Record(3, 0.0, {"loss": 1.0}), Record(3, 0.0, {"val/loss": 2.0}),
              Record(2, 0.0, {"a*b": 3.0}))
        run.log({"mine": 10})
        assert wandb.run is run and run.config["lr"] == 0.1 and run.config["mine"] == 1
    finally:
        run.finish()
    folder, = wandb_folders(tmp_path)
    rows = list(wandb_rows(folder).values())
    assert rows == [*({"mine": i} for i in range(10)), {"loss": 1, "instrument/step": 3},
                    {"val/loss": 2, "instrument/step": 3}, {"a*b": 3, "instrument/step": 2}, {"mine": 10}]
    axes = {message.metric.name: message.metric.step_metric
            for message in wandb_messages(folder) if message.HasField("metric")}
    assert axes == {"instrument/step": "", "loss": "instrument/step", "val/loss": "instrument/step"}


def test_a_later_wandb_run_of_the_users_and_ours_leave_each_other_alone(tmp_path):
    wandb = client("wandb")
    with WandbWriter() as writer:
        writer.start(info(tmp_path))
        writer.write(Record(1, 0.0, {"loss": 1.0}))
        assert wandb.run is None
        with wandb.init(mode="offline", dir=str(tmp_path), project="mine", reinit="create_new",
                        settings=wandb.Settings(console="off")) as mine:
            writer.write(Record(2, 0.0, {"loss": 2.0}))
            mine.log({"mine": 1})
        ours = writer.run.id
    rows = {wandb_id(folder) == ours: wandb_rows(folder) for folder in wandb_folders(tmp_path)}
    assert rows == {True: {1: {"loss": 1}, 2: {"loss": 2}}, False: {0: {"mine": 1}}}


# MLflow

@pytest.fixture(scope="module")
def mlflow_run(tmp_path_factory):
    """Where a run was written by default, its client, and the run. Making the database takes MLflow seconds."""
    client("mlflow")
    import mlflow

    directory = tmp_path_factory.mktemp("mlflow") / "run"
    writer = MlflowWriter(experiment="tests")
    write(writer, info(directory), *records())
    reader = mlflow.MlflowClient(tracking_uri=f"sqlite:///{directory / 'mlflow.db'}")
    return directory, reader, reader.get_run(writer.run_id)


@pytest.fixture
def database(mlflow_run):
    return f"sqlite:///{mlflow_run[0] / 'mlflow.db'}"


def history(reader, run_id, name):
    return [(metric.step, metric.timestamp, metric.value) for metric in reader.get_metric_history(run_id, name)]


def test_mlflow_has_every_number_with_step_and_time(mlflow_run):
    from instrument.writers.mlflow_tracking import accepted

    _, reader, run = mlflow_run
    assert len({accepted(name) for name in NAMES}) == len(NAMES)
    for i, name in enumerate(NAMES):
        assert history(reader, run.info.run_id, accepted(name))[0] == (2, 1735387200125, float(i))
    assert history(reader, run.info.run_id, "val/loss") == [(2, 1735387201000, 0.25)]
    assert [accepted(name) for name in NAMES[:6]] == NAMES[:6]


def test_mlflow_has_no_number_that_was_not_measured(mlflow_run):
    _, reader, run = mlflow_run
    loss = history(reader, run.info.run_id, "loss")
    assert [step for step, _, _ in loss] == [2, 3, 4] and math.isnan(loss[1][2]) and loss[2][2] == 1e-30
    assert [step for step, _, _ in history(reader, run.info.run_id, "grad/norm")] == [2]
    assert history(reader, run.info.run_id, "weight/norm") == []
    assert run.data.tags["instrument.infinite"] == "grad/norm: inf at step 3, 2 times; weight/norm: -inf at step 3"


def test_mlflow_has_params_name_status_and_alarms(mlflow_run):
    _, reader, run = mlflow_run
    assert run.data.params == {name: str(value) for name, value in HYPER_PARAMETERS.items()}
    assert run.info.run_name == "first" and run.info.status == "FINISHED"
    assert reader.get_experiment(run.info.experiment_id).name == "tests"
    assert run.data.tags["alarm.LossSpike"] == str(SPIKE_ENDED)


def test_mlflow_has_texts_as_artifacts_in_the_run_directory(mlflow_run):
    directory, _, run = mlflow_run
    text, = (directory / "mlartifacts").glob("**/*.txt")
    assert str(text).endswith(f"{run.info.run_id}/artifacts/texts/samples/a b ä/00000002.txt")
    assert text.read_text(encoding="utf-8") == "<b>once</b>\n  upon a time ä"


def test_mlflow_gets_batches_that_it_accepts_and_nothing_before_there_is_one(mlflow_run, database, tmp_path):
    _, reader, _ = mlflow_run
    writer = MlflowWriter(tracking_uri=database)
    with writer:
        writer.start(info(tmp_path))
        writer.write(Record(1, 0.0, {"a": 1.0}))
        assert history(reader, writer.run_id, "a") == []
        writer.flush()
        assert history(reader, writer.run_id, "a") == [(1, 0, 1.0)]
        writer.write(Record(2, 1.0, {f"m/{i}": float(i) for i in range(1100)}))
        assert history(reader, writer.run_id, "m/1099") == [(2, 1000, 1099.0)]
    assert len(reader.get_run(writer.run_id).data.metrics) == 1101


def test_mlflow_goes_on_with_a_resumed_run(mlflow_run, database, tmp_path):
    _, reader, _ = mlflow_run
    first = MlflowWriter(tracking_uri=database)
    write(first, info(tmp_path), Record(1, 0.0, {"loss": 1.0}))
    write(first, info(tmp_path), Record(2, 0.0, {"loss": 2.0}))
    changed = RunInfo("first", tmp_path, {"hyper_parameters": {"lr": 0.2, "net": "gpt", "new": 1}}, resumed=True)
    second = MlflowWriter(tracking_uri=database)
    with second:
        second.start(changed)
        second.write(Record(3, 0.0, {"loss": 3.0}))
        assert reader.get_run(second.run_id).info.status == "RUNNING"
    third = MlflowWriter(tracking_uri=database)
    write(third, info(tmp_path), Record(1, 0.0, {"loss": 4.0}))
    run = reader.get_run(first.run_id)
    assert first.run_id == second.run_id != third.run_id
    assert [value for _, _, value in history(reader, first.run_id, "loss")] == [1.0, 2.0, 3.0]
    assert run.info.status == "FINISHED"
    assert run.data.params == {**{name: str(value) for name, value in HYPER_PARAMETERS.items()}, "new": "1"}
    assert json.loads(run.data.tags["instrument.changed"]) == {"lr": "0.2"}


def test_mlflow_leaves_its_global_state_alone(mlflow_run, database, tmp_path):
    import mlflow

    before = mlflow.get_tracking_uri()
    with MlflowWriter(tracking_uri=database) as writer:
        writer.start(info(tmp_path))
        writer.write(Record(1, 0.0, {"loss": 1.0}))
        assert mlflow.active_run() is None and mlflow.get_tracking_uri() == before


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns", "./runs", "/tmp/mlruns"])
def test_mlflows_file_store_is_refused(monkeypatch, uri):
    with pytest.raises(ValueError, match="file store, which cannot hold"):
        MlflowWriter(tracking_uri=uri)
    client("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ValueError, match="file store, which cannot hold"):
        MlflowWriter().write(Record(1, 0.0, {}))


@pytest.mark.parametrize("uri", ["sqlite:///a.db", "http://127.0.0.1:5000", "databricks", "databricks://profile",
                                 "postgresql://me@127.0.0.1/db"])
def test_other_stores_of_mlflow_are_taken(uri):
    MlflowWriter(tracking_uri=uri)


# SwanLab

def swanlab_messages(directory):
    """(key, step, value) of all numbers, (key, step, text) of all texts, and the folders of the runs."""
    numbers, texts = [], []
    folders = sorted(directory.glob("swanlog/run-*"))
    for folder in folders:
        file, = folder.glob("*.swanlab")
        try:
            from swanlab.proto.swanlab.record.v1.record_pb2 import Record as Message
            from swanlab.sdk.internal.core_python.store import DataStoreReader
        except ImportError:
            read_old(file, folder, numbers, texts)
            continue
        store = DataStoreReader()
        store.open(file)
        for content in store:
            message = Message.FromString(content)
            if message.HasField("scalar"):
                numbers.append((message.scalar.key, message.scalar.step, message.scalar.value.number))
            elif message.HasField("media"):
                media = message.media
                texts += ((media.key, media.step, (folder / "media" / "text" / item.filename).read_text("utf-8"))
                          for item in media.value.items)
        store.close()
    return numbers, texts, folders


def read_old(file, folder, numbers, texts):
    """The format before SwanLab 0.8."""
    try:
        from swanlab.data.porter.datastore import DataStore
    except ImportError:  # before 0.7
        from swanlab.log.backup.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(file))
    for content in filter(None, store):
        message = json.loads(content)
        data = message["data"]
        if message["model_type"] == "Scalar":
            numbers.append((data["key"], data["step"], float(data["metric"]["data"])))
        elif message["model_type"] == "Media":
            texts += ((data["key"], data["step"], text) for text in data["metric"]["data"])


@pytest.fixture(scope="module")
def swanlab_run(tmp_path_factory):
    client("swanlab")
    directory = tmp_path_factory.mktemp("swanlab") / "run"
    writer = SwanLabWriter(project="tests")
    stdout, hook = sys.stdout, sys.excepthook
    write(writer, info(directory), *records())
    assert sys.stdout is stdout and sys.excepthook is hook
    return directory


def test_swanlab_has_every_number_with_its_step(swanlab_run):
    from instrument.writers.swanlab_runs import accepted

    numbers, _, folders = swanlab_messages(swanlab_run)
    assert len(folders) == 1
    expected = [(accepted(name), 2, float(i)) for i, name in enumerate(NAMES)] + [("val/loss", 2, 0.25)]
    assert [number for number in numbers if number[1] == 2] == expected
    assert len({name for name, _, _ in expected}) == len(NAMES) + 1
    assert ("loss", 4, 1e-30) in numbers


def test_swanlab_has_what_is_not_finite_and_no_wrong_sign(swanlab_run):
    numbers, texts, _ = swanlab_messages(swanlab_run)
    values = {name: value for name, step, value in numbers if step == 3}
    assert math.isnan(values.pop("loss")) and values.pop("grad/norm") == math.inf
    if has_ids():
        assert values == {"weight/norm": -math.inf}
    else:  # SwanLab before 0.8 keeps -inf as inf
        assert values == {} and ("instrument/infinite", 3, "weight/norm: -inf") in texts


def has_ids():
    return hasattr(client("swanlab"), "has_run")


def test_swanlab_has_texts_and_alarms(swanlab_run):
    assert [text for text in swanlab_messages(swanlab_run)[1] if text[0] != "instrument/infinite"] == [
        ("samples/a b ä", 2, "<b>once</b>\n  upon a time ä"), ("alarms/LossSpike", 3, str(SPIKE)),
        ("alarms/LossSpike", 4, str(SPIKE_ENDED))]


def test_swanlab_has_hyper_parameters(swanlab_run):
    config = (swanlab_run / "swanlog").glob("run-*/files/config.yaml")
    text = next(config).read_text(encoding="utf-8")
    assert all(name in text or "gr\\xF6" in text for name in HYPER_PARAMETERS) and "gpt" in text


def test_swanlab_begins_a_run_again_after_close(tmp_path):
    client("swanlab")
    writer = SwanLabWriter()
    write(writer, info(tmp_path), Record(1, 0.0, {"loss": 1.0}))
    write(writer, info(tmp_path), Record(2, 0.0, {"loss": 2.0}))
    write(SwanLabWriter(), info(tmp_path, resumed=True), Record(3, 0.0, {"loss": 3.0}))
    numbers, _, folders = swanlab_messages(tmp_path)
    assert sorted(numbers) == [("loss", 1, 1.0), ("loss", 2, 2.0), ("loss", 3, 3.0)]
    if has_ids():
        assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1


def test_a_swanlab_run_of_the_users_is_used_and_not_finished(tmp_path):
    swanlab = client("swanlab")
    (tmp_path / "swanlog").mkdir()
    swanlab.init(project="mine", mode="offline", logdir=str(tmp_path / "swanlog"), config={"lr": 5, "mine": 1})
    try:
        write(SwanLabWriter(), info(tmp_path), Record(3, 0.0, {"loss": 1.0}))
        swanlab.log({"mine": 2.0}, step=4)
        assert swanlab.config["lr"] == 0.1 and swanlab.config["mine"] == 1
    finally:
        swanlab.finish()
    numbers, _, folders = swanlab_messages(tmp_path)
    assert sorted(numbers) == [("loss", 3, 1.0), ("mine", 4, 2.0)] and len(folders) == 1


# All of them

def test_making_a_writer_imports_nothing_and_makes_no_file(tmp_path):
    program = ("import sys; from pathlib import Path\n"
               "from instrument.record import RunInfo; from instrument.writers import *\n"
               "for writer in WandbWriter(), MlflowWriter(), SwanLabWriter():\n"
               "    writer.start(RunInfo(directory=Path('run').absolute())); writer.flush(); writer.close()\n"
               "print([name for name in ('wandb', 'mlflow', 'swanlab') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_client_is_named_with_the_line_that_installs_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    how = rf'{name} is not installed. Install it by: pip install "mindspore-instrument\[{name}\]"'
    with pytest.raises(ImportError, match=how):
        WRITERS[name]().write(Record(1, 0.0, {}))


@pytest.mark.parametrize("writer_type", [WandbWriter, SwanLabWriter])
def test_a_mode_that_is_none_is_refused(writer_type):
    with pytest.raises(ValueError, match="mode must be one of online, .*but it is 'cluod'"):
        writer_type(mode="cluod")


def test_an_error_of_the_client_is_raised(tracker, tmp_path):
    """The run directory is a file, so that the client cannot write there."""
    (tmp_path / "run").write_text("")
    with pytest.raises(OSError):
        write(WRITERS[tracker](), info(tmp_path / "run"), Record(1, 0.0, {"loss": 1.0}))


@pytest.mark.parametrize("variable", ["WANDB_MODE", "SWANLAB_MODE"])
def test_the_environment_says_the_mode_where_the_program_does_not(monkeypatch, tmp_path, variable):
    name = variable.partition("_")[0].lower()
    client(name)
    monkeypatch.setenv(variable, "disabled")
    write(WRITERS[name](), RunInfo(), Record(1, 0.0, {"loss": 1.0}))
    assert not list(tmp_path.glob("**/*.wandb")) and not list(tmp_path.glob("**/*.swanlab"))


def test_nothing_leaves_in_a_process_that_is_no_test(tracker, tmp_path):
    """MLflow sends reports of use but in tests and CI, which it knows by the environment."""
    program = f"""
import socket
attempts = []
def refuse(what):
    attempts.append(str(what))
    raise OSError("no network")
connect = socket.socket.connect
socket.socket.connect = lambda self, to: connect(self, to) if self.family == socket.AF_UNIX else refuse(to)
socket.getaddrinfo = lambda host, *args, **kwargs: refuse(host)
from pathlib import Path
from instrument.record import Record, RunInfo
from instrument.writers import {WRITERS[tracker].__name__} as Writer
with Writer() as writer:
    writer.start(RunInfo(directory=Path("run").absolute()))
    writer.write(Record(1, 0.0, {{"loss": 1.0}}))
print("attempts", attempts)
"""
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "PYTHONPATH", "TMPDIR")}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300,
                          env=environment)
    assert done.stdout.splitlines()[-1:] == ["attempts []"], done.stdout + done.stderr


def test_a_histogram_loses_its_empty_ends_only():
    counts, edges, nonfinite = clients.trimmed(some_counts())
    assert counts.sum() == 12 and counts[0] == 5 and counts[-1] == 7 and nonfinite == 2 and len(edges) == len(counts) + 1
    assert (edges[0], edges[-1]) == (-2.0 ** bins.LOWEST, 2.0)
    for empty in (np.zeros(bins.BINS, int), np.eye(bins.BINS, dtype=int)[bins.NONFINITE]):
        assert clients.trimmed(empty)[0].size == 0
    full = np.ones(bins.BINS, int)
    assert len(clients.trimmed(full)[0]) == bins.BINS - 1 and len(clients.trimmed(full)[1]) == bins.BINS
