"""The report: one file that shows what the page shows, from the disk and without a network."""
import json
import re
import time

import pytest
from runs_made import exploding, healthy

from instrument.cli import main
from instrument.dashboard import report

needs_nicegui = pytest.mark.skipif(not report.is_possible(),
                                   reason="needs NiceGUI: pip install 'mindspore-instrument[dashboard]'")
LIVE = "window.instrumentLive"


def plot(chart):
    return f"{LIVE}.cards.get('{chart}').plot"


def wait_for(page, expression):
    """Playwright's own waiting evaluates text in the page, which the report's policy does not allow."""
    end = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


def content(file):
    text = file.read_text("utf-8")
    return json.loads(re.search(r'<script type="application/json" id="stored">(.*?)</script>', text, re.DOTALL)[1])


@needs_nicegui
def test_the_report_is_opened_from_disk_without_a_network(tmp_path, look):
    base, high, output = tmp_path / "base", tmp_path / "high <b>rate", tmp_path / "report.html"
    healthy(base, steps=300)
    exploding(high, steps=200)
    assert main(["report", str(base), str(high), "-o", str(output)]) == 0
    page = look(output.as_uri(), offline=True)
    page.wait_for_selector("[data-chart=loss] canvas")
    assert page.locator(".iv-run h2").all_inner_texts() == ["base", "high <b>rate"]
    assert page.locator(".iv-alarms").inner_text().count("NonFinite") >= 1
    drawn = page.evaluate(f"{plot('loss')}.data.get('line:0:loss').map((point) => point[0])")
    assert drawn[0] == 1 and drawn[-1] == 300
    # What the page can do without a server it does: scale, zoom, what is shown in lists, which curves, the size.
    axis = f"{plot('loss')}.option.yAxis[0].type"
    before = page.evaluate(axis)
    page.locator("[data-chart=loss] button", has_text="log").click()
    wait_for(page, f"{axis} !== '{before}'")
    page.locator("[data-chart=loss] button", has_text="log").click()
    wait_for(page, f"{axis} === '{before}'")
    page.evaluate(f"{LIVE}.zoom(50, 100)")
    drawn = f"{plot('loss')}.data.get('line:0:loss').map(point => point[0])"
    wait_for(page, f"Math.max(...{drawn}) === 100 && Math.min(...{drawn}) === 50")  # so that the y axes fit what is in sight
    ends = f"{plot('grad')}.option.xAxis"
    wait_for(page, f"{ends}.min === 50 && {ends}.max === 100")
    page.locator("#whole").click()
    wait_for(page, f"{ends}.min === 1 && {ends}.max === 300 && Math.max(...{drawn}) === 300")
    for chart in ("heat", "histogram"):
        select = page.locator(f"[data-chart={chart}] select")
        choices = select.locator("option").all_inner_texts()
        series = f"JSON.stringify({plot(chart)}.option.series)"
        first = page.evaluate(series)
        select.select_option(index=1)
        wait_for(page, f"{series} !== {json.dumps(first)}")
        select.select_option(index=0)
        wait_for(page, f"{series} === {json.dumps(first)}")
        assert len(choices) > 1
    page.locator("[data-chart=loss] .iv-legend button").first.click()
    page.wait_for_selector("[data-chart=loss] .iv-legend button[aria-pressed=false]")
    page.locator("input[type=search]").fill("weight/norm")
    wait_for(page, "document.querySelectorAll('.iv-scroll tbody tr').length === 1")
    page.locator("#theme").click()
    page.wait_for_selector("body.body--dark")


@needs_nicegui
def test_a_text_cannot_end_the_script_it_is_in(tmp_path, look):
    made = healthy(tmp_path / "run", steps=30)
    made.sample(30, "</script><script>document.title = 'taken'</script><!-- <script>")
    report.write([tmp_path / "run"], tmp_path / "report.html")
    page = look((tmp_path / "report.html").as_uri())
    page.wait_for_selector(".iv-texts pre")
    assert "</script><script>" in page.locator(".iv-texts pre").first.inner_text() and page.title() != "taken"


@needs_nicegui
def test_what_is_in_the_file_is_decimated_and_whole(tmp_path):
    healthy(tmp_path / "run", steps=9000)
    report.write([tmp_path / "run"], tmp_path / "report.html")
    stored = content(tmp_path / "report.html")
    loss = stored["message"]["charts"]["loss"]["option"]["series"]
    points = next(each["data"] for each in loss if each["id"] == "line:0:loss")
    assert points[0][0] <= 10 and points[-1][0] == 9000 and 500 < len(points) <= 4000
    heat = next(spec for spec in stored["message"]["layout"] if spec["id"] == "heat")
    assert {*stored["heat"], heat["chosen"]} == set(heat["choices"]) and len(stored["heat"]) > 1


@needs_nicegui
def test_a_report_without_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty"), "-o", str(tmp_path / "report.html")]) == 1
    assert "no run in" in capsys.readouterr().err and not (tmp_path / "report.html").exists()
    for number in range(40):
        healthy(tmp_path / "many" / str(number), steps=2)
    assert main(["report", str(tmp_path / "many"), "-o", str(tmp_path / "report.html")]) == 1
    assert "a report shows" in capsys.readouterr().err


@needs_nicegui
def test_a_comparison_can_write_the_report_too(tmp_path, capsys):
    for name in ("a", "b"):
        healthy(tmp_path / name, steps=20)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "both.html")]) == 0
    assert "loss, last" in capsys.readouterr().out
    assert [run["name"] for run in content(tmp_path / "both.html")["message"]["runs"]] == ["a", "b"]


def test_without_nicegui_the_command_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "is_possible", lambda: False)
    assert main(["report", str(tmp_path)]) == 1
    assert 'pip install "mindspore-instrument[dashboard]"' in capsys.readouterr().err
