"""Make the HTML page about a run.

Nothing from the run's folder can become code: texts are escaped in HTML, or are data in a JSON block,
which the script inserts as text nodes. The page's content security policy allows no connection, and only
the script and the style whose hashes are set here.
"""

import base64
import hashlib
import json
import math
import time
from bisect import bisect_left, bisect_right
from datetime import datetime
from html import escape
from itertools import compress, islice
from pathlib import Path
from string import Template
from typing import Any

from torchtitan.report.read import Curve, Run, number, spread, thin_out
from torchtitan.tools.events import flat_settings

POINTS_PER_CURVE = 2_000
# A point takes 24 bytes.
POINTS_PER_PAGE = 50_000
MAX_CURVES = 60
MAX_EVENTS = 500
MAX_SETTINGS = 500
# Most characters of a message or sample.
LONGEST_TEXT = 800
# Silence after which an unfinished run counts as dead.
SECONDS_OF_SILENCE = 600

# (panel, metric, label of the curve); torchtitan.callbacks.metrics and torchtitan.rl name the metrics
PANELS = [
    ("Loss", "loss_metrics/global_avg_loss", "training"),
    ("Loss", "validation_metrics/loss", "validation"),
    ("Loss", "loss_metrics/global_max_loss", "highest rank"),
    ("Loss", "loss", "training"),
    ("Accuracy of preferences", "loss_metrics/accuracy", "training"),
    ("Accuracy of preferences", "validation_metrics/accuracy", "validation"),
    ("Margin of preferences", "loss_metrics/margin", "training"),
    ("Margin of preferences", "validation_metrics/margin", "validation"),
    ("Divergence from the teacher", "loss_metrics/kl", "training"),
    ("Divergence from the teacher", "validation_metrics/kl", "validation"),
    ("Divergence from the teacher", "loss/kl_teacher", "own samples"),
    ("Reward", "rl/reward", "training"),
    ("Reward", "eval/greedy_reward", "held out, greedy"),
    ("Reward", "eval/sampled_reward", "held out, sampled"),
    ("Exact answers", "rl/exact", "training"),
    ("Exact answers", "eval/greedy_exact", "held out, greedy"),
    ("Exact answers", "eval/sampled_exact", "held out, sampled"),
    ("Staleness, weight updates", "rl/lag", "oldest episode"),
    ("Gradient norm", "grad_norm", "before clipping"),
    ("Learning rate", "lr", "of the step"),
    ("Tokens per second and device", "throughput(tps)", "training"),
    ("MFU, %", "mfu(%)", "of the bf16 peak"),
    ("Seconds per step", "time_metrics/end_to_end(s)", "whole step"),
    ("Seconds per step", "time/step(s)", "whole step"),
    ("Seconds per step", "time/generate(s)", "generation"),
    ("Seconds per step", "time/train(s)", "training"),
    ("Seconds per step", "time/update_generator(s)", "weights to the generator"),
    ("Memory, GiB", "memory/max_active(GiB)", "active"),
    ("Memory, GiB", "memory/max_reserved(GiB)", "reserved"),
    ("Tokens per completion", "rl/completion_tokens", "training"),
    ("Entropy of the policy", "loss/entropy", "training"),
]
REWARD_PART = "rl/reward/"
# Kind of event -> group. Events of other kinds count as warnings.
GROUPS = dict.fromkeys(("start", "training", "end", "stop"), "run")
GROUPS |= {"fault": "fault", "lost": "fault", "validation": "validation"}
GROUPS |= {"save": "save", "background save": "save"}
FACTS = {  # metric -> name in the page's header, which shows the last value
    "loss_metrics/global_avg_loss": "Loss",
    "loss": "Loss",
    "validation_metrics/loss": "Validation loss",
    "rl/reward": "Reward",
    "throughput(tps)": "Tokens/s and device",
    "mfu(%)": "MFU, %",
    "n_tokens_seen": "Tokens seen",
}
# key of a sample -> heading, CSS class
SAMPLE_COLUMNS = {
    "step": ("step", "number"),
    "prompt": ("prompt", "sample"),
    "text": ("completion", "sample"),
    "expected_answer": ("expected", ""),
    "reward": ("reward", "number"),
    "advantage": ("advantage", "number"),
    "policy_version": ("policy version", "number"),
    "finish_reason": ("ended by", ""),
}


