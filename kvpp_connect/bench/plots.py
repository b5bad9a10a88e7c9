"""Pictures of what was measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpp_connect.errors import ConfigError

if TYPE_CHECKING:
    from kvpp_connect.bench.broadcast import BroadcastReport
    from kvpp_connect.bench.capacity import CapacityReport


def check_plots(path: Path) -> None:
    """Find out before the work whether a picture can be drawn.

    Raises:
        ConfigError: matplotlib is missing, or no picture can be there.
    """
    try:
        import matplotlib  # noqa: F401 # pyright: ignore[reportMissingImports] - an extra
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'kvpp-connect[bench]'"
        ) from None
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no directory {path.parent}")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot is {str(path)!r}; expected a name ending in .png, .svg or .pdf")


def plot_broadcast(report: "BroadcastReport", path: Path) -> None:
    """Draw bandwidth over payload size, and bytes per step over batch size."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports] - an extra

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    speed, step = figure.subplots(1, 2)
    sizes = [size.size_bytes / 1024 for size in report.sizes]
    copies = [size.copy_bytes_per_s / 1e9 for size in report.sizes]
    speed.plot(sizes, copies, "k--", label="plain copy")
    for index, first in enumerate(report.sizes[0].transports):
        rates = [size.transports[index].bytes_per_s / 1e9 for size in report.sizes]
        speed.plot(sizes, rates, marker="o", label=first.transport.replace("_", " "))
    speed.set_xscale("log", base=2)
    speed.set_yscale("log")
    speed.set_xlabel("payload, KiB")
    speed.set_ylabel("GB/s")
    speed.set_title(f"Broadcast between {report.ranks} local ranks")
    for mode in ("full", "compact"):
        rows = [row for row in report.steps if row.mode == mode]
        moved = [row.moved_bytes / 1e6 for row in rows]
        step.plot([row.requests for row in rows], moved, marker="o", label=mode)
    step.set_xscale("log", base=2)
    step.set_xlabel("requests in the step")
    step.set_ylabel("MB broadcast")
    step.set_ylim(bottom=0)
    step.set_title("Bytes per step")
    for axes in (speed, step):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


def plot_capacity(report: "CapacityReport", path: Path) -> None:
    """Draw capacity over the group's size, a panel for each model.

    Limit and formula of both modes; for the servers what they hold, beside what was planned.
    """
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports] - an extra

    models = list(dict.fromkeys(row.model for row in report.planned))
    panels = len(models) + bool(report.measured)
    figure = Figure(figsize=(5.5 * panels, 4.6), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for model, panel in zip(models, axes, strict=False):
        rows = [row for row in report.planned if row.model == model]
        ranks = [row.ranks for row in rows]
        panel.plot(ranks, [row.limit for row in rows], "k--", label="limit")
        for index, share in enumerate(report.shares):
            ratios = [row.compact[index] for row in rows]
            panel.plot(ranks, ratios, marker="o", label=f"compact, f = {share:g}")
        panel.plot(ranks, [row.full for row in rows], marker="s", label="full")
        panel.set_title(f"{model}, planned")
    if report.measured:
        _plot_measured(report, axes[-1])
    for panel in axes:
        panel.set_xscale("log", base=2)
        ticks = sorted({row.ranks for row in (*report.planned, *report.measured)})
        panel.set_xticks(ticks, map(str, ticks))
        panel.set_xlabel("ranks of the KVPP group")
        panel.set_ylabel("capacity over plain vLLM")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _plot_measured(report: "CapacityReport", panel: Any) -> None:  # noqa: ANN401 - matplotlib's
    """Draw what servers hold as marks, what was planned as lines."""
    full = [row for row in report.measured if row.variant == "full"]
    panel.plot([row.ranks for row in full], [row.limit for row in full], "k--", label="limit")
    for variant, colour in (("compact", "tab:blue"), ("full", "tab:orange")):
        rows = [row for row in report.measured if row.variant == variant]
        ranks = [row.ranks for row in rows]
        planned = [row.planned_ratio for row in rows]
        panel.plot(ranks, planned, color=colour, label=f"{variant}: formula")
        measured = [row.plain_ratio for row in rows]
        panel.plot(ranks, measured, "*", color=colour, markersize=11, label=f"{variant}: measured")
    panel.set_title("small model, real servers")
