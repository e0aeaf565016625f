"""The page in a real browser."""
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest
import runs_made

RUNNING = ".iv-state.iv-running"
ROOT = Path(__file__).parents[2]


def curve(page, chart="loss", series="line:0:loss"):
    return page.evaluate("([chart, series]) => { const card = window.instrumentLive && instrumentLive.cards.get(chart);"
                         " return card ? card.plot.data.get(series) || [] : []; }", [chart, series])


def wait_for(page, condition, argument=None, *, seconds=40):
    page.wait_for_function(condition, arg=argument, timeout=1000 * seconds)


def wait_for_step(page, step, chart="loss", series="line:0:loss", *, seconds=40):
    wait_for(page, """([chart, series, step]) => {
        const card = window.instrumentLive && instrumentLive.cards.get(chart), points = card && card.plot.data.get(series);
        return points && points.length && points[points.length - 1][0] >= step; }""", [chart, series, step], seconds=seconds)


def live(directory, steps=200, **options):
    made = runs_made.Made(directory, layers=4, total_steps=1000)
    made.metrics(*runs_made.records(range(1, steps + 1), **options))
    return made


def test_the_curve_grows_without_gap_or_duplicate(shared, look):
    made = live(shared.runs / "page1")
    page = look(shared.page("page1"))
    wait_for_step(page, 200)
    assert page.locator(RUNNING).count() == 1
    for first in range(201, 301, 10):
        made.metrics(*runs_made.records(range(first, first + 10)))
    wait_for_step(page, 300)
    assert [point[0] for point in curve(page)] == list(range(1, 301))
    assert page.locator(".iv-step span").inner_text() == "300"
    drawn = page.evaluate("instrumentLive.cards.get('loss').plot.chart.getOption().series[0].data.length")
    assert drawn == 300
    assert page.title().endswith("page1")
    shown = page.locator(".iv-core h3").all_inner_texts()
    assert shown == ["Loss", "Learning rate", "Gradient norm"]


def test_nan_is_seen_at_the_top_on_the_curve_and_as_a_gap(shared, look):
    made = live(shared.runs / "page2")
    page = look(shared.page("page2"))
    wait_for_step(page, 200)
    assert page.locator(".iv-alarms").inner_text() == ""
    made.metrics({"step": 201, "time": time.time(), "loss": math.nan, "grad/norm": math.inf})
    made.alarm(201, "NonFinite", "activation blocks.2 is NaN; blocks.1 before it is finite", metric="loss", where="blocks.2",
               value=math.nan)
    made.metrics(*runs_made.records(range(202, 206)))
    wait_for_step(page, 205)
    page.wait_for_selector(".iv-alarms.iv-red .iv-active")
    text = page.locator(".iv-alarms").inner_text()
    assert "NonFinite" in text and "step 201" in text and "blocks.2" in text and "blocks.1 before it" in text
    assert page.locator(".iv-tile.iv-bad dd").first.inner_text() == "1"
    assert [201, None, "nan"] in curve(page) and [201, None, "inf"] in curve(page, "grad", "line:0:grad/norm")
    marks = page.evaluate("instrumentLive.cards.get('loss').plot.chart.getOption().series.find(s => s.id === 'marks')")
    assert marks["data"][0]["name"] == "loss is NaN from step 201 on" and marks["data"][0]["value"][0] == 201
    assert marks["markLine"]["data"][0]["xAxis"] == 201
    # A click on the alarm shows the steps around it.
    page.locator(".iv-alarms button").first.click()
    page.wait_for_url("**from=151&to=251**")
    made.alarm(230, "NonFinite", "", state="end", first_step=201, metric="loss", where="blocks.2")
    page.wait_for_selector(".iv-alarms:not(.iv-red)")
    assert "(over)" in page.locator(".iv-alarms").text_content()


def painted(page, chart="loss", color=(0x43, 0x85, 0xd6)):
    """How many pixels of a chart have the colour of the first curve, about."""
    page.wait_for_timeout(300)
    return page.evaluate("""([chart, color]) => {
        const canvas = instrumentLive.cards.get(chart).plot.element.querySelector("canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let found = 0;
        for (let i = 0; i < data.length; i += 4)
            found += data[i + 3] > 200 && color.every((part, k) => Math.abs(data[i + k] - part) < 12);
        return found; }""", [chart, color])


