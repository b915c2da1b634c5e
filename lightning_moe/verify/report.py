"""What a user reads of a comparison."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_moe.verify.compare import Comparison, Record, Row, first_to_differ, how
from lightning_moe.verify.plan import write_json

Kind = Literal["same", "same_by_rank", "different", "random"]
_STYLES = {"ok": "green", "FAIL": "bold red", "unclear": "yellow"}
_WIDTH = 122  # where no terminal says how wide it is
_NAME = 34


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison.

    Attributes:
        kind: ``"same"``; ``"same_by_rank"``: only when each rank's batch is a micro-batch; ``"different"``; or
            ``"random"``: it cannot be known.
        text: The same in words.
        comparison: The table.
        reference: What the layout was compared with, in words.
        notes: What else to know.
    """

    kind: Kind
    text: str
    comparison: Comparison
    reference: str
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 for the same, 1 for different, 2 where the way of asking allows no answer."""
        return {"same": 0, "same_by_rank": 0, "different": 1, "random": 2}[self.kind]


def show(verdict: Verdict, layout: Record, what: str, console: Console | None = None) -> None:
    """Print the table and the verdict.

    Args:
        verdict: The outcome.
        layout: The record of the layout.
        what: The model and the config, in words.
        console: Where to; default: standard output.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH)
    console.print(Text.assemble(("verify      ", "bold"), what), soft_wrap=True)
    console.print(Text.assemble(("layout      ", "bold"), layout.layout), soft_wrap=True)
    console.print(Text.assemble(("one process ", "bold"), verdict.reference), soft_wrap=True)
    console.print(_table(verdict.comparison.rows))
    for note in verdict.notes:
        console.print(Text.assemble(("note: ", "yellow"), note), soft_wrap=True)
    style = {0: "bold green", 1: "bold red", 2: "bold yellow"}[verdict.exit_code]
    console.print(Text(verdict.text, style), soft_wrap=True)


def _table(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("quantity", no_wrap=True)
    for name in ("layout", "one process", "error", "tolerance"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("worst parameter", overflow="fold")
    before = None
    for row in rows:
        if before is not None and row.quantity != before:
            table.add_section()
        before = row.quantity
        values = (f"{row.layout:.5g}", f"{row.one_process:.5g}", f"{row.error:.1e}", f"{row.tolerance:.1e}")
        table.add_row(row.name, *values, Text(row.result, _STYLES[row.result]), _short(row.worst or ""))
    return table


def _short(name: str) -> str:
    """The last modules of a long name."""
    parts = name.split(".")
    while len(".".join(parts)) > _NAME and len(parts) > 2:
        parts = parts[1:]
    short = ".".join(parts)
    return short if short == name else f"…{short}"


def write(path: Path, verdict: Verdict, layout: Record, model: str) -> None:
    """Write the comparison as JSON; numbers that are not finite become ``null``.

    Args:
        path: The file.
        verdict: The outcome.
        layout: The record of the layout.
        model: Class path of the model.
    """
    content = {
        "verdict": verdict.kind,
        "exit_code": verdict.exit_code,
        "text": verdict.text,
        "model": model,
        "layout": layout.layout,
        "ranks": layout.ranks,
        "reference": verdict.reference,
        "precision": layout.precision,
        "steps": layout.steps,
        "optimizers": layout.optimizers,
        "rows": [
            {"name": row.name, **{key: _finite(value) for key, value in asdict(row).items()}}
            for row in verdict.comparison.rows
        ],
        "noisy": verdict.comparison.noisy,
        "notes": verdict.notes,
    }
    write_json(path, content)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def different(comparison: Comparison, layout: Record) -> str:
    """The verdict on a layout that does not train as one process does."""
    rows = first_to_differ(comparison.failed)
    first = rows[0]
    names = ", ".join(f"{row.group or f'step {row.step}'} ({how(row)})" for row in rows)
    if first.quantity == "loss":
        where = f"the forward differs: loss of {names}"
    elif first.quantity == "gradient":
        where = f"the forward agrees, the gradients of these differ: {names}"
    elif first.quantity == "gradient norm":
        where = f"the gradients agree, their norm does not: {names}"
    else:
        where = f"the gradients of the first step agree, the {first.quantity} does not: {names}"
    return f"DIFFERENT: {layout.ranks} ranks do not train as one process does; {where}"


def same(comparison: Comparison, layout: Record) -> str:
    """The verdict on a layout that trains as one process does."""
    ranks = f"{layout.ranks} rank{'s' * (layout.ranks > 1)}"
    judged = sum(row.result == "ok" for row in comparison.rows)
    return (
        f"SAME: {ranks} train{'s' * (layout.ranks == 1)} as one process on the whole batch does: {judged} of"
        f" {len(comparison.rows)} quantities within tolerance"
        + ("" if judged == len(comparison.rows) else ", the others drown in rounding")
    )
