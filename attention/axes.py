"""Axes of the joint space, the parts on them, and the knobs of each part.

An *axis* is one orthogonal choice (how heads are fused, how they are grouped, ...). A *part* is one
option on an axis: a function with a citation, in a file of the axis' package. A *knob* is a
parameter of a part, declared once; the search space, the config check and the docs derive from that
declaration.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from attention.base.messages import did_you_mean, one_of

F = TypeVar("F", bound=Callable[..., Any])
KINDS = ("int", "float", "log_float", "choice", "bool")
AUTO_KNOB = "auto"
"""A setting of a knob whose value is then derived from the model or the machine (`Knob.auto`)."""
_IN_WORDS = {"int": "a whole number", "float": "a number", "log_float": "a number"}


@dataclass(frozen=True)
class Knob:
    """One parameter of a part.

    Attributes:
        name: Name of the parameter of the part's function.
        kind: "int", "float", "log_float" (sampled on a logarithmic scale), "choice" or "bool".
        doc: What the knob does, in one line of help.
        low: Smallest value, inclusive.
        high: Largest value, inclusive.
        choices: Allowed values of a "choice".
        searched: Whether a search varies the knob or leaves it at its default.
        default: That of the function's parameter (see `of`); given here only for a knob that
            functions of several packages share.
        auto: Whether the knob may also be `AUTO_KNOB`, for which the part finds the value itself.
    """

    name: str
    kind: str
    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    searched: bool = False
    default: Any = inspect.Parameter.empty
    auto: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"knob {self.name}: kind must be one of {KINDS}, got {self.kind!r}")
        if self.kind == "choice" and not self.choices:
            raise ValueError(f"knob {self.name}: a choice needs choices")
        if self.default is not inspect.Parameter.empty:
            self.check(self.default)

    def of(self, functions: Sequence[Callable[..., Any]]) -> Knob:
        """Return this knob with the default of the first of these functions that has its parameter.

        Raises:
            ValueError: If no function has one, or if the knob also states its own default.
        """
        empty = inspect.Parameter.empty
        named = (inspect.signature(function).parameters.get(self.name) for function in functions)
        declared = next((parameter.default for parameter in named if parameter is not None), empty)
        if (declared is empty) == (self.default is empty):
            names = [function.__name__ for function in functions]
            raise ValueError(
                f"knob {self.name}: its default must stand once, in the signature of one of {names}"
            )
        return self if declared is empty else replace(self, default=declared)

    def check(self, value: Any) -> Any:
        """Return `value` if it is allowed.

        Raise ValueError naming the knob, the value and what is allowed.
        """
        if self.auto and value == AUTO_KNOB:
            return value
        if self.kind == "choice":
            if value not in self.choices:
                raise ValueError(one_of(self.name, self.choices, value))
            return value
        if self.kind == "bool":
            if not isinstance(value, bool):
                raise ValueError(f"{self.name} must be true or false, got {value!r}")
            return value
        expected = int if self.kind == "int" else (int, float)
        if isinstance(value, bool) or not isinstance(value, expected):
            or_auto = f" or {AUTO_KNOB!r}" if self.auto else ""
            raise ValueError(f"{self.name} must be {_IN_WORDS[self.kind]}{or_auto}, got {value!r}")
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if not low <= value <= high:  # nor a NaN
            raise ValueError(f"{self.name} must lie in [{self.low}, {self.high}], got {value!r}")
        return value


@dataclass(frozen=True)
class Part:
    """One option on an axis: a function, its source, and its knobs."""

    axis: str
    name: str
    function: Callable[..., Any]
    source: str
    knobs: tuple[Knob, ...] = ()
    needs: frozenset[str] = frozenset()

    def settings(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the values of all knobs, defaults filled in.

        Raises:
            ValueError: For an unknown knob or a value out of range.
        """
        values = dict(values or {})
        knobs = {knob.name: knob for knob in self.knobs}
        unknown = sorted(set(values) - set(knobs))
        if unknown:
            raise ValueError(
                f"{self.axis}={self.name} has no setting {unknown[0]!r}"
                f"{did_you_mean(unknown[0], knobs)}; "
                f"it has "
                f"{sorted(knobs) or 'none'}"
            )
        try:
            return {
                name: knob.check(values.get(name, knob.default)) for name, knob in knobs.items()
            }
        except ValueError as error:
            raise ValueError(f"{self.axis}.{error}") from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass
class Axis:
    """A named collection of parts. `package` is where its parts live, one file each."""

    name: str
    package: str
    _parts: dict[str, Part] = field(default_factory=dict)
    _discovered: bool = False

    def part(
        self,
        name: str,
        *,
        source: str,
        knobs: tuple[Knob, ...] = (),
        needs: tuple[str, ...] = (),
        passes_to: Callable[..., Any] | None = None,
    ) -> Callable[[F], F]:
        """Return a decorator that registers a function on this axis.

        Args:
            name: Name of the part.
            source: Paper, section, equation.
            knobs: Parameters of the function; their defaults are those of its signature.
            needs: What the function needs beyond the weights, e.g. "statistics" (a calibration).
            passes_to: The function that receives `**knobs`, if its signature has the defaults.
        """

        def add(function: F) -> F:
            if name in self._parts:
                raise ValueError(f"axis {self.name} already has a part named {name!r}")
            with_defaults = tuple(
                knob.of((function, *filter(None, (passes_to,)))) for knob in knobs
            )
            self._parts[name] = Part(
                self.name, name, function, source, with_defaults, frozenset(needs)
            )
            return function

        return add

    def discover(self) -> None:
        """Import every module of the axis' package, so that each part registers itself."""
        if self._discovered:
            return
        self._discovered = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")

    def get(self, name: str) -> Part:
        """Return the part of that name.

        Raises:
            ValueError: If there is none.
        """
        self.discover()
        if not isinstance(name, str) or name not in self._parts:
            raise ValueError(one_of(self.name, sorted(self._parts), name))
        return self._parts[name]

    def names(self) -> list[str]:
        """Return the names of all parts, sorted."""
        self.discover()
        return sorted(self._parts)

    def __iter__(self) -> Iterator[Part]:
        return (self.get(name) for name in self.names())


ALIGNMENT = Axis("alignment", "attention.conversion.alignment")
FUSION = Axis("fusion", "attention.conversion.fusion")
REFINEMENT = Axis("refinement", "attention.conversion.refinement")
