"""The long-context study for people: a Markdown table, perplexity against position, and the passkey's ranks by depth and length."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

Figures = dict[str, dict[int, dict[str, Any]]]
"""By row and multiple of the trained length: ``perplexity``, ``by_position``, and ``ranks`` of the true key for each depth."""


def table(settings: dict[str, Any], figures: Figures) -> str:
    trained, multiples = settings["trained_length"], settings["multiples"]
    heads = [f"{multiple * trained:,} ({multiple} x)" for multiple in multiples]
    lines = [f"# {settings['model']}, trained at {trained:,} tokens", ""]
    lines += [f"Perplexity over windows of so many tokens ({settings['tokens']:,} tokens of text in each cell)", ""]
    lines += _table(heads, {name: [f"{cells[m]['perplexity']:.2f}" for m in multiples] for name, cells in figures.items()})
    num_documents = settings["passkeys"] * len(settings["depths"])
    lines += [
        "",
        f"Passkey: mean rank of the true key among 100, and how often it is the first ({num_documents} documents a cell)",
        "",
    ]
    lines += _table(heads, {name: [_ranks(cells[m]["ranks"]) for m in multiples] for name, cells in figures.items()})
    return "\n".join(lines) + "\n"


def _table(heads: list[str], rows: dict[str, list[str]]) -> list[str]:
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    return lines + [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]


def _ranks(by_depth: list[list[int]]) -> str:
    ranks = list(chain.from_iterable(by_depth))
    return f"{mean(ranks):.1f}, {sum(rank == 1 for rank in ranks) / len(ranks):.0%}"


def plot(settings: dict[str, Any], figures: Figures, folder: Path) -> None:
    """Write perplexity.png and passkey.png. matplotlib must be there (``require_matplotlib``)."""
    _plot_perplexity(settings, figures, folder / "perplexity.png")
    _plot_passkeys(settings, figures, folder / "passkey.png")


def _plot_perplexity(settings: dict[str, Any], figures: Figures, path: Path) -> None:
    from matplotlib.figure import Figure

    trained, most = settings["trained_length"], max(settings["multiples"])
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    drawn: list[list[float]] = []
    for name, cells in figures.items():
        values = cells[most]["by_position"]
        width, style = most * trained / len(values), ":" if values in drawn else "-"  # two of one rotation lie on each other
        axes.plot([width * (i + 0.5) for i in range(len(values))], values, style, marker=".", linewidth=2, label=name)
        drawn.append(values)
    axes.axvline(trained, color="grey", linestyle="--", linewidth=1)
    axes.set(yscale="log", xlabel=f"position (tokens; trained: {trained:,})", ylabel="perplexity", title=settings["model"])
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120)


def _plot_passkeys(settings: dict[str, Any], figures: Figures, path: Path) -> None:
    """One map for each scaling: depth downwards, length to the right, the mean rank as colour and number."""
    from matplotlib.figure import Figure

    depths, multiples = settings["depths"], settings["multiples"]
    figure = Figure(figsize=(1.8 * len(figures), 3), layout="constrained")
    all_axes = figure.subplots(1, len(figures), sharey=True, squeeze=False)
    for axes, (name, cells) in zip(all_axes[0], figures.items(), strict=True):
        ranks = [[mean(cells[m]["ranks"][row]) for m in multiples] for row in range(len(depths))]
        axes.imshow(ranks, cmap="RdYlGn_r", vmin=1, vmax=50, aspect="auto")
        for row, values in enumerate(ranks):
            for column, value in enumerate(values):
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7)
        axes.set_title(name, fontsize=8)
        axes.set_xticks(range(len(multiples)), [f"{m} x" for m in multiples], fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
    all_axes[0][0].set_ylabel("depth of the key")
    figure.suptitle(f"{settings['model']}: rank of the true key among 100", fontsize=9)
    figure.savefig(path, dpi=120)
