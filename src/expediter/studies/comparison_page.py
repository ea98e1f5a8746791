"""A comparison as a page for somebody who was not there."""

from __future__ import annotations

from html import escape
from statistics import fmean
from typing import Final

from expediter.studies.comparison import Comparison, EntryFacts
from expediter.studies.comparison_at_load import add_at_load
from expediter.studies.comparison_over_load import add_over_load, targets_in_words
from expediter.studies.page import Markup, Page, facts, heading, items, table, words
from expediter.studies.words import listed, number, percent

_CAVEATS: Final = (
    "These are simulations. The schedulers and the router are those that serve; a step's duration comes from a model "
    "of the GPU, whose errors against measured engines are in Expediter's docs/perfmodel.md. An error in it moves all"
    " entries alike, so differences are more certain than the figures themselves.",
    "Every request ends after the trace's number of tokens, and tokens are made up: what depends on contents (stop "
    "words, speculative decoding) is not in it.",
    "Goodput counts requests that met all their targets, per second in which requests arrive. A simulation's own "
    "report divides by the whole run, until the last answer.",
    "Draws move each arrival among its neighbours; lengths and the rate over time stay. The noise stated here is that"
    " of chance arrivals, not that of another day's traffic.",
)
_COST_NOTE: Final = (
    '<p class="note">By load: what 1,000 requests in time cost. GPUs are rented at list prices, or those given with '
    "--price, while requests arrive.</p>"
)


def comparison_page(comparison: Comparison, command: str) -> str:
    """Return the page as HTML.

    Args:
        command: how to get the same comparison again.
    """
    names = [entry.name for entry in comparison.entries]
    loads = [f"{point.load:g}" for point in comparison.loads]
    chosen = _telling_load(comparison)
    page = Page(
        title=f"{listed(names)} compared",
        choices=[(text, f"{number(point.offered_rps)}/s") for text, point in zip(loads, comparison.loads, strict=True)],
        chosen=f"{chosen:g}",
        chosen_what="Load",
    )
    _add_top(page, comparison)
    add_over_load(page, comparison)
    add_at_load(page, comparison)
    _add_facts(page, comparison, command)
    return page.html()


def _telling_load(comparison: Comparison) -> float:
    """Return the highest load at which somebody leads, or the highest of all."""
    leads = [verdict.load for verdict in comparison.findings.verdicts if verdict.runner_up is not None]
    return max(leads, default=comparison.loads[-1].load)


# -- the top ----------------------------------------------------------------------------------------------------------


def _add_top(page: Page, comparison: Comparison) -> None:
    trace, count = comparison.trace, len(comparison.seeds)
    draws = "one draw of the traffic" if count == 1 else f"{count} draws of the traffic"
    hardware = listed(sorted({_hardware(comparison, name) for name in comparison.names}))
    models = listed(sorted({str(entry.configuration["model"]) for entry in comparison.entries}))
    page.add(
        Markup(f"<h1>{escape(page.title)}</h1>"),
        Markup(
            f'<p class="under">Simulated: {escape(models)} on {escape(hardware)}, serving {escape(trace.name)} '
            f"({trace.num_requests:,} requests) at {len(comparison.loads)} loads, {draws}. "
            f"Expediter {escape(comparison.version)}.</p>"
        ),
        _summary(comparison),
    )


def _summary(comparison: Comparison) -> Markup:
    found, last = comparison.findings, comparison.loads[-1].load
    parts = (
        ("How far each goes", found.reach),
        (f"What limits each at load {last:g}, the highest", found.limits),
        ("How sure that is", found.certainty),
        ("With care", found.caveats),
    )
    lists = "".join(f"<h3>{escape(title)}</h3>{items(texts)}" for title, texts in parts if texts)
    return Markup(f'<section class="summary"><h2>What came out</h2><p>{words(found.headline)}</p>{lists}</section>')


