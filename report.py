"""Report: a run folder to one static page, report.html, without any network or script library.

    top       what the run is, pass@1 after each evaluation, where the time went
    curves    one small chart a quantity, drawn as SVG; stages are marked, points carry their values
    traces    whole trajectories of a few steps, coloured by who wrote each token, with the status
              of every call, reward, penalty, and whether resampling kept it

    python report.py runs/toy       writes runs/toy/report.html and prints its path

Reads config.json, metrics.jsonl and traces/*.jsonl and nothing else; works while the run goes on.
Everything that a model wrote is escaped: it is shown, never interpreted.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import suppress
from html import escape
from pathlib import Path

# (title, key of the training rows, key of the evaluation rows, what it means)
CURVES = (
    ("Reward", "reward", "pass@1", "mean over all rollouts of a step; dots: held-out pass@1"),
    ("Errors per call, correct trajectories", "errors_per_call_correct",
     "errors_per_call_correct", "what resampling on correct is for; dots: held-out"),
    ("Errors per call, all", "errors_per_call", "errors_per_call", "dots: held-out"),
    ("Tokens a trajectory", "length", "length", "prompt and tool output included; dots: held-out"),
    ("Turns", "turns", "turns", "assistant turns a trajectory; dots: held-out"),
    ("Entropy", "entropy", None, "nats a sampled token"),
    ("Over the limit", "over_limit", "over_limit", "share cut by the token budget"),
    ("Groups with signal", "signal", None, "share of groups that are neither all right nor wrong"),
    ("Gradient norm", "grad_norm", None, "before clipping"),
    ("Clip share", "clip_share", None, "model tokens whose ratio was clipped"),
    ("Engine gap", "engine_gap", None, "mean |log pi trainer - log pi engine| of sampled tokens"),
    ("Tokens a second", "tokens_per_second", None, "sampled, all engines"),
)  # fmt: skip

COLUMNS = {  # of the table of evaluations: heading -> cell
    "after": "{name}", "pass@1": "{pass@1:.3f} &plusmn; {stderr:.3f}",
    "errors/call": "{errors_per_call:.3f}", "of correct": "{errors_per_call_correct:.3f}",
    "tokens": "{length:.1f}", "turns": "{turns:.2f}", "over limit": "{over_limit:.3f}",
}  # fmt: skip

STYLE = """
:root{--bg:#fbfaf7;--ink:#22252b;--soft:#6d7280;--line:#e3e0d8;--card:#fff;--model:#14532d;
--modelbg:#e4f5e6;--tool:#164e63;--toolbg:#e0f2f7;--prompt:#6b7280;--bad:#b42318;--good:#15803d;
--accent:#b45309;--curve:#2563eb}
@media(prefers-color-scheme:dark){:root{--bg:#15171b;--ink:#e6e6e3;--soft:#9aa0ab;--line:#2c2f36;
--card:#1c1f25;--model:#b7f0c0;--modelbg:#15301d;--tool:#a5e3f3;--toolbg:#10303a;--prompt:#8b919c;
--bad:#f97066;--good:#4ade80;--accent:#f5a524;--curve:#7aa7ff}}*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:28px 20px 60px;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:34px 0 10px}p{margin:4px 0}
.soft{color:var(--soft)}.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0}
.tile,.chart,details{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:10px 16px}.tile b{display:block;font-size:24px;font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(270px,1fr));gap:14px}
.chart{padding:10px 12px}.chart b{font-size:14px}
.chart .soft{font-size:12px;line-height:1.3;min-height:32px}
table{border-collapse:collapse;background:var(--card)}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:10px}
td,th{border:1px solid var(--line);padding:5px 12px;text-align:right;font-size:14px}
td:first-child,th:first-child{text-align:left}
.bar{display:flex;height:20px;border-radius:6px;overflow:hidden;margin:8px 0}
.bar span{display:block}details{margin:6px 0;padding:6px 12px}summary{cursor:pointer}
.tag{border-radius:5px;padding:1px 7px;font-size:12px;margin-right:5px;border:1px solid var(--line)}
.right{color:var(--good)}.wrong{color:var(--bad)}.kept{border-color:var(--accent);color:var(--accent)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.5 ui-monospace,monospace;margin:8px 0}
pre span{border-radius:3px}.model{color:var(--model);background:var(--modelbg)}
.tool{color:var(--tool);background:var(--toolbg)}.prompt,.separator{color:var(--prompt)}
.forced{color:var(--prompt);text-decoration:underline dotted}
"""


def read_rows(path: Path) -> list[dict]:
    """Rows of a JSONL file; a last line that is still being written is left out."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def write_report(run_folder) -> Path:
    """Writes report.html into the run folder and returns its path."""
    run = Path(run_folder)
    if not (run / "config.json").is_file():
        raise FileNotFoundError(f"{run} holds no config.json: it is not a run folder of train.py")
    config = json.loads((run / "config.json").read_text())
    rows = read_rows(run / "metrics.jsonl")
    rl = [r for r in rows if r["phase"] == "rl"]
    evaluations = [r for r in rows if r["phase"] == "evaluation"]
    for row in rl:
        row["signal"] = row["groups_kept"] / max(row["groups"], 1)
    sections = (
        header(run, config, rl, evaluations), evaluation_table(evaluations), seconds_bar(rows),
        curves(rl, evaluations, [r for r in rows if r["phase"] == "sft"]), traces(run),
    )  # fmt: skip
    page = (
        "<!doctype html><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{escape(run.name)}</title><style>{STYLE}</style>" + "\n".join(sections)
    )
    temporary = run / ".report.tmp"
    temporary.write_text(page, encoding="utf-8", errors="replace")
    return temporary.replace(run / "report.html")


