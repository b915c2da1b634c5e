"""Options whose values are names of parts: which there are, which are usable here, and why the others are not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """One part that can be chosen by name.

    Attributes:
        build: Makes one.
        unusable: Says why it is not usable here in one line, or nothing where it is.
    """

    build: Callable[[], T]
    unusable: Callable[[], str] = lambda: ""


class Choices(Generic[T]):
    """The parts that an option chooses from; ``"auto"`` is left to the caller.

    Args:
        option: Name of the option, for messages.
        choices: The parts by name.
        also: What the option takes besides names, for messages.
    """

    def __init__(self, option: str, choices: Mapping[str, Choice[T]], also: str = "") -> None:
        self.option = option
        self.choices = choices
        self.also = also

    def options(self) -> dict[str, str]:
        """For each name an empty string where it is usable here, else the reason in one line."""
        return {name: choice.unusable() for name, choice in self.choices.items()}

    def check(self, name: str) -> None:
        """Check a name without building anything.

        Raises:
            ValueError: If there is no part of that name.
            RuntimeError: If it is not usable here; the message holds the reason.
        """
        if name == "auto":
            return
        if not isinstance(name, str) or name not in self.choices:
            allowed = ", ".join(map(repr, ("auto", *self.choices)))
            raise ValueError(f"{self.option}={name!r} is not known; allowed are {allowed}{self.also}")
        reason = self.choices[name].unusable()
        if reason:
            usable = ", ".join(repr(other) for other, problem in self.options().items() if not problem)
            raise RuntimeError(
                f"{self.option}={name!r} is not usable here: {reason}. Usable are 'auto', {usable};"
                " `lightning-moe doctor` lists them all"
            )

    def build(self, name: str) -> T:
        """Make the part of a name that :meth:`check` accepts and that is not ``"auto"``."""
        self.check(name)
        return self.choices[name].build()
