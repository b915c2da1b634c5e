"""Whether the tensors of a checkpoint are those of a model."""

from collections.abc import Iterable, Mapping

from lightning_moe.checkpoint.damage import CheckpointError, Ranks, listed


def check_tensors(
    where: str,
    expected: Mapping[str, Iterable[int]],
    found: Mapping[str, Iterable[int]],
    ranks: Ranks,
    what: str = "the model",
    strict: bool = True,
) -> None:
    """Compare names and shapes. Collective.

    Args:
        where: The checkpoint, for messages.
        expected: Shapes of the whole tensors that this rank has, by name. Ranks may have different ones.
        found: Shapes of those in the checkpoint, the same on every rank.
        ranks: The ranks.
        what: What the expected tensors belong to, for messages.
        strict: Whether a tensor that only one side has is an error.

    Raises:
        CheckpointError: On every rank alike, naming the tensors that are missing, unexpected or of another shape.
    """
    missing = {name for name in expected if name not in found}
    unexpected = {name for name in found if name not in expected}
    differing = {
        f"{name} {tuple(found[name])} instead of {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    }
    told = ranks.gather((missing, unexpected, differing))
    problems = []
    if missing := set().union(*(of_rank[0] for of_rank in told)):
        problems.append(f"{len(missing)} missing ({listed(missing)})")
    # Of tensors that exist on one rank each, every rank misses those of the others.
    if unexpected := set.intersection(*(of_rank[1] for of_rank in told)):
        problems.append(f"{len(unexpected)} unexpected ({listed(unexpected)})")
    if not strict:
        problems = []
    if differing := set().union(*(of_rank[2] for of_rank in told)):
        problems.append(f"{len(differing)} of another shape ({listed(differing)})")
    if problems:
        raise CheckpointError(
            f"{where} is not of {what} that is to be loaded: {'; '.join(problems)}; build the model as it was when the"
            " checkpoint was saved"
        )
