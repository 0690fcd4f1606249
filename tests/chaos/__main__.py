"""Run the fault matrix on loopback. The commands cancels, soak and figures have their own --help.

Each row starts its own cluster: a router, two prefill and two decode nodes with the hash model, and 8 clients. The
command prints the table and writes benchmarks/results/chaos.json, from which `python -m benchmarks document` generates
the tables in docs/. The exit status is 1 if a request was lost, a token was wrong or a block was not returned.
"""

import argparse
import signal
import sys
from dataclasses import replace

from benchmarks.result import Cell, Result, Table
from tests.chaos import cancels, features, figures, other_clusters, soak
from tests.chaos.drive import Report, drive
from tests.chaos.matrix import ROWS, P
from tests.cluster.kinds import KINDS

COLUMNS = ["fault", "requests", "lost", "unequal", "moved", "faults", "restarts", "detected ms",
           "longest gap ms", "less detection and prefill", "composition (ms)", "blocks returned"]  # fmt: skip
COMMANDS = {"cancels": cancels.main, "soak": soak.main, "figures": figures.main}


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]](arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rows", default="", help="comma-separated names of rows; default: all")
    parser.add_argument("--requests", type=int, default=800, help="minimum requests per row")
    parser.add_argument("--channel", default="", help="KV channel of all rows; default: the channel of each row")
    parser.add_argument(
        "--kind", choices=[*KINDS, features.KIND], default="", help="kind of the model; default: each row has its own"
    )
    parser.add_argument(
        "--colocated", action="store_true", help="run no prefill nodes, and omit the rows with a fault in one"
    )
    parser.add_argument("--no-write", action="store_true", help="do not write the results file")
    chosen = parser.parse_args(arguments)
    known = [*(row.name for row in ROWS), *other_clusters.NAMES]
    names = [name.strip() for name in chosen.rows.split(",") if name.strip()] or known
    if unknown := set(names) - set(known):
        parser.error(f"unknown row {', '.join(sorted(unknown))}; choose from: {', '.join(known)}")
    reports: list[Report] = []
    broken: list[str] = []
    rows = [row for row in ROWS if row.name in names]
    if chosen.colocated:
        rows = [
            replace(row, prefill=0)
            for row in rows
            if not {P, "prefill-1"} & {*row.lives, *(act.name for act in row.script)}
        ]
    for row in rows:
        print(f"{row.name}: {row.what}", flush=True)
        try:
            report = drive(row, chosen.requests, chosen.channel, chosen.kind)
        except AssertionError as error:
            broken.append(f"{row.name}: {error}")
            print(f"  NOT COMPLETED: {error}", flush=True)
            continue
        reports.append(report)
        cells_shown = " | ".join(map(str, cells(report)[1:]))
        print(f"  {cells_shown}", *report.restarts, *report.complaints()[:20], sep="\n  ", flush=True)
    bad = [report.row.name for report in reports if not report.is_good]
    apart: list[list[Cell]] = []
    for name in (name for name in other_clusters.NAMES if name in names):
        try:
            apart += filter(None, [other_clusters.row(name, chosen.requests // 4)])
        except AssertionError as error:
            broken.append(f"{name}: {error}")
            print(f"  NOT COMPLETED: {error}", flush=True)
    bad += [str(row[0]) for row in apart if row[2] or row[4] != "yes"]
    result = document(reports, apart, chosen.requests)
    if chosen.rows or chosen.kind or chosen.colocated or chosen.no_write or broken:
        print(*(table.markdown() for table in result.tables), sep="\n")
    else:
        result.finish()
    print(f"{len(reports)} rows; failed: {', '.join(bad) or 'none'}; not completed: {'; '.join(broken) or 'none'}")
    return 1 if bad or broken else 0


def cells(report: Report) -> list[Cell]:
    row, gap, detected_s = report.row, report.gap, report.detected_s
    own_s = None if gap is None or detected_s is None else gap.whole_s - detected_s - gap.parts_s.get("prefill", 0.0)
    harms = ", ".join(f"{count} {what}" for what, count in report.harms.items() if count)
    return [
        row.what + (f" ({harms})" if harms else ""),
        len(report.outcomes),
        report.num_lost,
        report.num_unequal,
        report.status["requests"]["moved"],
        len(report.faults),
        len(report.restarts),
        None if detected_s is None else round(detected_s * 1000),
        None if gap is None else round(gap.whole_s * 1000),
        None if own_s is None else max(0, round(own_s * 1000)),
        None if gap is None else gap.shown(),
        "; ".join(report.unbalanced) or "yes",
    ]


def document(reports: list[Report], apart: list[list[Cell]], requests: int) -> Result:
    tables = [Table("Faults, one kind at a time", COLUMNS, [cells(report) for report in reports])]
    if apart:
        tables.append(Table("Routers and networks", other_clusters.COLUMNS, apart))
    return Result(
        "chaos",
        "Two prefill nodes, two decode nodes and one router run as processes on one host. 8 clients stream prompts of 20 "
        f"to 6,000 tokens, at least {requests} requests per row. The tokens of the hash model prove that the right KV "
        "arrived. Nodes that exit are restarted.",
        tables,
        [dict(zip(COLUMNS, cells(report), strict=True)) | {"name": report.row.name, "restarted": report.restarts}
         for report in reports],
        command="make chaos",
    )  # fmt: skip


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also stop the cluster's processes
    sys.exit(main(sys.argv[1:]))
