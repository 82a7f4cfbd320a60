"""Draws the pictures of `benches/report`: pictures.py DATA.json FOLDER.

One SVG for both themes: it is drawn in the light one, and a style sheet maps each colour to that of the dark
one where the reader prefers it.
"""

import json
import pathlib
import re
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

# Light, dark.
COLOURS = {
    "card": ("#fefefe", "#12171f"),
    "ink": ("#1b2430", "#e8edf3"),
    "soft": ("#5c6877", "#98a5b5"),
    "grid": ("#e2e7ee", "#2a333f"),
    "other": ("#9aa8ba", "#6b7a8e"),
    "ours": ("#c2410c", "#fb923c"),
    "memory": ("#7c8797", "#8d9aab"),
    "redis": ("#c0392b", "#f0776b"),
    "mysql": ("#1f6fb2", "#6cb2ee"),
    "zk": ("#2e8540", "#6ccb7f"),
}
LIGHT = {name: pair[0] for name, pair in COLOURS.items()}

plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "contend",
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": LIGHT["grid"],
        "axes.labelcolor": LIGHT["soft"],
        "axes.titlecolor": LIGHT["ink"],
        "text.color": LIGHT["ink"],
        "xtick.color": LIGHT["soft"],
        "ytick.color": LIGHT["soft"],
        "axes.facecolor": LIGHT["card"],
        "figure.facecolor": LIGHT["card"],
        "grid.color": LIGHT["grid"],
        "axes.grid": True,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
    }
)


def main():
    data = json.loads(pathlib.Path(sys.argv[1]).read_text())
    folder = pathlib.Path(sys.argv[2])
    for name, draw in {"rivals": rivals, "handoff": hand_off, "growth": growth}.items():
        figure = draw(data)
        if figure:
            file = folder / f"{name}.svg"
            figure.savefig(file, metadata={"Date": None, "Creator": None})
            file.write_text(both_themes(file.read_text()))
            if "--png" in sys.argv:
                figure.savefig(folder / f"{name}.png", dpi=110)


def both_themes(svg):
    rules = []
    for light, dark in COLOURS.values():
        rules.append(f'[style*="fill: {light}"] {{ fill: {dark} !important }}')
        rules.append(f'[style*="stroke: {light}"] {{ stroke: {dark} !important }}')
    style = "<style>@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}</style>"
    # The reader's own font, which is narrower than the one that it was laid out with.
    svg = svg.replace("'DejaVu Sans'", "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif")
    svg = re.sub(r"[ \t]+\n", "\n", svg)
    return re.sub(r"(<svg[^>]*>)", lambda found: found[1] + style, svg, count=1)


