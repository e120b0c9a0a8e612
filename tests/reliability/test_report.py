"""The page about a run: reading the folder, the page's size and safety, and the page in a browser."""

import json
import math
import random
import re
from html import unescape
from pathlib import Path

import pytest

from tests.reliability.browser import CHROMIUM, browser
from torchtitan.report.page import page_of
from torchtitan.report.read import read_run, thin_out

LOSS = "loss_metrics/global_avg_loss"
T0 = 1_700_000_000.0
HOSTILE = '</script><script>document.title = "taken"</script><img src=x onerror="alert(1)">'


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def line(step: int, seconds: float, **metrics: object) -> dict:
    return {"step": step, "wall_time": T0 + seconds, **metrics}


def event(kind: str, at: float, **details: object) -> dict:
    return {"kind": kind, "wall_time": T0 + at, "rank": 0, "message": kind, **details}


def write_run_with_a_restart(folder: Path) -> None:
    """Steps 1 to 8, killed, and again from step 6 to 10; a save after step 5."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"training": {"steps": 10, "seq_len": 64}, "optimizer": {"lr": 0.1}}
    changed = {**config, "optimizer": {"lr": 0.2}}
    write_lines(
        folder / "events.jsonl",
        [
            event("start", 0, config=config, versions={"torch": "2.x"}, world_size=1),
            event("training", 1, step=0),
            event("save", 6.5, step=5, seconds=0.25),
            event("start", 20, config=changed, versions={"torch": "2.x"}, world_size=1),
            event("training", 21, step=5),
            event("warning", 24, message="the tokens are tired"),
            event("end", 30),
        ],
    )
    steps = [(i, i) for i in range(1, 9)] + [(i, i + 16) for i in range(6, 11)]
    metrics = [line(i, t, **{LOSS: 8 - i / 4 + t / 100, "grad_norm": 1.0}) for i, t in steps]
    metrics.insert(5, line(5, 5.5, **{"validation_metrics/loss": 7.0}))
    write_lines(folder / "metrics.jsonl", metrics)


def report_on(folder: Path, **options: float) -> str:
    return page_of(read_run(folder), **options)


def data_of(html: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL).group(1))


def text_of(html: str) -> str:
    body = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


# ---- reading ----


def test_steps_done_again_are_separate_from_final_steps_and_the_lost_start_is_a_fault(tmp_path):
    write_run_with_a_restart(tmp_path)
    data = data_of(report_on(tmp_path))
    (loss,) = [c for p in data["panels"] for c in p["curves"] if c["metric"] == LOSS]
    assert loss["kept"]["x"] == list(range(1, 11))
    assert loss["kept"]["start"] == [0] * 5 + [1] * 5
    assert loss["redone"]["x"] == [6, 7, 8]
    assert data["redone"] == [{"x0": 6, "x1": 8, "t0": 6.0, "t1": 8.0}]
    (lost,) = [e for e in data["events"] if e["group"] == "fault"]
    assert (lost["kind"], lost["x"], lost["t"]) == ("lost", 8, 8.0)


def test_redone_stretch_begins_after_the_step_of_the_checkpoint_not_at_the_next_logged_step(
    tmp_path,
):
    write_lines(
        tmp_path / "events.jsonl",
        [event("start", 0), event("training", 1, step=0), event("save", 50, step=50)]
        + [event("start", 100), event("training", 101, step=50), event("end", 140)],
    )
    first = [line(step, step, loss=1.0) for step in (1, *range(10, 81, 10))]
    again = [line(step, step + 60, loss=1.0) for step in range(60, 81, 10)]
    write_lines(tmp_path / "metrics.jsonl", [*first, *again])
    data = data_of(report_on(tmp_path))
    assert data["redone"] == [{"x0": 51, "x1": 80, "t0": 51.0, "t1": 80.0}]


def test_config_versions_and_what_changed_are_on_the_page(tmp_path):
    write_run_with_a_restart(tmp_path)
    text = text_of(report_on(tmp_path))
    for shown in ("training.seq_len 64", "optimizer.lr 0.1 → 0.2", "torch 2.x", "Step 10 of 10"):
        assert shown in text


@pytest.mark.parametrize(
    ("last_events", "seconds_later", "state"),
    [
        ([event("end", 40)], 0, "ended"),
        ([event("stop", 39), event("end", 40)], 0, "stopped"),
        ([event("fault", 40, message="disk full", exit_code=1)], 0, "ended with a fault"),
        ([], 30, "running"),
        ([], 7200, "no sign of life for 2 h"),
    ],
)
def test_page_shows_the_state_of_the_run(tmp_path, last_events, seconds_later, state):
    write_lines(tmp_path / "events.jsonl", [event("start", 0), *last_events])
    html = report_on(tmp_path, now=T0 + seconds_later)
    assert re.search(r'class="state \w+">([^<]*)<', html).group(1) == state


def test_half_written_and_damaged_lines_are_passed_over(tmp_path):
    good = [line(1, 1, loss=2.0), line(2, 2, loss="NaN"), line(3, 3, loss=1.0)]
    rows = [json.dumps(row) for row in good]
    rows[1:1] = ["", "[1, 2]", "{nonsense", "[" * 100_000, '{"step": true, "wall_time": 5}']
    rows[1:1] = ['{"step": 1e999, "wall_time": 5, "loss": 1}', '{"step": -3, "wall_time": 5}']
    rows.append('{"step": 4, "wall_time": 17000')
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + "\n".join(rows).encode())
    curve = read_run(tmp_path).curves["loss"]
    assert list(curve.steps) == [1, 2, 3]
    assert math.isnan(curve.values[1])


def test_files_outside_the_folder_are_not_read(tmp_path):
    write_run_with_a_restart(tmp_path / "other")
    (tmp_path / "run").mkdir()
    write_lines(tmp_path / "run" / "events.jsonl", [event("start", 0)])
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "other" / "metrics.jsonl")
    assert read_run(tmp_path / "run").curves == {}


# ---- size ----


def test_thinned_curve_keeps_ends_extremes_and_a_value_that_is_not_finite():
    values = [random.Random(0).gauss(0, 1)] + [math.sin(i / 500) for i in range(100_000)]
    values[31_234], values[55_555], values[77_777] = 50.0, -50.0, math.nan
    kept = thin_out(values, 2_000)
    assert len(kept) <= 2_000 and kept == sorted(set(kept))
    assert {0, len(values) - 1, 31_234, 55_555, 77_777} <= set(kept)
    # Every stretch of the curve still has a point near it.
    assert max(b - a for a, b in zip(kept, kept[1:], strict=False)) < 500


def test_page_of_a_long_run_with_many_metrics_stays_under_2_mb(tmp_path):
    draw = random.Random(0)
    names = [f"metric/{i:02d}" for i in range(70)]
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 3_001):
            values = {name: draw.gauss(0, 1e-7) for name in names}
            file.write(json.dumps(line(step * 997, step * 3333.3, **values)) + "\n")
    warnings = [event("warning", i, message=f"{i} " + "long " * 1000) for i in range(3_000)]
    write_lines(tmp_path / "events.jsonl", warnings)
    episodes = [{"step": i // 9, "text": "ä" * 50_000} for i in range(99)]
    write_lines(tmp_path / "episodes.jsonl", episodes)
    html = report_on(tmp_path)
    assert len(html.encode()) < 2_000_000
    assert "10 of 70 metrics are not drawn" in text_of(html)


# ---- untrusted text ----


def write_hostile_run(folder: Path) -> None:
    write_lines(folder / "metrics.jsonl", [line(i, i, **{HOSTILE: i / 2}) for i in range(1, 4)])
    config = {"training": {HOSTILE: HOSTILE, "steps": HOSTILE}}
    names = {"config": config, "versions": {HOSTILE: HOSTILE}, "host": HOSTILE}
    start = event("start", 0, message=HOSTILE, **names)
    odd = dict.fromkeys(["kind", "rank", "seconds", "exit_code", "message"], HOSTILE)
    odd |= {"wall_time": T0 + 1, "step": "x"}
    strange = [event("fault", 2, exit_code=1e999, rank=-(10**400), message=None), event("start", 3)]
    strange += [event("start", 4, config=[1], versions=3), {"wall_time": 1e14}]
    write_lines(folder / "events.jsonl", [start, odd, *strange, {**start, "wall_time": T0 + 9}])
    sample = {"step": 1, **dict.fromkeys(["prompt", "text", "expected_answer", "reward"], HOSTILE)}
    write_lines(folder / "episodes.jsonl", [sample, {**sample, "text": "\ud800 lone"}])


def test_text_of_the_folder_is_escaped_everywhere(tmp_path):
    write_hostile_run(tmp_path)
    html = report_on(tmp_path)
    assert html.count("<script") == html.count("</script>") == 2
    assert "<img" not in html
    html.encode()


def test_policy_allows_the_pages_own_script_and_no_connection(tmp_path):
    write_run_with_a_restart(tmp_path)
    html = report_on(tmp_path)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1)
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.findall(r'(?:src|href)="|url\(|@import|https?://(?!www\.w3\.org/2000/svg)', html)


# ---- in a browser ----

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def open_report(page, folder: Path, **size: int) -> None:
    page.errors.clear()
    path = folder / "report.html"
    path.write_text(report_on(folder))
    page.open(path, **size)


def center_of(page, selector: str, index: int = 0) -> tuple[float, float]:
    box = f"document.querySelectorAll('{selector}')[{index}].getBoundingClientRect()"
    return tuple(page.evaluate(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})"))


def click(page, x: float, y: float) -> None:
    for kind in ("mousePressed", "mouseReleased"):
        page.mouse(kind, x, y, button="left", clickCount=1)


def paths(page, selector: str) -> list[str]:
    return page.evaluate(
        f"[...document.querySelectorAll('#charts > .panel {selector}')]"
        ".map(p => p.getAttribute('d')).filter(d => d)"
    )


@in_browser
def test_browser_draws_curves_and_answers_the_mouse(page, tmp_path):
    write_run_with_a_restart(tmp_path)
    open_report(page, tmp_path)
    titles = page.evaluate("[...document.querySelectorAll('.panel h2')].map(h => h.textContent)")
    assert titles == ["Loss", "Gradient norm"]
    loss, validation, norm = paths(page, ".curve:not(.dashed)")
    assert loss.count("L") == norm.count("L") == 9  # ten steps, one line
    assert validation.count("M") == 1
    assert [path.count("L") for path in paths(page, ".dashed")] == [2, 2]  # steps 6 to 8

    # At the right edge of the plot, the page shows the last step's values.
    right = page.evaluate("document.querySelector('.panel .plot').getBoundingClientRect().right")
    _, y = center_of(page, ".panel svg")
    page.mouse("mouseMoved", right - 1, y)
    read_out = "[...document.querySelectorAll('#charts > .panel .key b')].map(b => b.textContent)"
    assert page.evaluate(read_out) == ["5.76", "7", "1"]
    assert "step 10" in page.evaluate("document.getElementById('place').textContent")
    cursors = "[...document.querySelectorAll('.cursor')].map(c => c.getAttribute('visibility'))"
    assert page.evaluate(cursors) == ["visible"] * 3

    # On the axis of time, the two starts are two lines.
    click(page, *center_of(page, ".switch button", 1))
    loss_by_time = paths(page, ".curve:not(.dashed)")[0]
    assert loss_by_time != loss and loss_by_time.count("M") == 2

    # Dragging over a part enlarges it.
    width = page.evaluate("document.querySelector('.panel .plot').getBoundingClientRect().width")
    page.mouse("mousePressed", right - width / 2, y, button="left", clickCount=1)
    page.mouse("mouseMoved", right - width / 4, y, button="left", buttons=1)
    page.mouse("mouseReleased", right - width / 4, y, button="left", clickCount=1)
    assert paths(page, ".curve:not(.dashed)")[0] != loss_by_time
    assert not page.evaluate("document.querySelector('.bar > button').disabled")
    assert page.errors == []


@in_browser
def test_page_of_390_pixels_cuts_no_table_and_breaks_no_word(page, tmp_path):
    write_run_with_a_restart(tmp_path)
    message = "Training waited for the memory of an evaluation that nobody remembers"
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write(json.dumps(event("validation", 31, step=10, message=message)) + "\n")
    sample = {"step": 1, "prompt": "What is seven times eight?", "text": "Fifty-six", "reward": 0.5}
    sample |= {"expected_answer": "56", "finish_reason": "stop", "policy_version": 0}
    write_lines(tmp_path / "episodes.jsonl", [{**sample, "advantage": 0.1}])
    open_report(page, tmp_path, width=390)
    cut = "[...document.querySelectorAll('.wide')].map(box => box.scrollWidth - box.clientWidth)"
    assert set(page.evaluate(cut)) == {0}
    # A word that is broken, or two lines of it, has several boxes.
    words = """[...document.querySelectorAll('td')].flatMap(cell => {
      const text = [...cell.childNodes].find(n => n.nodeType === 3), found = [];
      for (const match of (text ? text.textContent : "").matchAll(/[\\w-]+/g)) {
        const range = document.createRange();
        range.setStart(text, match.index);
        range.setEnd(text, match.index + match[0].length);
        if (range.getClientRects().length > 1) found.push(match[0]);
      }
      return found;
    })"""
    assert page.evaluate(words) == []
    legends = "[...document.querySelectorAll('.key')].filter(k => k.querySelector('i')).map(k => k.innerText)"
    assert page.evaluate(legends) == ["training", "validation", "before clipping"]


@in_browser
def test_browser_runs_nothing_from_the_folder(page, tmp_path):
    write_hostile_run(tmp_path)
    open_report(page, tmp_path)
    assert page.evaluate("document.title").startswith("</script>")
    assert page.evaluate("document.images.length + document.scripts.length") == 2
    page.evaluate("document.querySelector('#charts > details').open = true")
    assert page.evaluate("document.querySelector('.panel h2').textContent") == HOSTILE[:100]
    assert page.errors == []
    # The security policy holds even if escaping failed.
    page.evaluate("document.body.innerHTML = '<img src=x onerror=\"document.title = 1\">'")
    assert page.evaluate("document.title") != "1"
