"""Pictures of what was measured."""

from pathlib import Path
from typing import TYPE_CHECKING

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
    """Draw capacity over the group's size: limit, formula of both modes, measured servers."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports] - an extra

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    for model in dict.fromkeys(row.model for row in report.planned):
        rows = [row for row in report.planned if row.model == model]
        ranks = [row.ranks for row in rows]
        axes.plot(ranks, [row.limit for row in rows], "--", label=f"{model}: limit")
        axes.plot(ranks, [row.full for row in rows], marker="s", label=f"{model}: full")
        for index, share in enumerate(report.shares):
            ratios = [row.compact[index] for row in rows]
            axes.plot(ranks, ratios, marker="o", label=f"{model}: compact, f = {share:g}")
    for variant in ("full", "compact"):
        rows = [row for row in report.measured if row.variant == variant]
        if rows:
            ratios = [row.plain_ratio for row in rows]
            axes.plot([r.ranks for r in rows], ratios, "k*", label=f"measured: {variant}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("ranks of the KVPP group")
    axes.set_ylabel("capacity over plain vLLM")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
