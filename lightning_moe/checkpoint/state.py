"""What goes into a checkpoint besides Lightning's own entries, and how it comes out again on any layout.

A folder holds, for ``torch.distributed.checkpoint``:

- ``model``: the state dict, shards as ``DTensor``;
- ``optimizer_<i>``: ``state`` and ``param_groups`` by the names of the parameters. An optimizer without state is in the
  metadata file instead, because an empty dictionary leaves no trace in a folder;
- ``ranks.<r>``: what rank ``r`` has of its own: ``random``, the states of its random generators; ``passes``, those from
  which the passes over its training data began; ``buffers``, those that differ between the ranks;
- ``gradients``: those that the run has accumulated and not stepped on yet.

These are the names by which Lightning's ``consolidate_checkpoint`` makes one file of a folder. A single file has the
same entries, but Lightning's ``state_dict`` and ``optimizer_states`` in place of the first two. The entry
:data:`FACTS` of Lightning's metadata holds how many ranks and optimizers there were, and where the dataloaders stood.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_moe.checkpoint.compare import check_tensors
from lightning_moe.checkpoint.damage import CheckpointError, Ranks, listed
from lightning_moe.checkpoint.folder import SavedFolder
from lightning_moe.checkpoint.optimizer_state import (
    TensorFacts,
    by_name,
    digest,
    empty_state,
    load_named_optimizer_state,
    map_leaves,
    named_optimizer_state,
    names_by_position,
    parameter_names,
    shard_like,
)
from lightning_moe.checkpoint.position import PositionedLoader, pass_states, stateful_loaders
from lightning_moe.checkpoint.random_state import derived_random_state, random_state

FACTS = "lightning_moe"
MODEL = "model"
_LIGHTNINGS_MODEL = "state_dict"  # what Lightning's ModelParallelStrategy calls it in a folder


# Saving


def optimizer_state(strategy: Any, optimizer: Optimizer) -> dict[str, Any]:
    """What :meth:`Strategy.optimizer_state` returns: by name, or for a single file as plain PyTorch has it. Collective.

    Args:
        strategy: The strategy.
        optimizer: One of its optimizers, also as Lightning wraps it.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    whole = not strategy._save_distributed_checkpoint
    return named_optimizer_state(strategy.lightning_module, inner, whole)