def _hardware(comparison: Comparison, name: str) -> str:
    setup = next(entry.configuration for entry in comparison.entries if entry.name == name)
    num_gpus = next(entry.num_gpus for entry in comparison.entries if entry.name == name)
    if setup["pools"]:
        return " + ".join(
            f"{pool['replicas']} x {pool['tensor_parallel'] * pool['pipeline_parallel']} "
            f"{pool.get('gpu') or setup['gpu']} {pool['role']}"
            for pool in setup["pools"]
        )
    replicas = setup["replicas"]
    each = f"{num_gpus} {setup['gpu']} GPU{'s' if num_gpus > 1 else ''}"
    return f"{each} in {replicas} replicas" if replicas > 1 else each


# -- what was simulated -----------------------------------------------------------------------------------------------


def _add_facts(page: Page, comparison: Comparison, command: str) -> None:
    trace = comparison.trace
    reuse = "" if trace.prefix_reuse is None else f"; {percent(trace.prefix_reuse)} of the prompt tokens came before"
    limit = "" if trace.limit is None else f", cut to {trace.limit:,}"
    rows = [
        (
            "traffic",
            f"{trace.name}: {trace.num_requests:,} requests{limit} over {number(trace.span_s)} s; prompts of "
            f"{number(trace.input_tokens_mean)} tokens (mean; 99 % up to {number(trace.input_tokens_p99)}), outputs "
            f"of {number(trace.output_tokens_mean)} (99 % up to {number(trace.output_tokens_p99)}){reuse}",
        ),
        ("draws", _draws_in_words(comparison)),
        ("targets", targets_in_words(comparison, "")),
        *((f"class {name}", targets_in_words(comparison, name)) for name in comparison.slo_classes),
        ("version", f"Expediter {comparison.version}"),
    ]
    page.add(heading("What was simulated"), facts(rows), _entries_table(comparison), _cost_table(comparison))
    page.add(
        heading("What to know before relying on it"),
        items(_CAVEATS),
        heading("The same again"),
        Markup(f"<pre><code>{escape(command)}</code></pre>"),
        "The same version gives the same page, byte for byte.",
    )


def _draws_in_words(comparison: Comparison) -> str:
    if len(comparison.seeds) == 1:
        return f"one, as recorded (seed {comparison.seeds[0]})"
    listed = ", ".join(map(str, comparison.seeds))
    return f"{len(comparison.seeds)}, by seeds {listed}; every entry serves the same ones"


def _entries_table(comparison: Comparison) -> Markup:
    """Return a table of what differs between the entries, and a sentence of what does not."""
    parts = [_parts_of(entry) for entry in comparison.entries]
    differing = [name for name in parts[0] if len({row[name] for row in parts}) > 1]
    alike = ", ".join(f"{name} {value}" for name, value in parts[0].items() if name not in differing)
    rows = [
        (entry.name, *(row[name] for name in differing)) for entry, row in zip(comparison.entries, parts, strict=True)
    ]
    note = f'<p class="note">The same for all: {words(alike)}.</p>' if alike and len(rows) > 1 else ""
    return Markup(table(("entry", *differing), rows, is_text=True) + note)


def _parts_of(entry: EntryFacts) -> dict[str, str]:
    setup = entry.configuration
    return {
        "preset": setup["preset"],
        "own settings": ", ".join(f"{key}={value}" for key, value in entry.settings.items()) or "-",
        "model": str(setup["model"]),
        **{name.replace("_", " "): str(part) for name, part in setup["policy"].items()},
        "routing": str(setup["routing"]),
        "max sequences": f"{setup['max_num_seqs']:,}",
        "max tokens per step": f"{setup['max_num_batched_tokens']:,}",
        "KV blocks": f"{setup['num_blocks']:,} x {setup['block_size']} tokens",
        "prefix caching": "on" if setup["prefix_caching"] else "off",
    }


def _cost_table(comparison: Comparison) -> Markup:
    head = (
        "cost",
        "hardware",
        "per hour",
        *(f"load {point.load:g}" for point in comparison.loads),
    )
    rows = []
    for entry in comparison.entries:
        price = entry.cost_per_hour
        cost = []
        for cell in comparison.cells_of(entry.name):
            goodput = fmean(cell.goodput_rps)
            cost.append("-" if price is None or not goodput else f"${price / 3.6 / goodput:.3g}")
        dollars = "-" if price is None else f"${price:.2f}"
        rows.append((entry.name, _hardware(comparison, entry.name), dollars, *cost))
    return Markup(table(head, rows) + _COST_NOTE)