def test_a_point_without_neighbours_is_a_dot(shared, look):
    made = runs_made.Made(shared.runs / "alone")
    made.metrics({"step": 1, "time": 1e9, "loss": 2.0, "grad/norm": 1.0})
    page = look(shared.page("alone"))
    wait_for_step(page, 1)
    assert painted(page) > 10
    # By increments: the first one is a part of a line now, the others stand alone.
    made.metrics({"step": 2, "time": 1e9, "loss": 2.0, "grad/norm": 1.0},
                 *({"step": step, "time": 1e9, "loss": 2.0 if step % 2 else math.nan, "grad/norm": 0.0}
                   for step in range(3, 62)))
    wait_for_step(page, 61)
    symbols = "chart => instrumentLive.cards.get(chart).plot.chart.getOption().series[0].data" \
              ".filter(point => point.symbol).map(point => point.value[0])"
    wait_for(page, f"() => ({symbols})('loss').length > 1")
    assert page.evaluate(symbols, "loss") == list(range(5, 62, 2)) and page.evaluate(symbols, "grad") == []
    assert painted(page) > 5 * 29
    page.locator("[data-chart=loss] button", has_text="log").click()
    page.wait_for_selector("[data-chart=loss] button[aria-pressed=true]")
    assert painted(page) > 5 * 29


def test_no_curve_takes_the_marks_of_another(shared, look):
    made = runs_made.Made(shared.runs / "gaps")
    made.metrics(*({"step": step, "time": 1e9, "loss": math.nan if step == 60 else 1.0,
                    "val/loss": math.nan if step % 2 else 2.0} for step in range(1, 901)))
    page = look(shared.page("gaps"))
    wait_for_step(page, 900)
    marks = page.evaluate("instrumentLive.cards.get('loss').plot.chart.getOption().series.find(s => s.id === 'marks').data")
    assert [mark["value"][0] for mark in marks if mark["name"].startswith("loss is NaN")] == [60]
    steps = [mark["value"][0] for mark in marks if mark["name"].startswith("val/loss is NaN")]
    assert 150 < len(steps) < 200 and steps[0] == 1 and max(b - a for a, b in zip(steps, steps[1:])) <= 10
    assert f"{len(marks)} of 451 marks" in page.locator("[data-chart=loss] .iv-note").inner_text()
    # Where one zooms in all are there.
    page.evaluate("instrumentLive.zoom(100, 200)")
    wait_for(page, "() => instrumentLive.cards.get('loss').plot.option.xAxis.min === 100")
    marks = page.evaluate("instrumentLive.cards.get('loss').plot.chart.getOption().series.find(s => s.id === 'marks').data")
    assert len(marks) == 50 and page.locator("[data-chart=loss] .iv-note").inner_text() == ""


def test_a_server_that_was_killed_and_started_again_is_found_and_the_view_is_as_it_was(tmp_path, serve, look):
    made = live(tmp_path / "runs" / "first")
    first = serve(tmp_path / "runs")
    page = look(first.address + "?run=first&smooth=50")
    wait_for_step(page, 200)
    port = first.port
    first.process.kill()
    first.process.wait()
    page.wait_for_selector(".iv-banner:not([hidden])")
    made.metrics(*runs_made.records(range(201, 221)))
    serve(tmp_path / "runs", "--port", str(port))
    wait_for_step(page, 220)
    assert [point[0] for point in curve(page)] == list(range(1, 221))
    made.metrics(*runs_made.records(range(221, 231)))
    wait_for_step(page, 230, series="smooth:0:loss")
    assert "smooth=50" in page.url
    wait_for(page, "() => document.querySelector('.iv-banner').hidden")


def drag(page, chart, start, end):
    box = page.locator(f"[data-chart={chart}] .iv-plot").bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * start, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * (start + end) / 2, y)
    page.mouse.move(box["x"] + box["width"] * end, y)
    page.mouse.up()


def ends(page, chart):
    return page.evaluate("chart => (({min, max}) => [min, max])(instrumentLive.cards.get(chart).plot.option.xAxis)", chart)


