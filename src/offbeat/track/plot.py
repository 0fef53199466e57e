"""A picture of a run from its metrics.jsonl: reward by source, validation accuracy, staleness."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from PIL import Image

from offbeat.errors import UserError
from offbeat.track.metrics import FILE_NAME, read_metrics

INK, MUTED, GRID = "#1f2430", "#667085", "#e4e7ec"
COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#a16207", "#be185d")
ACCURACY, MEAN, TOP = "#059669", "#2563eb", "#dc2626"
DPI = 110
Records = Sequence[Mapping[str, Any]]


def plot(run_dir: Path, out: Path) -> None:
    """Write a PNG of a run's metrics to `out`; x axes are trainer steps.

    UserError, naming the file, if metrics.jsonl is missing, unreadable or without any step.
    """
    steps, validations = _read(run_dir / FILE_NAME)
    figure = Figure(figsize=(9, 9), dpi=DPI, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    reward, accuracy, staleness = figure.subplots(3, 1, sharex=True)
    figure.suptitle(run_dir.resolve().name, color=INK, fontsize=13, fontweight="bold")
    _plot_rewards(reward, steps)
    _plot_accuracy(accuracy, validations)
    _plot_staleness(staleness, steps, _bound(run_dir / "config.json"))
    staleness.set_xlabel("trainer step", color=MUTED)
    for axes in (reward, accuracy, staleness):
        _style(axes)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        canvas.draw()
        _save(canvas.buffer_rgba(), out)
    except OSError as error:
        raise UserError(f"{out}: the plot cannot be written ({error})") from error


def _save(pixels: Any, out: Path) -> None:
    """A PNG of 64 colours: a third of the size, to the eye the same."""
    image = Image.fromarray(np.asarray(pixels)).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(out, format="PNG", optimize=True)


def _read(path: Path) -> tuple[Records, Records]:
    """Step and validation records by step; of a step that was done again, the last one."""
    steps: dict[int, Mapping[str, Any]] = {}
    validations: dict[int, Mapping[str, Any]] = {}
    try:
        for record in read_metrics(path):
            if record["type"] == "step":
                steps[record["step"]] = record
            elif record["type"] == "validation":
                validations[record["step"]] = record
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: is {path.parent} a run directory?") from error
    except (OSError, KeyError) as error:
        raise UserError(f"{path} cannot be read: {error!r}") from error
    if not steps and not validations:
        raise UserError(f"{path} holds no step yet: there is nothing to plot")
    return [steps[step] for step in sorted(steps)], [validations[s] for s in sorted(validations)]


def _bound(config: Path) -> int | None:
    """max_staleness of the run's saved configuration; None if there is none."""
    try:
        bound = json.loads(config.read_text("utf-8"))["train"]["max_staleness"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return bound if isinstance(bound, int) else None


def _plot_rewards(axes: Any, steps: Records) -> None:
    """A pale line of each step's mean and a strong one of the running mean, by source."""
    names = list(dict.fromkeys(name for record in steps for name in record["reward"]))
    sources = [name for name in names if name != "total"]
    shown = [(name, COLORS[at % len(COLORS)], 1.8) for at, name in enumerate(sources)]
    if len(sources) > 1 and "total" in names:
        shown.append(("total", INK, 2.4))
    x = [record["step"] for record in steps]
    for name, color, width in shown:
        values = _floats(record["reward"].get(name) for record in steps)
        dots = "o" if len(x) < 3 else None
        axes.plot(x, values, color=color, linewidth=0.8, alpha=0.3, marker=dots, markersize=4)
        label = name if name == "total" or len(sources) > 1 else f"{name} (only source)"
        axes.plot(x, running_mean(values, max(1, len(x) // 20)), color=color, linewidth=width)
        axes.lines[-1].set_label(label)
    window = max(1, len(x) // 20)
    note = f", mean of {window} steps (pale: each step)" if window > 1 else ""
    axes.set_title(f"Reward by source{note}")
    if shown:
        _legend(axes)


def _plot_accuracy(axes: Any, validations: Records) -> None:
    points = [
        (record["step"], record["metrics"]["accuracy"])
        for record in validations
        if isinstance(record.get("metrics", {}).get("accuracy"), (int, float))
    ]
    axes.set_title("Validation accuracy (true: exact checker on held-out prompts)")
    if not points:
        axes.text(0.5, 0.5, "no validation accuracy recorded", color=MUTED, ha="center",
                  va="center", transform=axes.transAxes)  # fmt: skip
        axes.set_yticks([])
        return
    _plot_data_sources(axes, validations)
    x, y = [float(step) for step, _ in points], [float(value) for _, value in points]
    axes.plot(x, y, color=ACCURACY, linewidth=2, marker="o", markersize=5, label="all")
    for at in sorted({0, len(points) - 1}):
        under = at == 0 and len(points) > 1 and y[1] > y[0]
        axes.annotate(f"{y[at]:.1%}", (x[at], y[at]), textcoords="offset points",
                      xytext=(0, -16 if under else 8), ha="center", color=ACCURACY,
                      fontweight="bold")  # fmt: skip
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    low, high = float(np.nanmin(drawn)), float(np.nanmax(drawn))
    room = max(0.05, 0.25 * (high - low))
    axes.set_ylim(low - room, high + room)
    if len(axes.lines) > 1:
        _legend(axes)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], min_n_ticks=2))


def _plot_data_sources(axes: Any, validations: Records) -> None:
    """A thin line for each data source, as many as there are colours."""
    names = sorted({n for r in validations for n in r["metrics"] if n.startswith("accuracy/")})
    if not 1 < len(names) <= len(COLORS):
        return
    x = [record["step"] for record in validations]
    for name, color in zip(names, COLORS, strict=False):
        values = _floats(record["metrics"].get(name) for record in validations)
        label = name.partition("/")[2]
        axes.plot(x, values, color=color, linewidth=1, alpha=0.7, label=label)


def _plot_staleness(axes: Any, steps: Records, bound: int | None) -> None:
    x = [record["step"] for record in steps]
    mean = _floats(record["staleness"]["mean"] for record in steps)
    top = _floats(record["staleness"]["max"] for record in steps)
    dots = "o" if len(x) < 3 else None
    smooth = running_mean(mean, max(1, len(x) // 20))
    axes.plot(x, top, "o", color=TOP, markersize=3 if len(x) > 50 else 5, alpha=0.8, label="max")
    axes.plot(x, mean, color=MEAN, linewidth=0.8, alpha=0.3)
    axes.fill_between(x, 0, smooth, color=MEAN, alpha=0.12, linewidth=0)
    axes.plot(x, smooth, color=MEAN, linewidth=1.8, label="mean", marker=dots)
    highest = max((value for value in top if math.isfinite(value)), default=0.0)
    if bound is not None:
        axes.axhline(bound, color=MUTED, linewidth=1.2, linestyle="--", label=f"bound {bound}")
        highest = max(highest, bound)
    axes.set_ylim(0, max(1.0, highest) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Staleness of samples (trainer steps)")
    _legend(axes)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """At each place the mean of the finite ones of the last `window` values, else NaN."""
    result = []
    for end in range(1, len(values) + 1):
        kept = [v for v in values[max(0, end - window) : end] if math.isfinite(v)]
        result.append(sum(kept) / len(kept) if kept else math.nan)
    return result


def _floats(values: Iterable[float | None]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def _legend(axes: Any) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelcolor=INK)


def _style(axes: Any) -> None:
    axes.set_title(axes.get_title(), loc="left", color=INK, fontsize=11)
    axes.set_title("", loc="center")
    axes.set_axisbelow(True)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