# ---- top ----


def header(run: Path, config: dict, rl: list[dict], evaluations: list[dict]) -> str:
    shown = ("preset", "seed", "resample", "rollouts", "group_size", "problems_per_step", "policy")
    what = ", ".join(f"{k} {config[k]}" for k in shown if k in config)
    tiles = []
    if evaluations:
        first, last = evaluations[0]["pass@1"], evaluations[-1]["pass@1"]
        tiles.append((f"{first:.3f} &rarr; {last:.3f}", "held-out pass@1, first and last"))
    if rl:
        a, b = pooled_errors(rl[:10]), pooled_errors(rl[-10:])
        tiles.append((f"{a:.3f} &rarr; {b:.3f}", "errors per call in correct, first and last 10"))
        calls, sampled = sum(r["tool_calls"] for r in rl), sum(r["sampled"] for r in rl)
        tiles.append((f"{sampled:,.0f}", f"rollouts in {len(rl)} steps, {calls:,.0f} tool calls"))
        lost = sum(r["lost_calls"] + r["checks_failed"] + r["wall_cut"] for r in rl)
        tiles.append((f"{lost:,.0f}", "lost calls, failed checks, rollouts cut by the clock"))
    tile = "<div class=tile><b>{}</b><span class=soft>{}</span></div>"
    top = f"<h1>{escape(run.name)}</h1><p class=soft>{escape(what)}</p>"
    return f"{top}<div class=tiles>{''.join(tile.format(*t) for t in tiles)}</div>"


def pooled_errors(rows: list[dict]) -> float:
    """Errors per call in correct trajectories, pooled over the calls of several steps."""
    return sum(r["errors_correct"] for r in rows) / max(1, sum(r["calls_correct"] for r in rows))


def evaluation_table(evaluations: list[dict]) -> str:
    if not evaluations:
        return ""
    row = lambda tag, cells: "<tr>" + "".join(f"<{tag}>{c}</{tag}>" for c in cells) + "</tr>"
    safe = [r | {"name": escape(r["name"])} for r in evaluations]
    table = row("th", COLUMNS)
    table += "".join(row("td", [cell.format_map(r) for cell in COLUMNS.values()]) for r in safe)
    return f"<h2>Held out ({evaluations[-1]['samples']} samples)</h2><table>{table}</table>"