def test_a_drag_zooms_all_charts_finer_and_the_address_shows_the_same(shared, look):
    made = runs_made.Made(shared.runs / "page3")
    made.metrics(*({"step": step, "time": 1e9 + step, "loss": math.sin(step / 9), "learning_rate": 1e-3, "grad/norm": 1.0}
                   for step in range(1, 20_001)))
    made.end("finished", 20_000)
    page = look(shared.page("page3"))
    wait_for_step(page, 20_000)
    assert len(curve(page)) <= 2002
    drag(page, "loss", 0.4, 0.42)
    page.wait_for_url("**from=**")
    wait_for(page, "() => (({min, max}) => max - min < 1000)(instrumentLive.cards.get('rate').plot.option.xAxis)")
    low, high = ends(page, "loss")
    assert 100 < high - low < 1000 and ends(page, "rate") == [low, high]
    wait_for(page, "() => (points => points[2][0] - points[1][0] === 1)(instrumentLive.cards.get('loss').plot.data.get("
                   "'line:0:loss'))")
    other = look(page.url)
    wait_for(other, "() => window.instrumentLive && instrumentLive.cards.get('loss')?.plot.option")
    assert ends(other, "loss") == [low, high]
    # The keyboard does the same.
    page.locator("[data-chart=loss] .iv-holder").focus()
    page.keyboard.press("-")
    wait_for(page, "high => instrumentLive.cards.get('loss').plot.option.xAxis.max > high", high)
    page.keyboard.press("Escape")
    wait_for(page, "() => instrumentLive.cards.get('loss').plot.option.xAxis.max === 20000")
    page.wait_for_url(lambda url: "from=" not in url)
    page.keyboard.press("l")
    page.wait_for_selector("[data-chart=loss] button[aria-pressed=true]")
    assert "scale=loss" in page.url
    note = page.locator("[data-chart=loss] .iv-note")
    wait_for(page, "() => document.querySelector('[data-chart=loss] .iv-note').textContent !== ''")
    assert "zero and negative values are left out" in note.inner_text()
    assert page.evaluate("instrumentLive.cards.get('loss').plot.chart.getOption().series[0].data"
                         ".map(point => point.value || point).every(point => point[1] === null || point[1] > 0)")


@pytest.mark.parametrize("x", ["step", "time"])
def test_arrows_stop_at_the_ends_of_the_run_and_keep_the_range(shared, look, x):
    made = runs_made.Made(shared.runs / f"arrows-{x}")
    made.metrics(*({"step": step, "time": 1e9 + step, "loss": 1.0} for step in range(1, 401)))
    made.end("finished", 400)
    page = look(shared.page(f"arrows-{x}") + f"&x={x}")
    wait_for_step(page, 399 if x == "time" else 400)
    holder = page.locator("[data-chart=loss] .iv-holder")
    holder.focus()
    page.keyboard.press("ArrowLeft")  # all is shown: there is nowhere to go
    first, last = (1, 400) if x == "step" else (0, 399)
    for key, near, then in (("ArrowLeft", first + 6, [first, first + 100]), ("ArrowRight", last - 106, [last - 100, last])):
        page.evaluate("low => instrumentLive.zoom(low, low + 100)", near)
        wait_for(page, "low => instrumentLive.cards.get('loss').plot.option.xAxis.min === low", near)
        for _ in range(3):
            page.keyboard.press(key)
            wait_for(page, "low => instrumentLive.cards.get('loss').plot.option.xAxis.min === low", then[0])
        page.wait_for_timeout(400)
        assert ends(page, "loss") == then
    page.keyboard.press("ArrowLeft")
    wait_for(page, "low => instrumentLive.cards.get('loss').plot.option.xAxis.min === low", last - 125)
    assert ends(page, "loss") == [last - 125, last - 25]


def test_two_runs_beside_each_other(shared, look):
    runs_made.healthy(shared.runs / "a", steps=60, layers=2, rate=1e-3)
    runs_made.healthy(shared.runs / "b", steps=60, layers=2, rate=2e-3)
    page = look(shared.page("a"))
    wait_for_step(page, 60)
    page.locator(".iv-runs input").click()
    page.locator(".q-menu .q-item", has_text="b").click()
    page.wait_for_url("**run=b**")
    wait_for_step(page, 60, series="line:1:loss")
    legend = page.locator("[data-chart=loss] .iv-legend").inner_text()
    assert "a (learning_rate=0.001)" in legend and "b (learning_rate=0.002)" in legend
    assert page.locator(".iv-head").count() == 2
    page.locator("[data-chart=loss] .iv-legend button").first.click()
    sizes = page.evaluate("instrumentLive.cards.get('loss').plot.chart.getOption().series.map(s => [s.id, s.data.length])")
    assert dict(sizes)["line:0:loss"] == 0 and dict(sizes)["line:1:loss"] == 60


