"""All that a joint space can propose, decision by decision, as a sampler sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from search_spaces.space.domains import Domain, SpacePoint
from search_spaces.space.joint_space import JointSpace

Path = tuple[tuple[Domain, Any], ...]


def paths(space: JointSpace, taken: Path = ()) -> Iterator[Path]:
    """Every way through the decisions, with the earlier decisions of each; knobs take their defaults."""
    domain = space.next({done.name: value for done, value in taken})
    if domain is None:
        yield taken
        return
    for option in (domain.default,) if "." in domain.field else domain.choices:
        yield from paths(space, (*taken, (domain, option)))


def points(space: JointSpace) -> list[SpacePoint]:
    """Every valid combination of choices, knobs left open."""
    return [{d.name: value for d, value in path if "." not in d.field} for path in paths(space)]


def domains(space: JointSpace) -> set[Domain]:
    """Every decision that can come up."""
    return {domain for path in paths(space) for domain, _ in path}