def page_of(run: Run, now: float | None = None) -> str:
    """Return the page's HTML. now: Unix seconds, to distinguish a running from a dead run."""
    now = time.time() if now is None else now
    events = _events(run)
    data = _data(run, events)
    # Without "<" the JSON cannot close its script element.
    block = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    folder = Path(__file__).parent
    parts = {name: (folder / f"page.{name}").read_text("utf-8") for name in ("html", "js", "css")}
    policy = (
        f"default-src 'none'; script-src {_hash(parts['js'])}; style-src {_hash(parts['css'])}; "
        "base-uri 'none'; form-action 'none'"
    )
    starts = [event for event in events if event["kind"] == "start"]
    config = _settings(starts[-1].get("config")) if starts else {}
    title = starts[-1]["message"] if starts else ""
    title = title if title not in ("", "default job") else run.folder.resolve().name
    blocks = [_header(title, run, events, data["t0"], config, now), _charts(run, data)]
    blocks += [_event_table(events), _sample_table(run.samples), _config_tables(starts, config)]
    return Template(parts["html"]).substitute(
        policy=policy,
        title=_text(title),
        style=parts["css"],
        blocks="\n".join(filter(None, blocks)),
        data=block,
        script=parts["js"],
    )


# ---- data of the charts ----


def _data(run: Run, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the script's data; times are seconds after `t0`."""
    times = [event["wall_time"] for event in events]
    times += [t for curve in run.curves.values() for t in (curve.times[0], curve.times[-1])]
    t0 = min(times, default=0.0)
    digits = 3 if max(times, default=0.0) - t0 < 3600 else 1

    # start -> lowest first step of all later starts. The start's steps from that step on were redone.
    redone_from, lowest, first_steps = {}, math.inf, run.first_steps()
    for start, first_step in sorted(first_steps.items(), reverse=True):
        redone_from[start] = lowest
        lowest = min(lowest, first_step)

    chosen = [entry for entry in PANELS if entry[1] in run.curves]
    drawn = {metric for _, metric, _ in chosen}
    # In a run with one rank, the mean and the highest loss over ranks are equal: draw one of them.
    mean, highest = (f"loss_metrics/global_{kind}_loss" for kind in ("avg", "max"))
    if {mean, highest} <= drawn and run.curves[mean].values == run.curves[highest].values:
        chosen = [entry for entry in chosen if entry[1] != highest]
    # Show the scores that the reward function reports beside the reward.
    of_reward = [m for m in run.curves if m.startswith(REWARD_PART) and m not in drawn]
    chosen += [("Reward", m, f"{m.removeprefix(REWARD_PART)}, training") for m in of_reward]
    drawn.update(of_reward)
    chosen += [(metric[:100], metric, "") for metric in run.curves if metric not in drawn]
    chosen = chosen[:MAX_CURVES]

    limit = min(POINTS_PER_CURVE, POINTS_PER_PAGE // max(1, len(chosen)))
    known = {title for title, _, _ in PANELS}
    panels: dict[str, dict[str, Any]] = {}
    for title, metric, label in chosen:
        curve, columns = run.curves[metric], {"label": label[:100], "metric": metric[:100]}
        # Indices of the curve's points: of final steps, and of steps that were done again later.
        indices: dict[str, list[int]] = {"kept": [], "redone": []}
        for i, (start, step) in enumerate(zip(curve.starts, curve.steps, strict=True)):
            indices["kept" if step < redone_from[start] else "redone"].append(i)
        num_redone = min(len(indices["redone"]), limit // 4)
        for name, most in (("kept", limit - num_redone), ("redone", num_redone)):
            thinned = thin_out((curve.values[i] for i in indices[name]), most)
            shown = [indices[name][i] for i in thinned]
            columns[name] = {
                "start": [curve.starts[i] for i in shown],
                "x": [curve.steps[i] for i in shown],
                "t": [round(curve.times[i] - t0, digits) for i in shown],
                "y": [_rounded(curve.values[i]) for i in shown],
            }
        panel = {"title": title, "curves": [], "more": title not in known}
        panels.setdefault(title, panel)["curves"].append(columns)

    # The first and the last (step, time) of each start's steps that were done again.
    redone: list[list[tuple[float, float]]] = []
    for start, points in run.points().items():
        first = max(redone_from[start], first_steps[start])
        if (i := bisect_left(points, (first, -math.inf))) < len(points):
            (step, at), (before, began) = points[i], points[max(i - 1, 0)]
            # The first redone step may not be logged: interpolate its time.
            at -= (at - began) * (step - first) / max(step - before, 1)
            redone.append([(first, at), points[-1]])
    return {
        "t0": t0,
        "panels": list(panels.values()),
        "events": [
            {
                "kind": event["kind"][:40],
                "group": GROUPS.get(event["kind"], "warning"),
                "x": event["place"],
                "t": round(event["wall_time"] - t0, digits),
                "seconds": _rounded(number(event.get("seconds")) or 0.0) or 0.0,
                "text": event["message"][:200],
            }
            for event in events
        ],
        "redone": [
            {"x0": x0, "x1": x1, "t0": round(low - t0, digits), "t1": round(high - t0, digits)}
            for (x0, low), (x1, high) in spread(redone, 100)
        ],
    }


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


# ---- events ----


def _events(run: Run) -> list[dict[str, Any]]:
    """Return the events in order of time, each with its `place` (a step) and `count` (of equal events).

    If a new start follows a start without an end or fault, an event "lost" is inserted between them.
    """
    longest = max(run.curves.values(), key=lambda curve: len(curve.steps), default=Curve())
    trail = sorted(zip(longest.times, longest.steps, strict=True))
    times = [time for time, _ in trail]
    with_lost: list[dict[str, Any]] = []
    is_running, last_sign = False, 0.0
    for event in run.events:
        if event["kind"] == "start" and is_running:
            logged = times[: bisect_left(times, event["wall_time"])][-1:]
            message = "ended without a message: killed, or the machine went away"
            lost = {"kind": "lost", "step": None, "message": message}
            with_lost.append({**lost, "wall_time": max([last_sign, *logged])})
        if event["kind"] in ("start", "end", "fault"):
            is_running = event["kind"] == "start"
        last_sign = event["wall_time"]
        with_lost.append(event)

    events: list[dict[str, Any]] = []
    num_logged, place = 0, 0
    for event in with_lost:
        identity = event["kind"], event["message"], event["step"]
        same = [e for e in events[-3:] if (e["kind"], e["message"], e["step"]) == identity]
        if same:
            same[0]["count"] += 1
            continue
        num_before, num_logged = num_logged, bisect_right(times, event["wall_time"])
        if event["step"] is not None:
            place = event["step"]
        elif num_logged > num_before:
            place = trail[num_logged - 1][1]
        events.append({**event, "count": 1, "place": place})
    if len(events) > MAX_EVENTS:
        is_important = [GROUPS.get(event["kind"]) in ("run", "fault") for event in events]
        important = spread(list(compress(events, is_important)), MAX_EVENTS // 2)
        others = [e for e, keep in zip(events, is_important, strict=True) if not keep]
        events = important + spread(others, MAX_EVENTS - len(important))
        events.sort(key=lambda event: event["wall_time"])
    return events


# ---- blocks of HTML ----


def _header(
    title: str,
    run: Run,
    events: list[dict[str, Any]],
    t0: float,
    config: dict[str, Any],
    now: float,
) -> str:
    signs = [event["wall_time"] for event in events]
    last_sign = max(signs + [curve.times[-1] for curve in run.curves.values()], default=0.0)
    kinds = [e["kind"] for e in events if e["kind"] in ("start", "stop", "end", "fault")]
    if kinds[-1:] == ["fault"]:
        state, word = "bad", "ended with a fault"
    elif kinds[-1:] == ["end"]:
        state, word = ("quiet", "stopped") if kinds[-2:-1] == ["stop"] else ("good", "ended")
    elif now - last_sign < SECONDS_OF_SILENCE:
        state, word = "good", "running"
    else:
        state = "bad" if kinds else "quiet"
        word = f"no sign of life for {_duration(now - last_sign)}"

    facts = {}
    if run.curves:
        steps, last_step = (
            config.get("training.steps"),
            max(c.steps[-1] for c in run.curves.values()),
        )
        facts["Step"] = f"{last_step:,}" + (f" of {steps:,}" if isinstance(steps, int) else "")
    for metric, name in FACTS.items():
        if metric in run.curves:
            value = run.curves[metric].values[-1]
            is_large = math.isfinite(value) and abs(value) >= 1000
            facts[name] = f"{value:,.0f}" if is_large else f"{value:.4g}"
    facts["Starts"] = kinds.count("start") or len(run.first_steps())
    if num_faults := sum(event["kind"] in ("fault", "lost") for event in events):
        facts["Faults"] = num_faults
    facts |= {"Began": _clock(t0), "Lasted": _duration(last_sign - t0)}
    cells = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items()
    )
    return (
        f'<header><h1>{_text(title, 120)} <span class="state {state}">{_text(word)}</span></h1>'
        f'<p class="quiet">{_text(run.folder)}, as of {_clock(now)}</p>'
        f'<dl class="facts">{cells}</dl></header>'
    )


def _charts(run: Run, data: dict[str, Any]) -> str:
    if not run.curves:
        return (
            '<p class="notice">No curves: this run wrote no metrics. '
            "Set metrics.enable_jsonl = true.</p>"
        )
    drawn = sum(len(panel["curves"]) for panel in data["panels"])
    note = f"Curves from {run.source}."
    if len(run.curves) - drawn > 1:
        note += f" {len(run.curves) - drawn} of {len(run.curves)} metrics are not drawn."
    return (
        '<div id="charts"></div>'
        "<noscript><p>The curves are drawn by a script in this page, which is turned off.</p>"
        f'</noscript><p class="quiet">{_text(note)} A dashed line shows steps that were repeated after '
        "a restart; × marks a non-finite value. Drag to zoom, double-click to show all.</p>"
    )


def _event_table(events: list[dict[str, Any]]) -> str:
    rows = []
    for event in events:
        times = f" (×{event['count']})" if event["count"] > 1 else ""
        rank, code = number(event.get("rank")), number(event.get("exit_code"))
        who = f"rank {int(rank)}: " if rank and math.isfinite(rank) else ""
        code = f" (exit code {int(code)})" if code is not None and math.isfinite(code) else ""
        step = "" if event["step"] is None else f"{event['step']:,}"
        rows.append(
            f'<tr class="{GROUPS.get(event["kind"], "warning")}"><td>{_clock(event["wall_time"])}</td>'
            f'<td class="number" data-name="{step and "step"}">{step}</td>'
            f"<td><i></i>{_text(event['kind'], 40)}</td>"
            f'<td class="text">{_text(who + event["message"] + code)}{times}</td></tr>'
        )
    header_cells = "<th>time</th><th class='number'>step</th><th>event</th><th>message</th>"
    return _table("Events", rows, header_cells)


def _sample_table(samples: list[dict[str, Any]]) -> str:
    rows = []
    for sample in samples:
        cells = []
        for key, (name, kind) in SAMPLE_COLUMNS.items():
            value = sample.get(key)
            value = "" if value is None else f"{value:.3g}" if isinstance(value, float) else value
            cells.append(f'<td class="{kind}" data-name="{name}">{_text(value)}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    header_cells = "".join(
        f'<th class="{kind if kind == "number" else ""}">{name}</th>'
        for name, kind in SAMPLE_COLUMNS.values()
    )
    return _table("Samples", rows, header_cells)


def _config_tables(starts: list[dict[str, Any]], config: dict[str, Any]) -> str:
    if not starts:
        return ""
    latest = starts[-1]
    facts = _settings(latest.get("versions"))
    for key in ("host", "world_size", "program", "config_digest"):
        if key in latest:
            facts[key.replace("_", " ")] = latest[key]
    if not isinstance(not_default := latest.get("not_default"), list):
        not_default = list(config)
    before = _settings(starts[-2].get("config")) if len(starts) > 1 else config
    tables = {
        "Versions and place of the last start": facts,
        "Changed at the last start": {
            key: f"{_value(before.get(key))} → {_value(config.get(key))}"
            for key in sorted(before.keys() | config.keys())
            if before.get(key) != config.get(key)
        },
        "Config, where it differs from the defaults": {
            key: value for key, value in config.items() if key in not_default
        },
        "Defaults": {key: value for key, value in config.items() if key not in not_default},
    }
    row = "<tr><td><code>{}</code></td><td><code>{}</code></td></tr>".format
    return "".join(
        _table(title, [row(_text(key, 100), _text(_value(x), 300)) for key, x in values.items()])
        for title, values in tables.items()
    )


def _table(title: str, rows: list[str], header_cells: str = "") -> str:
    """Return a collapsible table, or "" without rows. header_cells: "" for a table of key and value."""
    if not rows:
        return ""
    state = "" if title == "Defaults" else " open"
    head = (
        f"<table><thead><tr>{header_cells}</tr></thead>" if header_cells else "<table class='keys'>"
    )
    return (
        f"<details{state}><summary>{title} ({len(rows)})</summary><div class='wide'>{head}"
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )


# ---- text ----


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _text(value: Any, limit: int = LONGEST_TEXT) -> str:
    text = str(value)
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text):,} characters)"
    return escape(text.encode(errors="replace").decode())


def _settings(config: Any) -> dict[str, Any]:
    """Return the first MAX_SETTINGS entries of `flat_settings`."""
    return dict(islice(flat_settings(config).items(), MAX_SETTINGS))


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds < 2e11 else "?"


def _duration(seconds: float) -> str:
    rest, parts = round(seconds), []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count:,} {unit}")
    return " ".join(parts[:2]) or "0 s"