def test_a_run_that_is_not_there_is_named(shared, look):
    live(shared.runs / "there", steps=5)
    page = look(shared.page("<b>typo</b>"))
    wait_for(page, "() => document.querySelector('.iv-empty').textContent.startsWith(\"There is no run '<b>typo</b>'.\")")
    assert page.locator(".iv-empty b").count() == 0
    page = look(shared.page("there", "late"))
    wait_for_step(page, 5)
    assert page.locator(".iv-empty").inner_text().startswith("There is no run 'late'.")
    live(shared.runs / "late", steps=5)
    wait_for_step(page, 5, series="line:1:loss")
    assert page.locator(".iv-empty").is_hidden()


def test_metrics_are_picked_by_expression(shared, look):
    runs_made.healthy(shared.runs / "page5", steps=60, layers=3)
    page = look(shared.page("page5"))
    wait_for_step(page, 60)
    page.locator(".iv-picks input").fill("rms/blocks.[02]|weight/norm$")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.iv-id-pick canvas")
    assert page.locator("article.iv-id-pick .iv-legend button").count() == 3
    assert len(page.evaluate("[...instrumentLive.cards.values()].find(c => c.id.startsWith('pick:')).plot.option.yAxis")) == 2
    assert "pick=" in page.url


def test_a_choice_that_an_address_would_not_keep_is_refused_at_once(shared, look):
    runs_made.healthy(shared.runs / "page14", steps=20, layers=2)
    page = look(shared.page("page14"))
    wait_for_step(page, 20)
    picks = page.locator(".iv-picks input")
    for text in ("los+" + "s?" * 148, "los+" + "s?" * 149):  # of 300 and of 302 characters
        picks.fill(text)
        page.keyboard.press("Enter")
        page.wait_for_selector("article.iv-id-pick")
    notice = page.locator(".q-notification")
    notice.wait_for()
    assert "300 characters at most, and this one has 302" in notice.inner_text()
    assert page.locator(".iv-picks .q-chip").count() == page.locator("article.iv-id-pick").count() == 1
    page.wait_for_url("**pick=**")
    page.reload()
    page.wait_for_selector("article.iv-id-pick .iv-legend :text('loss')")


EVIL = "<img src=x onerror=\"window.hacked=1\"></script><script>window.hacked=1</script>{{1+1}}`${window.hacked=1}`"


def test_names_and_texts_are_text_and_never_markup(shared, look):
    name = EVIL.replace("/", "∕")
    made = runs_made.Made(shared.runs / name, hyper_parameters={EVIL: EVIL}, host=EVIL)
    made.metrics(*({"step": step, "time": time.time(), "loss": 1.0, f"grad/norm/{EVIL}": 1.0, f"grad/norm/b{EVIL}": 2.0,
                    EVIL: 3.0} for step in range(1, 30)))
    made.sample(3, EVIL, name=EVIL)
    made.alarm(5, EVIL, EVIL, metric="loss", where=EVIL)
    page = look(shared.page(name), height=3000)
    wait_for_step(page, 29)
    page.locator(".iv-texts pre").wait_for()
    assert page.locator(".iv-texts pre").inner_text() == EVIL
    page.wait_for_selector(".iv-panel tbody tr")
    assert EVIL in page.locator(".iv-scroll").inner_text() and EVIL in page.locator(".iv-alarms").inner_text()
    page.locator(".iv-picks input").click()  # the names are in the list, which is built when it opens
    page.wait_for_selector(".q-menu .q-item")
    page.keyboard.press("Escape")
    for card in ("loss", "heat", "profile"):  # tooltips are the place where charts make markup
        box = page.locator(f"[data-chart={card}] .iv-plot").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_timeout(150)
    page.goto(page.url + "&pick=" + quote('<img src=x onerror="window.hacked=1"></script>'))
    page.wait_for_selector("article.iv-id-pick")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0


