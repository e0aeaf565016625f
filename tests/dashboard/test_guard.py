"""Who may ask, what may be read, and what an address may say."""
import asyncio
import os
import socket

import pytest
import runs_made

from instrument.dashboard import catalog, discovery
from instrument.dashboard.guard import Guard
from instrument.dashboard.view import MOST_RUNS, View


def ask(guard, *, kind="http", path="/", query="", **headers):
    """Status and headers; of a socket that was refused, its close code. 200 means that the application was asked."""
    sent = []

    async def receive():
        return {"type": f"{kind}.connect" if kind == "websocket" else "http.request"}

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "method": "GET", "path": path, "query_string": query.encode(),
             "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]}
    asyncio.run(guard(scope, receive, send))
    if sent[0]["type"] == "websocket.close":
        return sent[0]["code"]
    return (sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]})


@pytest.fixture
def local():
    return Guard(_application, token=None, port=8765, hosts=["127.0.0.1"])


async def _application(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_without_a_token_only_this_machine_s_names_and_pages_may_ask(local, kind):
    assert ask(local, kind=kind, host="127.0.0.1:8765")[0] == 200
    assert ask(local, kind=kind, host="localhost:9000", origin="http://localhost:9000")[0] == 200  # through ssh -L
    assert ask(local, kind=kind, host="[::1]:8765")[0] == 200
    refused = [ask(local, kind=kind, host="evil.example"),  # its name points here
               ask(local, kind=kind, host="127.0.0.1:8765", origin="http://evil.example"),
               ask(local, kind=kind, host="127.0.0.1:8765", origin="null"),
               ask(local, kind=kind, host="127.0.0.1:8765", origin="http://127.0.0.1:9999"),
               ask(local, kind=kind, host="127.0.0.1.evil.example"), ask(local, kind=kind),
               ask(local, kind=kind, host="127.0.0.1:8765", origin="http://[")]
    assert [each if kind == "websocket" else each[0] for each in refused] == [1008 if kind == "websocket" else 403] * 7


def test_every_answer_says_that_the_page_asks_nobody_else_and_is_in_no_frame(local):
    for host in ("127.0.0.1", "evil.example"):
        _, headers = ask(local, host=host)
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert headers["referrer-policy"] == "no-referrer"  # an address may have a token in it


def test_with_a_token_page_and_socket_need_it():
    guard = Guard(_application, token="s3cret/+ ü1", port=8765)
    assert ask(guard, host="cluster:8765")[0] == 401
    assert ask(guard, kind="websocket", host="cluster:8765") == 1008
    assert ask(guard, host="cluster:8765", query="token=wrong")[0] == 401
    status, headers = ask(guard, host="cluster:8765", query="run=a&token=s3cret%2F%2B+%C3%BC1")
    assert (status, headers["location"]) == (303, "/?run=a")  # the token does not stay in the address bar
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
    _, headers = ask(guard, host="cluster:8765", path="//evil.example/", query="run=a&run=b&token=s3cret%2F%2B+%C3%BC1")
    assert headers["location"] == "/evil.example/?run=a&run=b"
    kept = cookie.split(";")[0]
    for other in ("other=1", 'prefs={"a":1}', "x[y]=1", "=", ""):
        assert ask(guard, host="cluster:8765", cookie=f"{other}; {kept}")[0] == 200
    assert ask(guard, kind="websocket", host="cluster:8765", cookie=kept, origin="http://cluster:8765")[0] == 200
    assert ask(guard, kind="websocket", host="cluster:8765", cookie=kept, origin="http://evil.example") == 1008
    assert ask(guard, host="cluster:8765", authorization="Bearer s3cret/+ ")[0] == 401
    assert ask(Guard(_application, token="abcdefgh", port=1), host="x", authorization="Bearer abcdefgh")[0] == 200


def test_runs_are_found_below_and_links_that_lead_out_are_not_followed(tmp_path):
    for name in ("runs/a", "runs/deep/er/b", "runs/a/rank_1", "elsewhere/c"):
        runs_made.Made(tmp_path / name)
    os.symlink(tmp_path / "elsewhere", tmp_path / "runs" / "link")
    (tmp_path / "runs" / ".hidden").mkdir()
    runs_made.Made(tmp_path / "runs" / ".hidden" / "d")
    found = discovery.Directories([tmp_path / "runs"]).find()
    assert list(found) == ["a", "a/rank_1", "deep/er/b"]
    several = discovery.Directories([tmp_path / "runs" / "a", tmp_path / "elsewhere"])
    assert list(several.find()) == ["a", "a/rank_1", "elsewhere/c"]
    assert discovery.Directories([tmp_path / "none"]).find() == {}
    # Models have a config.json, too.
    (tmp_path / "runs" / "model").mkdir()
    (tmp_path / "runs" / "model" / "config.json").write_text('{"hidden_size": 64}')
    assert "model" not in discovery.Directories([tmp_path / "runs"]).find()
    # Given by its user, a link is followed.
    assert list(discovery.Directories([tmp_path / "runs" / "link"]).find()) == ["c"]


def test_a_browser_cannot_name_a_path(tmp_path):
    from instrument.dashboard.follow import Follower
    runs_made.Made(tmp_path / "runs" / "a")
    runs_made.Made(tmp_path / "secret")
    follower = Follower(discovery.Directories([tmp_path / "runs"]))
    assert follower.run("../secret") is None and follower.run(str(tmp_path / "secret")) is None and follower.run("") is None
    assert follower.run("a") is not None
    follower.close()


def test_a_view_is_its_address():
    view = View(runs=("a b/c", "ü&=#"), x="clock", first=10, last=20, smooth=50, scales=("grad",), picks=("grad/.*|x+",),
                heat="grad/norm", at=15, histogram="h", text="t", hidden=("loss|val/loss",), large="grad", filter="a b",
                theme="dark")
    assert View.of_query(view.query()) == view
    assert View().query() == "" and View.of_query("") == View()
    assert View(smooth=0).query() == "?smooth=0" and View.of_query("?smooth=0").smooth == 0


@pytest.mark.parametrize("query", ["from=-1&to=5", "from=a&to=b", "from=1", "x=none", "theme=<script>", "smooth=1e9",
                                   "at=99999999999999999", "&&&=", "window=-5", "%ff=%ff", "a=" * 500])
def test_nonsense_in_an_address_is_left_out(query):
    assert View.of_query(query) == View()


def test_an_address_is_bounded():
    view = View.of_query("&".join(f"run=r{i}" for i in range(50)) + "&pick=" + "x" * 10_000)
    assert len(view.runs) == MOST_RUNS and view.picks == ()


def test_picks_find_by_name_and_expression_and_put_kinds_on_axes_of_their_own():
    names = ["loss", "val/loss", "learning_rate", "grad/norm", "host/memory", *(f"grad/norm/{i}" for i in range(30))]
    assert catalog.picked("loss", names, {}).axes == (("loss",),)
    assert catalog.picked("loss|rate", names, {}).axes == (("loss", "val/loss"), ("learning_rate",))
    many = catalog.picked("grad/norm/", names, {})
    assert len(many.names) == 12 and many.note == "12 of 30 metrics" and many.names[-1] == "grad/norm/29"
    assert "no metric" in catalog.picked("none", names, {}).note
    assert "no regular expression" in catalog.picked("(", names, {}).note


def test_a_core_chart_without_its_metric_says_so():
    notes = {spec.id: spec.note for spec in catalog.charts(["loss", "step_time"])[:3]}
    assert notes == {"loss": "", "rate": "no learning_rate recorded", "grad": "no grad/norm recorded"}
    assert {spec.note for spec in catalog.charts([])} == {""}  # nothing is known yet


def test_charts_are_named_by_what_is_in_them_and_show_fewer_layers_of_several_runs():
    names = ["loss", "host/cpu", "weight/norm", "step_time", *(f"attention/entropy/blocks.{i}" for i in range(24))]
    titles = {spec.id: spec.title for spec in catalog.charts(names)}
    assert (titles["load"], titles["weights"], titles["throughput"]) == ("Host CPU", "Weight norm", "Step time")
    assert "memory" not in titles
    names += ["device/utilization", "update/ratio", "tokens_per_second", "data_wait_fraction"]
    titles = {spec.id: spec.title for spec in catalog.charts(names)}
    assert (titles["load"], titles["weights"]) == ("Device utilization and host CPU", "Weight norm and update ratio")
    assert titles["throughput"] == "Throughput and data wait"
    ranks = ["loss", *(f"rank/{what}/{name}" for what in ("min", "max", "argmax")
                       for name in ("loss", "grad/norm_local", "step_time", "data_wait"))]
    spec = next(spec for spec in catalog.charts(ranks) if spec.id == "waits")
    assert spec.axes == (("rank/max/data_wait", "rank/min/data_wait"), ("rank/argmax/data_wait",))
    spec = next(spec for spec in catalog.charts(ranks) if spec.id == "ranks")
    assert spec.axes == (("rank/max/loss", "loss", "rank/min/loss"), ("rank/argmax/loss",))
    assert catalog.layered(ranks) == {}  # ranks are no layers
    entropy = next(spec for spec in catalog.charts(names, runs=2) if spec.id == "entropy")
    assert [name.rsplit(".")[-1] for name in entropy.names] == ["0", "12", "23"] and entropy.note == "3 of 24 metrics"


def test_the_port_in_use_is_passed_over():
    server = pytest.importorskip("instrument.dashboard.server")
    taken = server.bind("127.0.0.1", 0)
    port = taken.getsockname()[1]
    following = server.bind("127.0.0.1", port)
    assert following.getsockname()[1] > port
    assert following.family == socket.AF_INET and following.getsockname()[0] == "127.0.0.1"
    taken.close()
    following.close()


def test_other_hosts_need_a_token():
    server = pytest.importorskip("instrument.dashboard.server")
    for host in ("0.0.0.0", "::", "192.168.1.5", "cluster"):
        with pytest.raises(ValueError, match="token"):
            server.check(host, None)
        server.check(host, "long enough")
    with pytest.raises(ValueError, match="8 characters"):
        server.check("127.0.0.1", "short")
    for host in ("127.0.0.1", "localhost", "::1"):
        server.check(host, None)
