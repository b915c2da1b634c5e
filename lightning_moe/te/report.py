"""What Transformer Engine would change in the model of a config: ``lightning-moe doctor --config FILE.yaml``.

Neither the package nor a GPU is needed, and nothing is trained or written.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lightning_moe.te.options import TransformerEngineConfig
from lightning_moe.te.plan import EXPERTS, Plan
from lightning_moe.te.recipes import recipe_facts
from lightning_moe.te.swap import unusable


def main(arguments: Sequence[str]) -> int:
    """Print what becomes of the model of a config.

    Args:
        arguments: Those of ``lightning-moe fit``, ``--config FILE.yaml`` among them.

    Returns:
        The exit code, 0.

    Raises:
        RefusedError: If the config cannot be used.
    """
    from lightning_moe.cli import check_config_file, config_files, quiet
    from lightning_moe.cli_errors import RefusedError

    quiet()
    for file in config_files(arguments):
        check_config_file(file)
    model, options, experts_backend = _built(list(arguments))
    try:
        Console().print(report(model, options, experts_backend))
    except ValueError as error:
        raise RefusedError(str(error)) from error
    return 0


def report(
    model: LightningModule, options: TransformerEngineConfig | None, experts_backend: str | None = None
) -> Group:
    """Say what becomes of each module of a model.

    Args:
        model: The model, on any device.
        options: The options, ``None`` to show what the default ones would do.
        experts_backend: The option of the strategy, ``None`` where it is not known.

    Raises:
        ValueError: If the options do not fit the model.
    """
    from lightning_moe.precision import MoEPrecision

    shown = options or TransformerEngineConfig()
    plan = MoEPrecision("bf16-mixed", transformer_engine=shown).plan(model)
    title = f"Transformer Engine in {type(model).__name__}"
    if options is None:
        title += " if MoEPrecision had transformer_engine={} (this config does not use it)"
    experts = _experts_text(model, shown, experts_backend)
    return Group(_table(title, plan, experts), *(Text(line) for line in _lines(plan, shown)))


def _experts_text(model: LightningModule, options: TransformerEngineConfig, backend: str | None) -> Text:
    """What computes the experts."""
    from lightning_moe.experts import find_experts
    from lightning_moe.experts.te import low_precision_unsuitable

    if backend != "te":
        now = "" if backend is None else f"experts_backend={backend!r} computes them; "
        return Text(f"stays: {now}with 'te' it is te.GroupedLinear", "yellow")
    shapes = [shape for found in find_experts(model) for shape in found.spec.mlp_shapes(found.module)]
    unfit = "" if options.recipe is None else low_precision_unsuitable(shapes, options.recipe)
    return Text(f"te.GroupedLinear, in the base precision: {unfit}" if unfit else "te.GroupedLinear", "green")


def _table(title: str, plan: Plan, experts: Text) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=True)
    table.add_column("modules", overflow="fold", ratio=4)
    table.add_column("now", overflow="fold", ratio=2)
    table.add_column("becomes", overflow="fold", ratio=3)
    table.add_column("count", justify="right", min_width=5)
    for row in plan.rows:
        if row.reason == EXPERTS:
            becomes = experts
        elif row.target:
            becomes = Text(f"{row.target} ({row.reason})" if row.reason else row.target, "green")
        else:
            becomes = Text(f"stays: {row.reason}", "yellow")
        table.add_row(Text(row.name), Text(row.source), becomes, str(row.count))
    return table


def _lines(plan: Plan, options: TransformerEngineConfig) -> list[str]:
    counts = Counter(item.target for item in plan.swapped)
    lines = [f"Changed: {', '.join(f'{count} {target}' for target, count in counts.items()) or 'nothing'}"]
    if options.recipe is None:
        lines.append("Recipe: none, so everything computes in the precision of the run")
    else:
        facts = recipe_facts(options.recipe)
        when = (
            "training and evaluation" if options.quantize_evaluation else "training; evaluation in the base precision"
        )
        lines.append(f"Recipe: {facts.name or facts.class_name} ({facts.class_name}: {facts.summary}) in {when}")
        lines.append(
            f"It needs {facts.needs}, widths that are multiples of {facts.width}; tokens are padded to {facts.rows}"
        )
    lines.append(f"Here: {unusable(options) or 'usable'}")
    return lines


def _built(arguments: list[str]) -> tuple[LightningModule, TransformerEngineConfig | None, str | None]:
    """The model of a config with its network, and the options; without a Trainer, which may need other devices."""
    from lightning_moe.cli import MoECLI
    from lightning_moe.precision import MoEPrecision

    class Built(MoECLI):
        def before_instantiate_classes(self) -> None:
            self.save_config_callback = None
            trainer = self.config["fit"]["trainer"]
            self.experts_backend = _experts_backend(trainer["strategy"])
            for name, value in {"strategy": "auto", "logger": False, "callbacks": None, "profiler": None}.items():
                trainer[name] = value

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            plugins = self.config_init["fit"]["trainer"]["plugins"] or []
            self.plugins = plugins if isinstance(plugins, list) else [plugins]

        def _run_subcommand(self, subcommand: str) -> None:
            """Nothing is run."""

    cli = Built(["fit", *arguments])
    if is_overridden("configure_model", cli.model):
        try:
            with torch.device("meta"):
                cli.model.configure_model()
        except Exception:  # not every model can be built without memory
            cli.model.configure_model()
    found = [plugin.transformer_engine for plugin in cli.plugins if isinstance(plugin, MoEPrecision)]
    return cli.model, found[0] if found else None, cli.experts_backend


def _experts_backend(strategy: Any) -> str | None:
    """The option of the strategy that a config names, ``None`` where it names another strategy."""
    if isinstance(strategy, str):
        return "auto" if strategy == "moe_ep" else None
    named = str(strategy.get("class_path", "")).endswith("ExpertParallelStrategy") if strategy else False
    return (strategy.get("init_args") or {}).get("experts_backend", "auto") if named else None