def test_a_tooltip_has_exact_values(shared, look):
    made = runs_made.Made(shared.runs / "page7")
    made.metrics(*({"step": step, "time": time.time(), "loss": 1.23456789 + step} for step in (1, 2, 3)))
    page = look(shared.page("page7"))
    wait_for_step(page, 3)
    page.wait_for_timeout(200)
    box = page.locator("[data-chart=loss] .iv-plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
    page.locator(".iv-tip").first.wait_for()
    assert page.locator(".iv-tip").first.inner_text().split("\n") == ["Step 2", "loss", "3.23456789"]


def test_a_tooltip_that_is_too_long_says_what_is_wrong_and_how_much_is_left_out(shared, look):
    made = runs_made.Made(shared.runs / "page13")
    made.metrics(*({"step": step, "time": 1e9 + step, "loss": 1.0, **{f"m/{index:02}": math.nan if index == 11 and step > 30
                                                                     else float(index) for index in range(12)}}
                   for step in range(1, 61)))
    for index in range(3):
        made.alarm(40, f"Alarm{index}", "", metric="m/00")
    page = look(shared.page("page13") + "&smooth=10&pick=m/")
    page.wait_for_selector("article.iv-id-pick canvas")
    rows = page.evaluate("(([id, card]) => [...card.plot._tip([{ axisValue: 40 }]).children].map(row => row.textContent))("
                         "[...instrumentLive.cards].find(([id]) => id === 'pick:m/'))")
    assert rows[0] == "Step 40" and [row.split(" at")[0] for row in rows[1:4]] == ["Alarm0", "Alarm1", "Alarm2"]
    assert rows[4:6] == ["11, unsmoothedNaN", "11NaN"] and rows[6].startswith("00")
    assert rows[-1] == "4 more" and len(rows) == 25


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_shows_everything_without_scrolling_sideways(shared, look, theme):
    runs_made.exploding(shared.runs / f"phone-{theme}", layers=4)
    page = look(shared.page(f"phone-{theme}"), width=390, height=844, color_scheme=theme)
    wait_for_step(page, 360)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.body.classList.contains('body--dark')") is (theme == "dark")
    low = page.evaluate("""() => {
        const number = (text) => text.match(/[\\d.]+/g).map(Number);
        const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
        const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
            .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
        const ground = (e) => { for (; e; e = e.parentElement) { const c = number(getComputedStyle(e).backgroundColor);
            if (c.length < 4 || c[3] === 1) return c; } return [255, 255, 255]; };
        const found = [];
        for (const e of document.querySelectorAll('.iv *')) {
            if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || !e.offsetParent) continue;
            const a = light(number(getComputedStyle(e).color)), b = light(ground(e));
            const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
            if (ratio < 4.5) found.push([e.className, e.textContent.slice(0, 30), ratio]);
        }
        return found; }""")
    assert low == []  # WCAG AA for text
    nameless = page.evaluate("""() => [...document.querySelectorAll('button, input, select, [role=img], [tabindex="0"]')]
        .filter(e => e.offsetParent && !(e.getAttribute('aria-label') || e.title || e.textContent.trim() || e.labels?.length))
        .map(e => e.outerHTML.slice(0, 200))""")
    assert nameless == []


def test_the_layers_at_a_step_follow_the_slider(shared, look):
    runs_made.healthy(shared.runs / "page9", steps=200, layers=5)
    page = look(shared.page("page9"), height=3200)
    page.wait_for_selector(".iv-id-profile canvas")
    wait_for(page, "() => document.querySelector('.iv-id-profile .iv-note').textContent.includes('step 200')")
    assert page.evaluate("instrumentLive.cards.get('profile').plot.option.series[0].data.length") == 5
    page.locator(".iv-slider input").fill("50")
    page.wait_for_url("**at=50**")
    wait_for(page, "() => document.querySelector('.iv-id-profile .iv-note').textContent.includes('step 50')")
    # The last histogram by then.
    wait_for(page, "() => document.querySelector('.iv-id-bins .iv-note').textContent.includes('step 40')")
    page.locator(".iv-id-heat select").select_option("attention/entropy")
    page.wait_for_url("**heat=attention/entropy**")
    wait_for(page, "() => document.querySelector('.iv-id-profile .iv-note').textContent.startsWith('attention/entropy')")
    page.locator(".iv-slider button").click()
    page.wait_for_url(lambda url: "&at=" not in url and "?at=" not in url)


def test_a_page_in_the_background_is_sent_its_head_alone_and_catches_up(shared, look):
    made = live(shared.runs / "page10")
    page = look(shared.page("page10"))
    wait_for_step(page, 200)
    hide = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}); " \
           "document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    made.metrics(*runs_made.records(range(201, 211)))
    page.wait_for_timeout(700)
    count, points = page.evaluate("instrumentLive.messages"), len(curve(page))
    for first in range(211, 251, 10):
        made.metrics(*runs_made.records(range(first, first + 10)))
        page.wait_for_timeout(350)
    made.alarm(250, "LossSpike", "", metric="loss")
    wait_for(page, "() => document.title.startsWith('⚠')")  # which is what one sees of a page in the background
    assert page.evaluate("instrumentLive.messages") <= count + 4
    assert len(curve(page)) == points
    page.evaluate(hide, False)
    wait_for_step(page, 250)
    assert [point[0] for point in curve(page)] == list(range(1, 251))