def collect(strategy: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Take out of Lightning's checkpoint what a folder holds beside the metadata. Collective.

    Tensors are on the CPU; where the model is there too, they are its own and not copies.

    Args:
        strategy: The strategy.
        checkpoint: What Lightning's connector has made. What is left in it is for the metadata file.

    Returns:
        A nested dictionary of ``DTensor``, tensors and plain values, the same keys on every rank but for ``ranks`` and
        experts that exist on one rank each.
    """
    whole_run = "optimizer_states" in checkpoint
    optimizers = checkpoint.pop("optimizer_states", [])
    state: dict[str, Any] = {MODEL: checkpoint.pop(_LIGHTNINGS_MODEL)}
    for index, optimizer in enumerate(optimizers):
        (state if optimizer["state"] else checkpoint)[f"optimizer_{index}"] = optimizer
    own = _add_facts(strategy, checkpoint, state[MODEL], len(optimizers) if whole_run else None)
    if own:
        state["ranks"] = {str(strategy.global_rank): own}
    if whole_run and (gradients := _accumulated(strategy)):
        state["gradients"] = gradients
    return state


def collect_whole(strategy: Any, checkpoint: dict[str, Any]) -> None:
    """Add to a checkpoint that becomes a single file what Lightning does not put there. Collective.

    Args:
        strategy: The strategy.
        checkpoint: What Lightning's connector has made; ``state_dict`` and ``optimizer_states`` are whole on rank 0.
    """
    optimizers = checkpoint.get("optimizer_states")
    own = _add_facts(
        strategy, checkpoint, strategy.lightning_module.state_dict(), None if optimizers is None else len(optimizers)
    )
    checkpoint["ranks"] = {str(rank): found for rank, found in enumerate(ranks_of(strategy).gather(own)) if found}
    if optimizers is not None and (gradients := _accumulated(strategy)):
        checkpoint["gradients"] = {
            name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()
        }


def _add_facts(
    strategy: Any, checkpoint: dict[str, Any], model: Mapping[str, Any], optimizers: int | None
) -> dict[str, Any]:
    """Add the facts, and return what only this rank has."""
    own: dict[str, Any] = {}
    plain = {n: v for n, v in model.items() if isinstance(v, Tensor) and not isinstance(v, DTensor)}
    random = {} if optimizers is None else random_state(strategy.root_device)
    found = ranks_of(strategy).gather(({name: digest(value) for name, value in plain.items()}, digest(random)))
    differing = {n for n in plain if len({digests[n] for digests, _ in found if n in digests}) > 1}
    if differing:
        own["buffers"] = {name: plain[name].to("cpu") for name in sorted(differing)}
    facts: dict[str, Any] = {
        "world_size": strategy.world_size,
        "optimizers": optimizers,
        "same_random_state": len({drawn for _, drawn in found}) == 1,
    }
    if optimizers is not None:
        own["random"] = random
        if passes := pass_states(strategy.lightning_module.trainer):
            own["passes"] = passes
        facts["loaders"] = _take_positions(strategy, checkpoint)
    checkpoint[FACTS] = {**checkpoint.get(FACTS, {}), **facts}
    return own


def _take_positions(strategy: Any, checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """Take the positions of our dataloaders out of Lightning's entry, which plain Lightning could not use."""
    entry = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states = entry.pop("combined_loader", [])
    loaders = stateful_loaders(strategy.lightning_module.trainer)
    ours = [isinstance(loader, PositionedLoader) for loader in loaders]
    if len(ours) != len(states):
        ours = [False] * len(states)
    if theirs := [state for state, is_ours in zip(states, ours, strict=True) if not is_ours]:
        entry["combined_loader"] = theirs
    return states if any(ours) else []


def _put_positions_back(checkpoint: dict[str, Any]) -> None:
    if states := checkpoint.get(FACTS, {}).get("loaders"):
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = states


def _accumulated(strategy: Any) -> dict[str, Tensor]:
    """The gradients of a step of the optimizer that is not complete yet."""
    module = strategy.lightning_module
    trainer = module.trainer
    progress = trainer.fit_loop.epoch_loop.batch_progress
    current = progress.current
    if trainer.state.fn != TrainerFn.FITTING or not module.automatic_optimization or progress.is_last_batch:
        return {}
    if current.processed % trainer.accumulate_grad_batches == 0:
        return {}
    if current.started > current.processed:
        rank_zero_warn(
            f"this checkpoint is saved inside a training step, with the gradients of"
            f" {current.processed % trainer.accumulate_grad_batches} of"
            f" accumulate_grad_batches={trainer.accumulate_grad_batches} batches accumulated: they are not saved,"
            " because they may hold a part of the present batch; a resumed run makes its next step without them"
        )
        return {}
    names = parameter_names(module)
    return {name: p.grad.detach().to("cpu") for p, name in names.items() if p.grad is not None}


# Loading


def restore_folder(strategy: Any, folder: SavedFolder, checkpoint: dict[str, Any]) -> None:
    """Load model, optimizers and the state of this rank from a folder, saved on any layout. Collective.

    Args:
        strategy: The strategy, set up.
        folder: The folder.
        checkpoint: Its metadata; it is changed to what Lightning expects.

    Raises:
        CheckpointError: On every rank, if the folder does not fit the model or its optimizers; the message names what.
    """
    module, ranks = strategy.lightning_module, ranks_of(strategy)
    saved = _saved(folder)
    facts = checkpoint.get(FACTS, {})
    key = MODEL if MODEL in saved else _LIGHTNINGS_MODEL
    with ranks.failing_together(f"loading {folder.path}"):
        count = _count_optimizers(strategy, facts, {**saved, **checkpoint}, str(folder.path))
    model = _model_room(strategy, saved.get(key, {}))
    folder.check(_shapes(model), f"{key}.", strict=module.strict_loading)
    room: dict[str, Any] = {key: {name: value for name, value in model.items() if name in saved[key]}}
    for index, optimizer in enumerate(strategy.optimizers[:count]):
        if (stored := saved.get(f"optimizer_{index}")) is not None:
            state = empty_state(module, optimizer, stored.get("state", {}), strategy.root_device)
            rest = {name: map_leaves(value, _cpu_room) for name, value in stored.items() if name != "state"}
            room[f"optimizer_{index}"] = {**rest, "state": state}
    mine = _rank_to_read(strategy, facts, saved.get("ranks", {}))
    if mine is not None:
        entries = saved["ranks"][mine]
        wanted = entries if _fitting(strategy) else {n: v for n, v in entries.items() if n == "buffers"}
        room["ranks"] = {mine: map_leaves(wanted, _cpu_room)}
    if _fitting(strategy) and "gradients" in saved:
        named = {name: p for p, name in parameter_names(module).items()}
        room["gradients"] = {n: torch.empty_like(named[n].detach()) for n in saved["gradients"] if n in named}
    folder.read(room)
    own = {} if mine is None else room["ranks"].get(mine, {})
    empty = {name: value for name, value in model.items() if isinstance(value, Mapping) and not value}
    _set_model(strategy, {**empty, **room[key]}, own.get("buffers", {}), facts, str(folder.path))
    for index in range(count):
        stored = room.get(f"optimizer_{index}") or checkpoint[f"optimizer_{index}"]
        _set_optimizer(strategy, index, stored, str(folder.path))
    for index in range(facts.get("optimizers") or 0):
        checkpoint.pop(f"optimizer_{index}", None)
    _set_rest(strategy, checkpoint, own, room.get("gradients", {}))


def restore_whole(strategy: Any, checkpoint: dict[str, Any], what: str) -> None:
    """Load model, optimizers and the state of this rank from a single file. Collective.

    Args:
        strategy: The strategy, set up.
        checkpoint: The content of the file, mapped into memory rather than read: every rank takes its own part. It may
            be from a plain Trainer. It is changed to what Lightning expects.
        what: The file, for messages.

    Raises:
        CheckpointError: On every rank, if the file does not fit the model or its optimizers; the message names what.
    """
    module, ranks = strategy.lightning_module, ranks_of(strategy)
    facts = checkpoint.get(FACTS, {})
    with ranks.failing_together(f"loading {what}"):
        if not isinstance(checkpoint.get(_LIGHTNINGS_MODEL), Mapping):
            raise CheckpointError(f"{what} is no checkpoint of a Trainer: it has no 'state_dict'")
        states = checkpoint.get("optimizer_states")
        numbered = {f"optimizer_{index}": state for index, state in enumerate(states or [])}
        count = _count_optimizers(strategy, {"optimizers": len(numbered) if states is not None else None}, {}, what)
    saved = checkpoint.pop(_LIGHTNINGS_MODEL)
    model = _model_room(strategy, map_leaves(saved, _facts_of))
    found = {name: tuple(value.shape) for name, value in saved.items() if isinstance(value, Tensor)}
    check_tensors(what, _shapes(model), found, ranks, strict=module.strict_loading)
    present = {name: value for name, value in model.items() if name in saved}
    for name, value in present.items():
        if isinstance(value, Tensor):
            own = value.to_local() if isinstance(value, DTensor) else value
            own.copy_(shard_like(saved[name], value, local=True))
        else:
            present[name] = saved[name]
    mine = _rank_to_read(strategy, facts, checkpoint.get("ranks", {}))
    own = {} if mine is None else checkpoint["ranks"][mine]
    _set_model(strategy, present, own.get("buffers", {}), facts, what)
    checkpoint.pop("optimizer_states", None)
    for index in range(count):
        positions = names_by_position(module, strategy.optimizers[index])
        with ranks.failing_together(f"loading {what}"):
            named = by_name(
                numbered[f"optimizer_{index}"], positions, f"optimizer {index} of {what}", FACTS in checkpoint
            )
            stored = {**named, "state": _shards(strategy, named["state"])}
        _set_optimizer(strategy, index, stored, what)
    gradients = checkpoint.pop("gradients", {}) if _fitting(strategy) else {}
    _set_rest(strategy, checkpoint, own, _shards(strategy, gradients))
    checkpoint.pop("ranks", None)


def ranks_of(strategy: Any) -> Ranks:
    """The ranks of a strategy."""
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() and strategy.world_size > 1 else None
    return Ranks(strategy.global_rank, strategy.world_size, group)


def _fitting(strategy: Any) -> bool:
    return strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING


def _saved(folder: SavedFolder) -> dict[str, Any]:
    """What a folder has, nested, with :class:`TensorFacts` for tensors and ``None`` for other values."""
    nested: dict[str, Any] = {}
    for name, path in (folder.metadata.planner_data or {}).items():
        info = folder.tensors.get(name)
        set_element(nested, path, None if info is None else TensorFacts(torch.Size(info.shape), info.dtype))
    return nested


def _count_optimizers(strategy: Any, facts: Mapping[str, Any], entries: Mapping[str, Any], what: str) -> int:
    """How many optimizers are to be restored.

    Raises:
        CheckpointError: If the checkpoint has none or another number of them.
    """
    if not _fitting(strategy):
        return 0
    number = len(strategy.optimizers)
    saved = facts["optimizers"] if "optimizers" in facts else sum(f"optimizer_{i}" in entries for i in range(number))
    if saved is None or (saved == 0 and number):
        raise CheckpointError(
            f"{what} holds the weights of a model alone (ModelCheckpoint(save_weights_only=True) writes such ones), so"
            " no run can go on from it; resume from a whole checkpoint, or load the weights before fit() and leave out"
            " ckpt_path"
        )
    if saved != number:
        raise CheckpointError(
            f"{what} has the state of {saved} optimizers, and configure_optimizers() returns {number} now; return"
            " those of the saved run"
        )
    return number


def _model_room(strategy: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the model itself; room for what modules hold outside of parameters and buffers."""
    model: dict[str, Any] = dict(get_model_state_dict(strategy.lightning_module))
    for name, value in model.items():
        # What torch.distributed.checkpoint has of an empty dictionary is nothing.
        if name.endswith("_extra_state") and name in saved:
            model[name] = map_leaves(saved[name], _cpu_room)
        elif not isinstance(value, Tensor) and name in saved:
            model[name] = None
    return model


def _shapes(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.items() if isinstance(value, Tensor)}


def _set_model(
    strategy: Any, model: dict[str, Any], buffers: Mapping[str, Tensor], facts: Mapping[str, Any], what: str
) -> None:
    if buffers:
        if facts["world_size"] != strategy.world_size:
            rank_zero_warn(
                f"{what} has buffers that differed between its {facts['world_size']} ranks ({listed(set(buffers))});"
                f" each of the {strategy.world_size} ranks now takes those of one of them"
            )
        model.update(buffers)
    options = StateDictOptions(strict=strategy.lightning_module.strict_loading)
    set_model_state_dict(strategy.lightning_module, model, options=options)


def _set_optimizer(strategy: Any, index: int, stored: Mapping[str, Any], what: str) -> None:
    module, optimizer = strategy.lightning_module, strategy.optimizers[index]
    positions = names_by_position(module, optimizer)
    if not any(config.scheduler.optimizer is optimizer for config in strategy.lr_scheduler_configs):
        for group in optimizer.param_groups:
            group.pop("initial_lr", None)  # of a schedule that is gone, as that of a LearningRateFinder
    with ranks_of(strategy).failing_together(f"loading {what}"):
        load_named_optimizer_state(
            module, optimizer, stored, positions, f"optimizer {index} of {what}", module.strict_loading
        )


def _shards(strategy: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of whole tensors by the name of the parameter."""
    parameters = {name: p for p, name in parameter_names(strategy.lightning_module).items()}
    return {
        name: map_leaves(values, partial(shard_like, like=parameters[name]))
        for name, values in saved.items()
        if name in parameters
    }


def _rank_to_read(strategy: Any, facts: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Whose state this rank takes."""
    if not saved:
        return None
    if facts.get("same_random_state") and facts["world_size"] != strategy.world_size:
        return "0"
    rank = str(strategy.global_rank % facts["world_size"])
    return rank if rank in saved else None


def _set_rest(
    strategy: Any, checkpoint: dict[str, Any], own: Mapping[str, Any], gradients: Mapping[str, Tensor]
) -> None:
    """Note what is given back when training begins."""
    if not _fitting(strategy):
        return
    facts = checkpoint.get(FACTS, {})
    _put_positions_back(checkpoint)
    resumption = strategy.resumption
    resumption.gradients = dict(gradients)
    if "random" not in own:
        return
    resumption.random, resumption.passes = own["random"], dict(own.get("passes", {}))
    number = strategy.global_rank // facts["world_size"]
    if number and not facts["same_random_state"]:
        resumption.random = derived_random_state(own["random"], number, strategy.root_device)


def _facts_of(value: Any) -> Any:
    return TensorFacts(value.shape, value.dtype) if isinstance(value, Tensor) else None


def _cpu_room(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, TensorFacts) else None