def plain(value, _=None):
    """1,000 instead of 10^3, and 0.1 instead of 10^-1."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def short(value, _=None):
    """10k instead of 10,000, which would touch its neighbour."""
    return plain(value) if value < 10_000 else f"{value / 1000:g}k"


def logarithmic(axis):
    axis.set_major_locator(LogLocator(base=10, numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(plain))


# Rivals: a row for each backend, a column for each question.


def rivals(data):
    groups = [
        (title, [rival for rival in data["rivals"] if rival["backend"] == backend and "cycle_us" in rival])
        for backend, title in data["backends"].items()
    ]
    groups = [(title, there) for title, there in groups if there]
    if not groups:
        return None
    sizes = [len(there) + 0.9 for _, there in groups]
    figure, grid = plt.subplots(
        len(groups), 3, squeeze=False, figsize=(9.2, 0.36 * sum(sizes) + 1.5), gridspec_kw={"height_ratios": sizes}
    )
    for number, (title, there) in enumerate(groups):
        colours = [LIGHT["ours"] if rival["name"] == "contend" else LIGHT["other"] for rival in there]
        places = range(len(there))
        cycle, hand_off, eight = grid[number]
        cycle.set_title(f"{title}: lock + unlock, µs", loc="left")
        bars(cycle, places, [rival["cycle_us"] for rival in there], colours)
        cycle.set_yticks(places, [label(rival) for rival in there])
        for text, rival in zip(cycle.get_yticklabels(), there):
            text.set_color(LIGHT["ours"] if rival["name"] == "contend" else LIGHT["ink"])
        hand_off.set_title("hand-off, ms (p50 to p90)", loc="left")
        hand_off.set_xscale("log")
        logarithmic(hand_off.xaxis)
        for place, (rival, colour) in enumerate(zip(there, colours)):
            if "handoff_us" not in rival:
                hand_off.text(0.02, place, "waits out the lease", transform=hand_off.get_yaxis_transform(),
                              va="center", color=LIGHT["soft"], size=8)  # fmt: skip
                continue
            median, late = rival["handoff_us"] / 1e3, rival["handoff_p90_us"] / 1e3
            hand_off.plot([median, late], [place, place], color=colour, linewidth=2, alpha=0.6, solid_capstyle="round")
            hand_off.plot([median], [place], "o", color=colour, markersize=6)
            shown = f"{median:.2f}" if median < 1 else f"{median:.1f}" if median < 10 else f"{median:.0f}"
            hand_off.annotate(shown, (late, place), (6, 0), textcoords="offset points", va="center", size=8,
                              color=colour if rival["name"] == "contend" else LIGHT["ink"])  # fmt: skip
        times = [rival[key] / 1e3 for rival in there if "handoff_us" in rival for key in ["handoff_us", "handoff_p90_us"]]
        if times:
            hand_off.set_xlim(min(times) / 2, max(max(times) * 4, min(times) * 50))
        hand_off.set_yticks(places, [])
        eight.set_title("8 contenders, locks/s (most/least)", loc="left")
        values = [rival.get("eight_per_s", 0) for rival in there]
        notes = [f"{value:,.0f}  ({fairness(rival)})" if value else "–" for value, rival in zip(values, there)]
        bars(eight, places, values, colours, notes)
        eight.set_yticks(places, [])
        for axes in (cycle, hand_off, eight):
            axes.set_ylim(len(there) - 0.4, -0.6)
            axes.grid(axis="y", visible=False)
            axes.tick_params(length=0)
            axes.spines["left"].set_visible(False)
    figure.supxlabel(data["caption"], size=7, color=LIGHT["soft"])
    return figure


def label(rival):
    version = rival["version"]
    return f"{rival['name']} {version}" if version else rival["name"]


def fairness(rival):
    most, least = rival["eight_shares"][0], rival["eight_shares"][-1]
    return f"{most / least:.1f}" if least > 0 else "some none"


def bars(axes, places, values, colours, notes=None):
    axes.barh(places, values, color=colours, height=0.6)
    notes = notes or [f"{value:,.0f}" for value in values]
    for place, value, note in zip(places, values, notes):
        axes.annotate(note, (value, place), (4, 0), textcoords="offset points", va="center", size=8)
    axes.set_xlim(0, max([*values, 1]) * 1.45)
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.locator_params(axis="x", nbins=4)


# Hand-offs: how many had theirs within so long.

LOCKERS = {"redis": "contend", "mysql": "locker", "zk": "contend"}
SERVICES = {"redis": "service", "mysql": "contend", "zk": "service"}


def hand_off(data):
    there = [backend for backend in data["backends"] if f"{backend}/handoff/bare" in data["quantiles"]]
    if not there:
        return None
    figure, grid = plt.subplots(1, len(there), squeeze=False, sharey=True, figsize=(9.2, 3.2))
    for axes, backend in zip(grid[0], there):
        sides = [
            ("bare", "bare", LIGHT["other"], "-"),
            (LOCKERS[backend], "lockers", LIGHT["ours"], "-"),
            (SERVICES[backend], "services", LIGHT["ours"], ":"),
        ]
        slowest = []
        for side, name, colour, line in sides:
            curve = data["quantiles"].get(f"{backend}/handoff/{side}")
            if curve:
                axes.plot([ns / 1e3 for _, ns in curve], [100 * quantile for quantile, _ in curve], line, color=colour,
                          label=name, linewidth=1.8)  # fmt: skip
                slowest += [ns / 1e3 for quantile, ns in curve if quantile <= 0.999]
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=20))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(plain))
        axes.set_xlim(right=max(slowest) * 1.1)
        axes.tick_params(axis="x", labelsize=8, rotation=30)
        axes.set_title(data["backends"][backend], loc="left")
        axes.tick_params(length=0)
        axes.legend(loc="lower right", fontsize=8)
    grid[0][0].set_ylabel("% of hand-offs within")
    figure.supxlabel("µs from unlock (or stop) to the other's lock (or Acquired)", size=8, color=LIGHT["soft"])
    return figure


# Growth: how each number grows with how many there are.


def growth(data):
    panels = [
        ("services", "rss_mib", "services: RSS, MiB"),
        ("services", "threads", "services: threads"),
        ("services", "requests_per_s", "services: requests/s, idle"),
        ("services", "cpu", "services: CPU of a core, %, idle"),
        ("lockers", "rss_mib", "guards held: RSS, MiB"),
        ("lockers", "threads", "guards held: threads"),
        ("lockers", "requests_per_s", "guards held: requests/s"),
        ("lockers", "cpu", "guards held: CPU of a core, %"),
        ("waiters", "p50_us", "waiters: hand-off p50, µs"),
        ("waiters", "server_cpu_us", "waiters: server CPU a hand-off, µs"),
        ("processes", "locks_per_s", "processes on one mutex: locks/s"),
        ("permits", None, "permits held (MySQL): time, µs"),
    ]
    if not any(data["growth"].values()):
        return None
    figure, grid = plt.subplots(3, 4, figsize=(11, 7))
    for axes, (part, key, title) in zip(grid.flat, panels):
        axes.set_title(title, loc="left", size=8.5)
        axes.set_xscale("log")
        axes.tick_params(length=0)
        largest = 0
        if part == "permits":
            for operation, line in [("acquire", "-"), ("release", ":")]:
                points = [(held, times[operation] / 1e3) for held, times in data["held"] if times[operation]]
                if points:
                    axes.plot(*zip(*points), line, marker="o", markersize=4, color=LIGHT["mysql"], label=operation)
                    largest = max(largest, *(y for _, y in points))
            if largest:
                axes.legend(fontsize=8)
        for backend, rows in data["growth"].get(part, {}).items():
            points = [(row["count"], row[key]) for row in rows if row.get(key) and (row[key] > 0.05 or key == "cpu")]
            if not points:
                continue
            largest = max(largest, *(y for _, y in points))
            name = data["backends"].get(backend, backend)
            axes.plot(*zip(*points), marker="o", markersize=4, color=LIGHT[backend], label=name, linewidth=1.6)
        if key in ["cpu", None] or not largest:
            axes.set_ylim(0, largest * 1.15 or 1)
            axes.locator_params(axis="y", nbins=5)
        else:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(low / 1.5, high * 1.5)
            subs = (1,) if high / low > 200 else (1, 2, 5)
            axes.yaxis.set_major_locator(LogLocator(base=10, subs=subs, numticks=20))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(plain))
        axes.xaxis.set_major_locator(LogLocator(base=10, numticks=12))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(short))
        if part == "processes":
            counts = sorted({row["count"] for rows in data["growth"]["processes"].values() for row in rows})
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
    handles = {}
    for axes in grid.flat[:11]:
        handles.update(dict(zip(*reversed(axes.get_legend_handles_labels()))))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    return figure


if __name__ == "__main__":
    main()
