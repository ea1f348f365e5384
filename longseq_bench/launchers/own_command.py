"""The trials that a node's own command may run, to check the orders of node 0 against.

A search chooses lengths and repetitions as it goes, and node 0 chooses a default memory budget.
Everything else of a trial follows from the command: a node starts no trial that differs in it.
"""

from collections.abc import Callable, Sequence

from typing_extensions import override

from longseq_bench.core.catalogue import Catalogue
from longseq_bench.core.errors import UserError
from longseq_bench.core.model import Trial
from longseq_bench.launchers.local import LocalLauncher

CHOSEN_BY_SWEEP = frozenset({"round", "memory_budget"})
CHOSEN_BY_SEARCH = CHOSEN_BY_SWEEP | {"seq_len", "repeats", "fit_only", "time_budget"}
SPARSITY = "sparsity"


class OwnCommand:
    """The command of this node.

    plan: returns the trials of the command, with the catalogue of this host.
    chosen: fields of a trial that node 0 may choose. Of the options only `sparsity` can be one.
    """

    def __init__(
        self, plan: Callable[[Catalogue], Sequence[Trial]], chosen: frozenset[str]
    ) -> None:
        self._plan, self._chosen = plan, chosen
        self._allowed: dict[tuple[str, str], Trial] = {}
        self._mistake = "this node has not read its own command yet"

    def read(self, catalogue: Catalogue) -> None:
        """Plan the trials. After a user's mistake every order is refused with it."""
        if self._allowed:
            return
        try:
            self._allowed = {self._identify(trial): trial for trial in self._plan(catalogue)}
            self._mistake = ""
        except UserError as error:
            self._mistake = str(error)

    def refusal(self, trial: Trial) -> str:
        """Return how a trial differs from those of this node's command, or an empty string."""
        if self._mistake:
            return f"the command can't run here: {self._mistake}"
        if self._identify(trial) in self._allowed:
            return ""
        nearest = min((self._differences(trial, own) for own in self._allowed.values()), key=len)
        return f"the trial is not in this node's command: {'; '.join(nearest)}"

    def _identify(self, trial: Trial) -> tuple[str, str]:
        """Return the key of a trial, and the label that it leaves out."""
        return self._fixed(trial).key, trial.workload.model

    def _fixed(self, trial: Trial) -> Trial:
        """Return the trial with a constant for each field that node 0 may choose."""
        values = {
            "round": 0, "memory_budget": None, "repeats": 0, "fit_only": False, "time_budget": None,
        }  # fmt: skip
        update: dict[str, object] = {n: v for n, v in values.items() if n in self._chosen}
        if SPARSITY in self._chosen:
            update["options"] = {n: v for n, v in trial.options.items() if n != SPARSITY}
        changed = trial.model_copy(update=update)
        return changed.at(1) if "seq_len" in self._chosen else changed

    def _differences(self, trial: Trial, own: Trial) -> list[str]:
        """Return a text for each field with which a trial differs from an own one."""
        there, here = (
            {**flat, **flat.pop("workload")}
            for flat in (self._fixed(one).model_dump(mode="json") for one in (trial, own))
        )
        return [
            f"{name} is {str(value)[:100]}, here {str(here[name])[:100]}"
            for name, value in there.items()
            if value != here[name]
        ]


class PlannedTrials(Exception):
    """Ends a command when it has planned its trials, before it runs any."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        super().__init__()
        self.trials = tuple(trials)


class PlanningLauncher(LocalLauncher):
    """A launcher whose `check` raises PlannedTrials: it runs nothing."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__()
        self._catalogue = catalogue

    @override
    def check(self, trials: Sequence[Trial]) -> None:
        raise PlannedTrials(trials)
