"""The ranks that run one trial together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """This process among the ranks of a trial: `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @classmethod
    def alone(cls) -> Group:
        """One process, no communication."""
        return cls()
