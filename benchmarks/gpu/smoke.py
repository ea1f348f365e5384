"""Step smoke: `longseq doctor`."""

import json
from collections.abc import Sequence
from functools import partial

from benchmarks.gpu.items import Figures, Item, ItemFailed, Session, Step, plain_table
from benchmarks.gpu.processes import longseq


def list_items(session: Session) -> Sequence[Item]:
    """Return the one item."""
    return [Item("doctor", partial(run_doctor, session))]


def run_doctor(session: Session) -> Figures:
    """Run `longseq doctor --json`; a missing part, or a CUDA device that it can't use, fails."""
    done = longseq(["doctor", "--json"], limit := session.seconds_left())
    if done.late:
        raise session.cut("longseq doctor did not end", limit)
    if done.code:
        raise ItemFailed(f"longseq doctor ended with {done.code}: {done.errors[-1000:]}")
    answer = json.loads(done.out)
    states = {one["name"]: one["state"] for one in answer["findings"]}
    figures = {
        "ok": sum(state == "ok" for state in states.values()), "doctor": answer,
        "notes": ", ".join(name for name, state in states.items() if state == "note") or "none",
    }  # fmt: skip
    bad = [one for one in answer["findings"] if one["state"] == "missing"]
    if session.device == "cuda" and states.get("cuda") != "ok":
        bad += [one for one in answer["findings"] if one["name"] == "cuda"]
    if bad:
        raise ItemFailed("; ".join(f"{one['name']}: {one['found']}" for one in bad), figures)
    return figures


STEP = Step("smoke", list_items, plain_table)