def test_a_page_with_a_token(tmp_path, serve, look):
    live(tmp_path / "runs" / "a")
    server = serve(tmp_path / "runs", "--port", "0", "--token", "a-long-secret")
    assert server.address.endswith("?token=a-long-secret")
    page = look(server.address)
    wait_for_step(page, 200)
    assert "token" not in page.url
    page.reload()
    wait_for_step(page, 200)


def test_a_training_is_watched_while_it_runs(tmp_path, serve, look):
    python = os.environ.get("MINDSPORE_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "from importlib.util import find_spec; assert find_spec('mindspore')"],
                      stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs MindSpore, in this Python or in that of $MINDSPORE_PYTHON")
    page = look(serve(tmp_path / "runs").address)
    assert "No run yet" in page.locator(".iv-empty").inner_text()
    with open(tmp_path / "demo.log", "wb") as log:
        training = subprocess.Popen([python, "-m", "instrument.cli", "demo", "--steps", "60", "--run-dir",
                                     str(tmp_path / "runs" / "demo")], cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT,
                                    env={**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"})
    try:
        wait_for_step(page, 1, seconds=180)  # MindSpore is loaded, and the step compiled
        assert page.locator(RUNNING).count() == 1 and len(curve(page)) < 60 and training.poll() is None
        wait_for_step(page, 60, seconds=180)
        page.wait_for_selector(".iv-state.iv-ended")
        assert training.wait(60) == 0, (tmp_path / "demo.log").read_text()
    finally:
        training.kill()
        training.wait()
    assert [point[0] for point in curve(page)] == list(range(1, 61))
    assert page.locator(".iv-step small").inner_text() == "of 60"


def test_what_one_hides_and_enlarges_is_what_a_link_shows(shared, look):
    runs_made.healthy(shared.runs / "page11", steps=60, layers=2)
    page = look(shared.page("page11"))
    wait_for_step(page, 60)
    page.locator("[data-chart=loss] .iv-legend button", has_text="val/loss").click()
    page.wait_for_url("**hide=loss%7Cval/loss**")
    page.locator("[data-chart=grad] .iv-wide").click()
    page.wait_for_url("**large=grad**")
    other = look(page.url)
    wait_for_step(other, 60)
    drawn = other.evaluate("instrumentLive.cards.get('loss').plot.chart.getOption().series.map(s => [s.id, s.data.length])")
    assert dict(drawn)["line:0:val/loss"] == 0 and dict(drawn)["line:0:loss"] == 60
    assert other.locator("[data-chart=loss] .iv-legend button[aria-pressed=false]").inner_text() == "val/loss"
    assert other.locator(".iv-large").get_attribute("data-chart") == "grad"


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_charts_fill_their_rows_and_their_cards(shared, look, width):
    if not (shared.runs / "page12").exists():
        runs_made.healthy(shared.runs / "page12", steps=60, layers=12)
    page = look(shared.page("page12"), width=width, height=9000 if width < 640 else 3500)
    wait_for_step(page, 60)
    page.wait_for_selector(".iv-id-bins canvas")
    page.wait_for_timeout(300)
    wrong = page.evaluate("""() => [...document.querySelectorAll('.iv-card')].filter(card => {
        const box = card.getBoundingClientRect(), canvas = card.querySelector('canvas')?.getBoundingClientRect();
        return canvas && (canvas.bottom > box.bottom || canvas.right > box.right || canvas.height < 200);
    }).map(card => card.dataset.chart)""")
    assert wrong == []
    gaps = page.evaluate("""() => [...document.querySelectorAll('.iv-grid')].map(grid => grid.getBoundingClientRect().right -
        Math.min(...Object.values([...grid.children].reduce((rows, card) => { const box = card.getBoundingClientRect();
            rows[box.top] = Math.max(rows[box.top] || 0, box.right); return rows; }, {}))))""")
    assert max(gaps) <= 1
