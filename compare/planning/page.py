"""Writes plan.html, a page without scripts that shows a plan."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from compare.planning.report import HEADINGS, Document, cells_of

STYLE = """
main { max-width: 72rem; margin: 0 auto; padding: 1rem; } .wide { overflow-x: auto; }
table { border-collapse: collapse; } th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
td { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td:first-child, th { text-align: left; white-space: nowrap; } td.text { text-align: left; }
.bar { display: inline-block; height: .7em; background: var(--decode); } .split .bar { background: var(--prefill); }
td.split { background: var(--prefill); color: var(--on-prefill); }
td.one { background: var(--decode); color: var(--on-decode); }
@media (max-width: 40rem) { td:first-child { min-width: 8rem; white-space: normal; overflow-wrap: anywhere; } }
"""
SCROLLABLE = '<div class="wide" tabindex="0" role="region" aria-label="table">'  # arrow keys scroll it
THEMES = "@media (prefers-color-scheme: dark) { :root { %s } }"


def page_of(plan: Document) -> str:
    css = files("compare.report").joinpath("report.css").read_text("utf-8")
    dark = css.split('[data-theme="dark"] {', 1)[1].split("}", 1)[0]
    slo, traffic = plan["slo"], plan["traffic"]
    lengths = ", ".join(
        f"{name} of {traffic[key]['p50']:.0f} tokens (median; mean {traffic[key]['mean']:.0f})"
        for name, key in (("prompts", "prompt_tokens"), ("answers", "output_tokens"))
    )
    goal = f"TTFT {slo['ttft_ms']:g} ms and TBT p99 {slo['tbt_ms']:g} ms for {slo['attainment']:.0%} of the requests"
    same = "If a limit or length is halved or doubled, the same mode is better, or neither is clearly better."
    flips = plan["flips"] or [same]
    parts = [
        f"<h1>Plan for {plan['gpus']} GPUs</h1>",
        f"<p>{escape(plan['device'])}; {escape(traffic['name'])}: {lengths}; {goal}.</p>",
        f"<p><strong>{escape(plan['recommendation'])}</strong></p>",
        f"<p>Start the first finalist with <code>{escape(plan['finalists'][0]['command'])}</code>, with "
        "compose.override.yml, or with the component in kubernetes/.</p>",
        "<h2>Finalists</h2>",
        _table(HEADINGS, [list(map(escape, cells_of(one))) for one in plan["finalists"]]),
        "<h2>Why requests miss the SLO</h2><p>At the capacity of the best candidate, by main cause:</p>",
        _table(["finalist", "misses"], [[escape(one["arm"]), _causes(one)] for one in plan["finalists"]]),
        "<h2>Where the answer flips</h2>",
        *(f"<p>{escape(text)}</p>" for text in flips),
        "<p>The map compares the best arms of both modes. For each pair of limits, it shows the arm that carries at "
        "least 3 % more requests/s in each of a few coarse runs, and its rate. Orange: disaggregated, with the split; "
        "blue: co-located; plain: neither.</p>",
        _map(plan["winners"], ("ttft_ms", "TTFT {:.4g} ms"), ("tbt_ms", "TBT {:.3g} ms")),
        *_lengths(plan["lengths"]),
        "<h2>Capacity by the number of prefill nodes</h2><p>The best candidate of each split. The capacities of "
        "finalists are measured. The others are rough estimates or bounds, because their search ended early.</p>",
        _splits(plan["splits"]),
        *_validation(plan),
        "<h2>All candidates</h2><p>Each candidate was tried at rising rates until others did better. The table "
        "shows its last rate, and the share of its requests within the SLO at that rate.</p>",
        _table(["candidate", "req/s", "within the SLO", ""], map(_scored, plan["candidates"])),
    ]
    head = f"<title>Baton plan: {escape(traffic['name'])}</title><style>{css}{THEMES % dark}{STYLE}</style>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{head}</head>\n<body><main>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{text}</th>' for text in headings)
    body = ""
    for *cells, last in rows:  # the last column contains text or bars, not numbers
        body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + f'<td class="text">{last}</td></tr>'
    return f"{SCROLLABLE}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _causes(one: Document) -> str:
    total = sum(one["miss_causes"].values())
    return ", ".join(f"{escape(cause)} {count / total:.0%}" for cause, count in one["miss_causes"].items()) or "none"


def _scored(one: Document) -> list[str]:
    kind = "split" if one["arm"].startswith("disaggregated") else "one"
    bar = f'<span class="{kind}"><span class="bar" style="width: {8 * one["attainment"]:.1f}rem"></span></span>'
    return [escape(one["arm"]), f"{one['rate']:.1f}", f"{one['attainment']:.0%}", bar]


def _splits(rows: Sequence[Document]) -> str:
    most = max(row["capacity_rps"] for row in rows)
    shown = []
    for row in rows:
        kind = "split" if row["prefill"] else "one"
        width = 12 * row["capacity_rps"] / most if row["bounded"] != "below" else 0
        bar = f'<span class="{kind}"><span class="bar" style="width: {width:.1f}rem"></span></span>'
        bound = {"above": "≥ ", "below": "< "}.get(row["bounded"], "" if row["is_measured"] else "about ")
        shown.append([escape(row["arm"]), f"{bound}{row['capacity_rps']:.3g}", bar])
    return _table(["candidate", "req/s", ""], shown)


def _lengths(cells: Sequence[Document]) -> list[str]:
    if not cells:
        return []
    about = (
        "The same map for half and twice the lengths of prompts and answers. The ratio of prefill to decode nodes is "
        "adapted to the lengths. A lead under 10 % is not shown, because each rate was simulated only once."
    )
    rows, columns = ("prompt_tokens", "prompts of {:.0f} tokens"), ("answer_tokens", "answers of {:.0f}")
    return [f"<p>{about}</p>", _map(cells, rows, columns)]


def _map(cells: Sequence[Document], row: tuple[str, str], column: tuple[str, str]) -> str:
    """Return a table of the cells. `row` and `column` are each a pair: a key of the cells, and a format of headings."""
    (key, text), (across, heading) = row, column
    columns = sorted({cell[across] for cell in cells})
    head = "".join(f'<th scope="col">{heading.format(at)}</th>' for at in columns)
    rows = ""
    for value in sorted({cell[key] for cell in cells}):
        own = {cell[across]: cell for cell in cells if cell[key] == value}
        filled = (_cell(own[at]) if at in own else "<td></td>" for at in columns)
        rows += f'<tr><th scope="row">{text.format(value)}</th>' + "".join(filled) + "</tr>"
    return f"{SCROLLABLE}<table><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _cell(cell: Document) -> str:
    best = max(cell["capacity_rps"].values())
    if not cell["winner"]:
        return f"<td>{best:.3g}</td>"
    mode, _, nodes = cell["winner"].partition("@")[0].partition(":")
    kind, label = ("split", nodes) if mode == "disaggregated" else ("one", "co-located")
    return f'<td class="{kind}" title="{escape(cell["winner"])}">{best:.3g} {label}</td>'


def _validation(plan: Document) -> list[str]:
    if not (rows := plan.get("validation")):
        return []
    cells = [
        [
            escape(row["arm"]),
            f"{row['predicted_rps']:.2f}",
            f"{row['measured_rps']['mean']:.2f}",
            f"{row['error_percent']:+.1f} %",
            f"{row['simulated_rps']:.2f}",
            f"{row['simulated_error_percent']:+.1f} %",
        ]
        for row in rows
    ]
    headings = ["finalist", "predicted req/s", "measured", "error", "simulated with the measured requests", "error"]
    return ["<h2>Prediction and measurement</h2>", _table(headings, cells)]
