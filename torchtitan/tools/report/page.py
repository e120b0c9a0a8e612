"""Make the HTML page about a run.

Everything that comes from the run's folder is text to the page: it is escaped in HTML, stands in a
JSON block that is not a script, and reaches the document as text nodes. The page's policy allows
the one script and the one style that are hashed here, and no connection.
"""

import base64
import hashlib
import json
import math
import time
from bisect import bisect_left
from collections.abc import Iterable
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from torchtitan.tools.report.read import Curve, Run, number, spread, thin_out

POINTS_PER_CURVE = 2_000
POINTS_PER_PAGE = 50_000  # 24 bytes each
MAX_CURVES = 60
MAX_EVENTS = 500
MAX_SETTINGS = 500
LONGEST_TEXT = 800  # characters of a message or sample
SECONDS_OF_SILENCE = 600  # after which a run without an end is taken for dead

# title, {metric: label}; the names are those of torchtitan.components.metrics and torchtitan.rl.
PANELS: list[tuple[str, dict[str, str]]] = [
    (
        "Loss",
        {
            "loss_metrics/global_avg_loss": "training",
            "validation_metrics/loss": "validation",
            "loss_metrics/global_max_loss": "highest rank",
            "loss": "training",
        },
    ),
    (
        "Reward",
        {
            "rl/reward": "training",
            "eval/greedy_reward": "held out, greedy",
            "eval/sampled_reward": "held out, sampled",
        },
    ),
    (
        "Exact answers",
        {
            "rl/exact": "training",
            "eval/greedy_exact": "held out, greedy",
            "eval/sampled_exact": "held out, sampled",
        },
    ),
    ("Staleness, weight updates", {"rl/lag": "oldest episode"}),
    ("Gradient norm", {"grad_norm": ""}),
    ("Learning rate", {"lr": ""}),
    ("Tokens per second and device", {"throughput(tps)": ""}),
    ("MFU, %", {"mfu(%)": ""}),
    (
        "Seconds per step",
        {
            "time_metrics/end_to_end(s)": "whole step",
            "time/step(s)": "whole step",
            "time/generate(s)": "generation",
            "time/train(s)": "training",
            "time/update_generator(s)": "weights to the generator",
        },
    ),
    (
        "Memory, GiB",
        {"memory/max_active(GiB)": "active", "memory/max_reserved(GiB)": "reserved"},
    ),
    ("Tokens per completion", {"rl/completion_tokens": ""}),
    ("Entropy of the policy", {"loss/entropy": ""}),
]


def page_of(run: Run, now: float | None = None) -> str:
    """The whole page. now: Unix seconds, at which a run that has not ended is judged."""
    now = time.time() if now is None else now
    events = _events(run)
    data = _data(run, events)
    folder = Path(__file__).parent
    script = (folder / "page.js").read_text(encoding="utf-8")
    style = (folder / "page.css").read_text(encoding="utf-8")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    starts = [event for event in events if event["kind"] == "start"]
    config = _settings(starts[-1].get("config")) if starts else {}
    title = starts[-1]["message"] if starts else ""
    title = title if title not in ("", "default job") else run.folder.resolve().name
    blocks = [
        _header(title, run, events, data, config, now),
        _charts(run, data),
        _event_table(events, data["t0"]),
        _sample_table(run.samples),
        _config_tables(starts, config),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>",
            f"<style>{style}</style>",
            "<main>",
            *filter(None, blocks),
            "</main>",
            f'<script type="application/json" id="data">{_json(data)}</script>',
            f"<script>{script}</script>",
            "</html>\n",
        ]
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _text(value: Any, limit: int = LONGEST_TEXT) -> str:
    text = str(value)
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text):,} characters)"
    return escape(text.encode(errors="replace").decode())


