"""The messages of the control channel as models: what does not fit one ends the connection.

Identity       N -> 0  the first message of a node
Welcome        0 -> N  the answer to it, or Refusal
NODE_MESSAGES  N -> 0  afterwards
ORDERS         0 -> N  afterwards

Their order is described in elastic.py, the events in host_agent.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from longseq_bench.core.model import Outcome, Phase, Status, Trial

M = TypeVar("M")

MAX_TEXT = 2**16
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
Host = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
Token = Annotated[str, StringConstraints(max_length=100, pattern=r"^[\w-]+$")]
Rank = Annotated[int, Field(ge=0, lt=2**20)]
TimeNs = Annotated[int, Field(ge=0, lt=2**63)]


class MalformedMessageError(ValueError):
    """A message that is not one of the protocol."""


class Message(BaseModel):
    """A message, or a part of one."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# ---- joining -----------------------------------------------------------------------------------


class NodeIdentity(Message):
    """The identity of a node, the first message that it sends.

    token: distinguishes a node that connects again from another one with the same node rank.
    must_match: values that must be equal on all nodes, by their name in error messages.
    """

    node: Rank
    host: Host
    token: Token
    must_match: dict[Text, Text] = Field(default_factory=dict, max_length=1000)

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"

    def differences(self, other: NodeIdentity) -> str:
        """Return what differs between two nodes, or an empty string."""
        own, others = self.must_match, other.must_match
        return "; ".join(
            f"{name} is {own.get(name)} on {self} and {others.get(name)} on {other}"
            for name in {**own, **others}
            if own.get(name) != others.get(name)
        )


class Refusal(Message):
    """Node 0 refuses a node that knows the key."""

    refused: Text


# ---- from a node to node 0 ---------------------------------------------------------------------


class Heartbeat(Message):
    """From both ends. heartbeat: the sender's clock, ns since 1970."""

    heartbeat: TimeNs


class Ready(Message):
    """Torch is loaded. ready: the devices of the host."""

    ready: dict[Text, Text]


class Unavailable(Message):
    """The node can't run trials; the reason."""

    unavailable: Text


class Interrupted(Message):
    """Ctrl-C on the node."""

    interrupted: Literal[True]


class Started(Message):
    """The ranks of the host run."""

    started: Literal[True]


class PhaseReport(Message):
    """A rank entered a phase."""

    phase: Phase
    part: Text


class OutcomeReport(Message):
    """A rank's outcome, and when it ended."""

    outcome: Outcome
    at: TimeNs


class RankReport(Message):
    """A message of a rank."""

    rank: Rank
    message: PhaseReport | OutcomeReport


class RankExit(Message):
    """A rank exited. killed: the kernel's out-of-memory killer was active."""

    rank: Rank
    exit: Annotated[int, Field(gt=-(2**16), lt=2**16)]
    printed: Text
    killed: bool
    at: TimeNs


class RankLostPeer(Message):
    """A rank was ended because of a peer."""

    rank: Rank
    lost_peer: Text
    at: TimeNs


class Failed(Message):
    """The ranks of the host that have no outcome failed.

    environment: another process ended them, which is no fault of the trial.
    """

    failed: Text
    environment: bool = False


Event: TypeAlias = Started | RankReport | RankExit | RankLostPeer | Failed


class NodeEvent(Message):
    """An event of a node's ranks."""

    run_id: Token
    event: Event


class Inspection(Message):
    """Samples and stacks of ranks that are late, by rank."""

    samples: dict[Rank, tuple[bool, Annotated[float, Field(ge=0, allow_inf_nan=False)]]]
    stacks: dict[Rank, list[Text]]


class NodeInspection(Message):
    """The answer to an InspectOrder."""

    run_id: Token
    inspection: Inspection


class NodeOrphans(Message):
    """The answer to an EndOrder: processes that the ranks left."""

    run_id: Token
    orphans: list[Text]


NodeMessage: TypeAlias = (
    Heartbeat | Ready | Unavailable | Interrupted | NodeEvent | NodeInspection | NodeOrphans
)


# ---- from node 0 to a node ---------------------------------------------------------------------


class Job(Message):
    """The fields of a HostJob (host_agent.py)."""

    run_id: Token
    trial: Trial
    nodes: Annotated[int, Field(ge=1, lt=2**20)]
    ranks_per_node: Annotated[int, Field(ge=1, lt=2**20)]
    host: Host
    port: Annotated[int, Field(ge=1, lt=2**16)]
    timeout_s: Annotated[float, Field(gt=0, le=1e7)]
    node: Rank
    address: Host


class StartOrder(Message):
    """Start the ranks of a trial."""

    start: Job


class InspectOrder(Message):
    """Inspect the ranks of this run, which are late."""

    inspect: Token


class Summary(Message):
    """A trial's outcome, for the node to show."""

    status: Status
    reason: str | None


class EndOrder(Message):
    """End the ranks of this run."""

    end: Token
    outcome: Summary | None


class Shutdown(Message):
    """The launch is over; the reason, if there is one."""

    shutdown: str
    interrupted: bool


Order: TypeAlias = Heartbeat | StartOrder | InspectOrder | EndOrder | Shutdown

IDENTITY: TypeAdapter[NodeIdentity] = TypeAdapter(NodeIdentity)
WELCOME: TypeAdapter[NodeIdentity | Refusal] = TypeAdapter(NodeIdentity | Refusal)
NODE_MESSAGES: TypeAdapter[NodeMessage] = TypeAdapter(NodeMessage)
ORDERS: TypeAdapter[Order] = TypeAdapter(Order)
EVENTS: TypeAdapter[Event] = TypeAdapter(Event)


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as JSON. A lone surrogate, which UTF-8 does not have, becomes "?"."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")


def decode(data: bytes, kind: TypeAdapter[M]) -> M:
    """Return the message in JSON data. Raises MalformedMessageError with one sentence."""
    try:
        return kind.validate_json(data)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # of the members of a union, the one that fits best goes deepest
        deepest = max(errors, key=lambda one: len(one["loc"]))
        place = ".".join(map(str, deepest["loc"]))
        text = f"it sent a message that can't be read ({place}: {deepest['msg']})"
        raise MalformedMessageError(text[:300]) from None