def seconds_bar(rows: list[dict]) -> str:
    """Where the time of the RL steps went, phases that overlap counted once."""
    spent = Counter()
    for row in rows:
        if row["phase"] == "rl":
            spent.update(row["seconds"])
    del spent["tools"], spent["checks"]  # they are inside rollout
    total = spent.pop("step", 0)
    if not total:
        return ""
    spent["other"] = max(0.0, total - sum(spent.values()))
    hues = {name: i * 360 // len(spent) for i, name in enumerate(spent)}
    bars = "".join(
        f"<span style='width:{100 * s / total:.2f}%;background:hsl({hues[n]} 55% 55%)'"
        f" title='{escape(n)} {s:.0f} s'></span>"
        for n, s in spent.items()
    )
    legend = ", ".join(
        f"<span style='color:hsl({hues[n]} 55% 50%)'>&#9632;</span> {escape(n)} {s:.0f} s"
        for n, s in spent.most_common()
    )
    return f"<h2>Time of RL steps, {total:.0f} s</h2><div class=bar>{bars}</div><p>{legend}</p>"


# ---- curves ----


def curves(rl: list[dict], evaluations: list[dict], sft: list[dict]) -> str:
    charts = []
    if sft:
        points = [(r["step"], r["loss"]) for r in sft]
        charts.append(chart("SFT loss", "nats a model token, by SFT step", points, [], []))
    borders = [b["step"] for a, b in zip(rl, rl[1:]) if a["stage"] != b["stage"]]
    for title, key, evaluation_key, note in CURVES:
        line = [(r["step"], r[key]) for r in rl if key in r]
        dots = [(r["step"], r[evaluation_key]) for r in evaluations if evaluation_key in r]
        if line or dots:
            charts.append(chart(title, note, line, dots, borders))
    if not charts:
        return "<p>No steps yet.</p>"
    title = "<h2>Curves, by step (dashed: a new stage)</h2>"
    return f"{title}<div class=charts>{''.join(charts)}</div>"


def chart(title: str, note: str, line: list, dots: list, borders: list) -> str:
    """An SVG of 300 x 140 with a labelled range on both axes."""
    width, height, left, top, bottom = 300, 140, 46, 8, 16
    xs, ys = zip(*(line + dots))
    x0, x1, y0, y1 = min(xs), max(xs), min(0.0, *ys), max(ys)
    x1, y1 = max(x1, x0 + 1), y1 if y1 > y0 else y0 + 1
    px = lambda x: left + (x - x0) / (x1 - x0) * (width - left - 8)
    py = lambda y: height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom)
    short = lambda y: f"{y:,.0f}" if abs(y) >= 100 else f"{y:.3g}"  # 1,690 and 0.0685 and 1e-07
    parts = [
        f"<line x1={left} x2={width} y1={py(y):.1f} y2={py(y):.1f} stroke='var(--line)'/>"
        f"<text x={left - 4} y={py(y) + 3:.1f} text-anchor=end>{short(y)}</text>"
        for y in (y0, (y0 + y1) / 2, y1)
    ]
    parts += [
        f"<line x1={px(x):.1f} x2={px(x):.1f} y1={top} y2={height - bottom}"
        " stroke='var(--soft)' stroke-dasharray='3 3'/>"
        for x in borders
    ]
    path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line)
    parts.append(f"<polyline points='{path}' fill=none stroke='var(--curve)' stroke-width=1.6 />")
    for points, radius, colour in ((line, 1.4, "--curve"), (dots, 3.4, "--accent")):
        parts += [
            f"<circle cx={px(x):.1f} cy={py(y):.1f} r={radius} fill='var({colour})'>"
            f"<title>step {x}: {y:.4g}</title></circle>"
            for x, y in points
        ]
    parts.append(f"<text x={left} y={height - 3}>{x0}</text>")
    parts.append(f"<text x={width} y={height - 3} text-anchor=end>{x1}</text>")
    svg = f"<svg viewBox='0 0 {width} {height}'>{''.join(parts)}</svg>"
    return f"<div class=chart><b>{title}</b><div class=soft>{note}</div>{svg}</div>"


# ---- traces ----


def traces(run: Path, most_files: int = 6) -> str:
    """The first, the last and some steps between, whole groups; then the last evaluation."""
    steps = sorted((run / "traces").glob("step_*.jsonl"))
    if len(steps) > most_files:
        picked = {round(i * (len(steps) - 1) / (most_files - 1)) for i in range(most_files)}
        steps = [steps[i] for i in sorted(picked)]
    files = steps + sorted((run / "traces").glob("evaluation_*.jsonl"))[-1:]
    if not files:
        return ""
    legend = (
        "<p>Who wrote it: <span class=prompt>prompt and separators</span>, "
        "<span class=forced>forced prefix</span>, <span class=model>the model (has loss)</span>, "
        "<span class=tool>tool output</span>. <span class='tag kept'>kept</span> by resampling."
        " Click one to open.</p>"
    )
    parts = [f"<h2>Trajectories</h2>{legend}"]
    for file in files:
        parts.append(f"<h3>{escape(file.stem.replace('_', ' '))}</h3>")
        is_step, seen = file.stem.startswith("step"), None
        for i, row in enumerate(read_rows(file)):
            if (p := row["problem"])["id"] != seen:
                seen = p["id"]
                parts.append(f"<p><b>{escape(p['question'])}</b> ({escape(p['answer'])})</p>")
            parts.append(trajectory(row, show_kept=is_step, opened=i == 0))
    return "\n".join(parts)


def trajectory(row: dict, show_kept: bool, opened: bool) -> str:
    tag = lambda kind, text: f"<span class='tag {kind}'>{text}</span>"
    verdict = tag("right", "right") if row["reward"] > 0.5 else tag("wrong", "wrong")
    calls = "".join(
        tag("right" if c["status"] in ("ok", "empty") else "wrong",
            f"call: {escape(c['status'])}, {c['seconds']:.2f} s")
        for c in row["tool_calls"]
    )  # fmt: skip
    kept = tag("kept", "kept") if show_kept and row["kept"] else ""
    penalty = f"<span class=soft>penalty {row['penalty']:.2f}</span>" if show_kept else ""
    head = (
        f"#{row['rollout']} {verdict}{kept}{calls}{penalty} <span class=soft>"
        f"{len(row['token_ids'])} tokens, {row['num_turns']} turns, {escape(row['stop_reason'])},"
        f" answer {escape(str(row['answer']))}</span>"
    )
    spans = "".join(
        f"<span class={kind}>{escape(text)}</span>"
        for (_, _, kind), text in zip(row["segments"], row["texts"])
    )
    return f"<details{' open' * opened}><summary>{head}</summary><pre>{spans}</pre></details>"


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python report.py RUN_FOLDER")
    try:
        print(write_report(sys.argv[1]))
    except (OSError, ValueError) as e:
        sys.exit(f"report.py: {e}")


if __name__ == "__main__":
    main()