def _json(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


# ---- data of the charts ----


def _data(run: Run, events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the script draws; times are seconds after `t0`."""
    curves = _chosen(run)
    all_times = [event["wall_time"] for event in events]
    for curve in run.curves.values():
        all_times += [curve.times[0], curve.times[-1]]
    t0 = min(all_times, default=0.0)
    digits = 3 if max(all_times, default=0.0) - t0 < 3600 else 1
    redone_from = _redone_from(run.first_steps())
    limit = min(POINTS_PER_CURVE, POINTS_PER_PAGE // max(1, len(curves)))
    panels: dict[str, dict[str, Any]] = {}
    for title, label, metric in curves:
        panel = panels.setdefault(title, {"title": title, "curves": []})
        panel["curves"].append(
            {
                "label": label[:100],
                "metric": metric[:100],
                **_points(run.curves[metric], redone_from, limit, t0, digits),
            }
        )
    known = {title for title, _ in PANELS}
    return {
        "t0": t0,
        "panels": [{**panel, "more": title not in known} for title, panel in panels.items()],
        "events": [
            {
                "kind": event["kind"][:40],
                "group": _group(event["kind"]),
                "x": event["place"],
                "t": round(event["wall_time"] - t0, digits),
                "seconds": _rounded(number(event.get("seconds")) or 0.0) or 0.0,
                "text": event["message"][:200],
            }
            for event in events
        ],
        "redone": _redone_stretches(run, redone_from, t0, digits),
    }


def _chosen(run: Run) -> list[tuple[str, str, str]]:
    """(panel, label, metric) of what is drawn: the known ones first, then each its own panel."""
    chosen = [
        (title, label, metric)
        for title, metrics in PANELS
        for metric, label in metrics.items()
        if metric in run.curves
    ]
    drawn = {metric for _, _, metric in chosen}
    # On one rank, the highest loss of all ranks is the loss.
    mean, highest = (f"loss_metrics/global_{kind}_loss" for kind in ("avg", "max"))
    if highest in drawn and mean in drawn and _equal(run.curves[mean], run.curves[highest]):
        chosen = [entry for entry in chosen if entry[2] != highest]
    chosen += [(metric[:100], "", metric) for metric in run.curves if metric not in drawn]
    return chosen[:MAX_CURVES]


def _equal(one: Curve, other: Curve) -> bool:
    return one.values == other.values


def _redone_from(first_steps: dict[int, int]) -> dict[int, float]:
    """start -> the step from which on later starts did its work again."""
    redone, lowest = {}, math.inf
    for start in sorted(first_steps, reverse=True):
        redone[start] = lowest
        lowest = min(lowest, first_steps[start])
    return redone


def _points(
    curve: Curve, redone_from: dict[int, float], limit: int, t0: float, digits: int
) -> dict[str, Any]:
    """Columns of the points that count, and of those that were done again later."""
    kept, redone = [], []
    for i, (start, step) in enumerate(zip(curve.starts, curve.steps, strict=True)):
        (kept if step < redone_from[start] else redone).append(i)

    def columns(indices: list[int], limit: int) -> dict[str, list[Any]]:
        indices = [indices[i] for i in thin_out((curve.values[i] for i in indices), limit)]
        return {
            "start": [curve.starts[i] for i in indices],
            "x": [curve.steps[i] for i in indices],
            "t": [round(curve.times[i] - t0, digits) for i in indices],
            "y": [_rounded(curve.values[i]) for i in indices],
        }

    num_redone = min(len(redone), limit // 4)
    return {"kept": columns(kept, limit - num_redone), "redone": columns(redone, num_redone)}


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _redone_stretches(
    run: Run, redone_from: dict[int, float], t0: float, digits: int
) -> list[dict[str, float]]:
    """Stretches of steps, and of time, whose work was lost."""
    if len(redone_from) < 2:
        return []
    stretches: dict[int, list[tuple[int, float]]] = {}
    for curve in run.curves.values():
        for start, step, seconds in zip(curve.starts, curve.steps, curve.times, strict=True):
            if step >= redone_from[start]:
                low, high = stretches.get(start, [(step, seconds), (step, seconds)])
                stretches[start] = [min(low, (step, seconds)), max(high, (step, seconds))]
    return [
        {
            "x0": low[0],
            "x1": high[0],
            "t0": round(low[1] - t0, digits),
            "t1": round(high[1] - t0, digits),
        }
        for low, high in spread(list(stretches.values()), 100)
    ]


# ---- events ----


def _group(kind: str) -> str:
    if kind in ("start", "training", "end", "stop"):
        return "run"
    if kind in ("fault", "lost"):
        return "fault"
    if kind in ("save", "background save"):
        return "save"
    return "validation" if kind == "validation" else "warning"


def _events(run: Run) -> list[dict[str, Any]]:
    """The events in the order of time, each with its `place` on the axis of steps; a start that
    ended without a word is one, too, and the same event of several ranks is one with a `count`."""
    events = _told_once(_with_lost_starts(run))
    longest = run.longest_curve()
    trail = sorted(zip(longest.times, longest.steps, strict=True))
    logged, i, place = [], 0, 0
    for event in events:
        while i < len(trail) and trail[i][0] <= event["wall_time"]:
            place = trail[i][1]
            i += 1
        if event["step"] is not None:
            place = event["step"]
        logged.append({**event, "place": place})
    if len(logged) > MAX_EVENTS:
        important = [e for e in logged if _group(e["kind"]) in ("run", "fault")]
        others = [e for e in logged if _group(e["kind"]) not in ("run", "fault")]
        important = spread(important, MAX_EVENTS // 2)
        logged = important + spread(others, MAX_EVENTS - len(important))
        logged.sort(key=lambda event: event["wall_time"])
    return logged


def _with_lost_starts(run: Run) -> list[dict[str, Any]]:
    events = sorted(run.events, key=lambda event: event["wall_time"])
    times = sorted(run.longest_curve().times)
    result: list[dict[str, Any]] = []
    is_running, last_sign = False, 0.0
    for event in events:
        if event["kind"] == "start" and is_running:
            num_before = bisect_left(times, event["wall_time"])
            result.append(
                {
                    "kind": "lost",
                    "wall_time": max([last_sign, *times[max(0, num_before - 1) : num_before]]),
                    "step": None,
                    "message": "ended without a word: killed, or the machine went away",
                }
            )
        is_running = event["kind"] not in ("end", "fault") and (
            is_running or event["kind"] == "start"
        )
        last_sign = event["wall_time"]
        result.append(event)
    return result


def _told_once(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for event in events:
        event = {**event, "count": 1}
        same = [e for e in result[-3:] if _identity(e) == _identity(event)]
        if same:
            same[0]["count"] += 1
        else:
            result.append(event)
    return result


def _identity(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["kind"], event["message"], event["step"]


# ---- blocks of HTML ----


def _header(
    title: str,
    run: Run,
    events: list[dict[str, Any]],
    data: dict[str, Any],
    config: dict[str, Any],
    now: float,
) -> str:
    state, word = _state(run, events, now)
    num_starts = sum(event["kind"] == "start" for event in events)
    last_step = max((curve.steps[-1] for curve in run.curves.values()), default=None)
    facts = {}
    if last_step is not None:
        steps = config.get("training.steps")
        facts["Step"] = f"{last_step:,}" + (f" of {steps:,}" if isinstance(steps, int) else "")
    for metric, name in [
        ("loss_metrics/global_avg_loss", "Loss"),
        ("loss", "Loss"),
        ("validation_metrics/loss", "Validation loss"),
        ("rl/reward", "Reward"),
        ("throughput(tps)", "Tokens/s and device"),
        ("mfu(%)", "MFU, %"),
        ("n_tokens_seen", "Tokens seen"),
    ]:
        if metric in run.curves:
            facts[name] = _brief(run.curves[metric].values[-1])
    facts["Starts"] = str(num_starts or len(run.first_steps()))
    faults = sum(event["kind"] in ("fault", "lost") for event in events)
    if faults:
        facts["Faults"] = str(faults)
    facts["Began"] = _clock(data["t0"])
    facts["Lasted"] = _duration(_last_sign(run, events) - data["t0"])
    cells = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items()
    )
    return (
        f'<header><h1>{_text(title, 120)} <span class="state {state}">{_text(word)}</span></h1>'
        f'<p class="quiet">{_text(run.folder)}, as of {_clock(now)}</p>'
        f'<dl class="facts">{cells}</dl></header>'
    )


def _state(run: Run, events: list[dict[str, Any]], now: float) -> tuple[str, str]:
    """(class, words) of how the run stands."""
    kinds = [e["kind"] for e in events if e["kind"] in ("start", "stop", "end", "fault")]
    silence = now - _last_sign(run, events)
    if kinds and kinds[-1] == "fault":
        return "bad", "ended with a fault"
    if kinds and kinds[-1] == "end":
        return ("quiet", "stopped") if kinds[-2:-1] == ["stop"] else ("good", "ended")
    if silence < SECONDS_OF_SILENCE:
        return "good", "running"
    return "bad" if kinds else "quiet", f"no sign of life for {_duration(silence)}"


def _last_sign(run: Run, events: list[dict[str, Any]]) -> float:
    times = [event["wall_time"] for event in events]
    return max(times + [curve.times[-1] for curve in run.curves.values()], default=0.0)


def _charts(run: Run, data: dict[str, Any]) -> str:
    if not run.curves:
        return (
            '<p class="notice">No curves: this run wrote no metrics. '
            "Set metrics.enable_jsonl or metrics.enable_tensorboard.</p>"
        )
    drawn = sum(len(panel["curves"]) for panel in data["panels"])
    note = f"Curves from {run.source}."
    if len(run.curves) - drawn > 1:
        note += f" {len(run.curves) - drawn} of {len(run.curves)} metrics are not drawn."
    return (
        '<div id="charts"></div>'
        "<noscript><p>The curves are drawn by a script in this page, which is turned off.</p>"
        f'</noscript><p class="quiet">{_text(note)} A dashed line is work that was done again after '
        "a restart; × is a value that is not finite. Drag to zoom, double-click for all; the arrow "
        "keys move the cursor.</p>"
    )


def _event_table(events: list[dict[str, Any]], t0: float) -> str:
    rows = []
    for event in events:
        times = f" (×{event['count']})" if event["count"] > 1 else ""
        rank = number(event.get("rank"))
        who = f"rank {int(rank)}: " if rank and math.isfinite(rank) else ""
        code = number(event.get("exit_code"))
        code = f" (exit code {int(code)})" if code is not None and math.isfinite(code) else ""
        step = "" if event["step"] is None else f"{event['step']:,}"
        rows.append(
            f'<tr class="{_group(event["kind"])}"><td>{_clock(event["wall_time"])}</td>'
            f'<td class="number">{step}</td><td><i></i>{_text(event["kind"], 40)}</td>'
            f"<td>{_text(who + event['message'] + code)}{times}</td></tr>"
        )
    if not rows:
        return ""
    return (
        f"<details open><summary>Events ({len(rows)})</summary><div class='wide'><table>"
        "<thead><tr><th>time</th><th class='number'>step</th><th>event</th><th>what was said</th>"
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _sample_table(samples: list[dict[str, Any]]) -> str:
    if not samples:
        return ""
    columns = {
        "step": "step",
        "prompt": "prompt",
        "text": "completion",
        "expected_answer": "expected",
        "reward": "reward",
        "advantage": "advantage",
        "policy_version": "policy version",
        "finish_reason": "ended by",
    }
    numbers = ("step", "reward", "advantage", "policy_version")
    rows = []
    for sample in samples:
        cells = []
        for key in columns:
            value = sample.get(key)
            if isinstance(value, float):
                value = f"{value:.3g}"
            kind = "number" if key in numbers else "sample" if key in ("prompt", "text") else ""
            cells.append(f'<td class="{kind}">{_text("" if value is None else value)}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = "".join(
        f'<th class="{"number" if key in numbers else ""}">{name}</th>'
        for key, name in columns.items()
    )
    return (
        f"<details open><summary>Samples ({len(rows)})</summary><div class='wide'><table>"
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _config_tables(starts: list[dict[str, Any]], config: dict[str, Any]) -> str:
    if not starts:
        return ""
    latest = starts[-1]
    facts = dict(_settings(latest.get("versions")))
    for key in ("host", "world_size", "program", "config_digest"):
        if key in latest:
            facts[key.replace("_", " ")] = latest[key]
    defaults = _default_settings()
    chosen = {k: v for k, v in config.items() if k not in defaults or defaults[k] != v}
    others = {k: v for k, v in config.items() if k not in chosen}
    tables = [("Versions and place of the last start", facts)]
    if len(starts) > 1:
        before = _settings(starts[-2].get("config"))
        changed = {
            key: f"{_value(before.get(key))} → {_value(config.get(key))}"
            for key in sorted(before.keys() | config.keys())
            if before.get(key) != config.get(key)
        }
        tables.append(("Changed at the last start", changed))
    tables += [("Config, where it differs from the defaults", chosen), ("Defaults", others)]
    return "".join(_key_table(title, rows) for title, rows in tables if rows)


def _key_table(title: str, values: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{_text(key, 100)}</code></td><td><code>{_text(_value(value), 300)}</code></td></tr>"
        for key, value in values.items()
    )
    state = "" if title == "Defaults" else " open"
    return (
        f"<details{state}><summary>{title} ({len(values)})</summary>"
        f"<div class='wide'><table class='keys'>{rows}</table></div></details>"
    )


def _settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables -> {"section.key": value}; at most MAX_SETTINGS."""
    settings: dict[str, Any] = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and len(name) < 200:
            settings |= _settings(value, f"{name}.")
        else:
            settings[name] = value
    return dict(list(settings.items())[:MAX_SETTINGS])


def _default_settings() -> dict[str, Any]:
    from torchtitan.config import JobConfig

    return _settings(json.loads(json.dumps(JobConfig().to_dict(), default=str)))


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _brief(value: float) -> str:
    if math.isfinite(value) and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds < 2e11 else "?"


def _duration(seconds: float) -> str:
    rest, parts = round(seconds), []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count:,} {unit}")
    return " ".join(parts[:2]) or "0 s"
