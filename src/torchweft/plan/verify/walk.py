"""The walk: all lanes of all ranks gone through once, in an order that lanes and waits allow.

A plan without races has one result whatever the speeds, so one walk is enough: it keeps a clock a
lane (how far every other lane is known to have come: a vector clock) and checks each access to each
cell against the clocks of the earlier ones. Waits and collectives only ever let lanes go on, so if
this walk gets stuck, every run does: a deadlock.

A clock counts events: the step at position p of its lane starts with event 2p - 1, ends with 2p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchweft.plan.plan import Plan, Step, bracket, pairs_of
from torchweft.plan.verify.cells import Access, Clock
from torchweft.plan.verify.coverage import Finding
from torchweft.plan.verify.touch import Channel, Rank, TalkWalk


@dataclass(slots=True, eq=False)
class LaneWalk:
    """How far one lane of one rank has come."""

    number: int
    rank: Rank
    name: str
    steps: list[int]
    clock: Clock
    at: int = 0
    begun: bool = False
    talks: list[TalkWalk] = field(default_factory=list)


class Walk:
    """Walks through all ranks' plans and collects findings."""

    def __init__(self, plans: Sequence[Plan], findings: list[Finding]) -> None:
        self.findings = findings
        self.ranks = [Rank(number, plan, findings) for number, plan in enumerate(plans)]
        rows: dict[tuple[int, str], list[int]] = {}
        for rank in self.ranks:
            for index, step in enumerate(rank.plan.steps):
                rows.setdefault((rank.number, step.lane), []).append(index)
        self.lanes = [
            LaneWalk(number, self.ranks[rank], name, steps, [0] * len(rows))
            for number, ((rank, name), steps) in enumerate(rows.items())
        ]

    def go(self) -> None:
        """Walk to the end, or until nothing can move."""
        stood: list[tuple[int, bool]] = []
        while stood != (stand := [(lane.at, lane.begun) for lane in self.lanes]):
            stood = stand
            for lane in self.lanes:
                while lane.at < len(lane.steps) and self.advance(lane):
                    pass
        if stuck := [lane for lane in self.lanes if lane.at < len(lane.steps)]:
            self.deadlock(stuck)
            return
        for rank in self.ranks:
            rank.finish()

    def advance(self, lane: LaneWalk) -> bool:
        """Take the lane's next step if it can go on; whether it did."""
        rank, index = lane.rank, lane.steps[lane.at]
        step, label = rank.plan.steps[index], rank.labels[index]
        if step.kind == "wait" and not self.wait(lane, step, index):
            return False
        if step.kind == "complete" and (step.names, step.parts) not in rank.flying:
            return False
        if not lane.begun:
            lane.clock[lane.number] = 2 * lane.at + 1
            lane.begun = True
            self.begin(lane, step, index)
        if lane.talks and not self.heard(lane, index):
            return False
        lane.begun = False
        lane.at += 1
        lane.clock[lane.number] = 2 * lane.at
        if index in rank.targets:
            rank.ends[label] = list(lane.clock)
        return True

    def wait(self, lane: LaneWalk, step: Step, index: int) -> bool:
        """Whether the step that is waited for has ended; then its clock is the lane's too."""
        assert step.target is not None, "a wait has a target"
        ended = lane.rank.ends.get(step.target)
        if ended is None:
            if step.target in lane.rank.labels:
                return False
            text = f"{step} waits for a step that is not in the plan."
            self.report(lane, "deadlock", text, index)
            return True
        _merge(lane.clock, ended)
        return True

    def begin(self, lane: LaneWalk, step: Step, index: int) -> None:
        """Start a step: check what it touches."""
        end = 2 * lane.at + 2
        if step.kind in ("run", "issue"):
            flying = step.kind == "issue"
            access = Access(index, lane.number, 0 if flying else end)
            self.come_after(lane, step, index)
            pairs = pairs_of(lane.rank.graph, lane.rank.plan.num_parts, step.names, step.parts)
            lane.rank.runs |= dict.fromkeys(pairs, access)
            talks = self.talk(lane, step, index)
            lane.rank.run(step, access, lane.clock)
            if flying:
                known = list(lane.clock)
                known[lane.number] = end
                lane.rank.flying[step.names, step.parts] = (access, known, talks)
            else:
                lane.talks = talks
        elif step.kind == "complete":
            access, known, talks = lane.rank.flying[step.names, step.parts]
            _merge(lane.clock, known)
            lane.talks = talks + self.talk(lane, step, index)  # a kernel may talk here too
            access.lane, access.end = lane.number, end
        elif step.kind != "wait":
            access = Access(index, lane.number, end)
            lane.rank.move(step, access, lane.clock)

    def come_after(self, lane: LaneWalk, step: Step, index: int) -> None:
        """Check the edges of a step that starts: what it comes after has ended."""
        rank = lane.rank
        for name, parts in step.after:
            for pair in pairs_of(rank.graph, rank.plan.num_parts, (name,), parts):
                earlier = rank.runs.get(pair)
                if earlier is None or not earlier.before(lane.clock):
                    text = f"nothing orders {step.label} behind {name}{bracket(parts)}, which it "
                    text += "is to come after."
                    cure = f"Run lower(plan), or let lane {lane.name!r} wait for it."
                    self.report(lane, "order", text, index, cure)
                    break

    def talk(self, lane: LaneWalk, step: Step, index: int) -> list[TalkWalk]:
        """Start the collectives of a step, each behind the last one of its channel."""
        rank, talks = lane.rank, []
        for talk in rank.plan.talks(step):
            # Matched by order: a communicator, or one direction between two of its ranks.
            ends: Channel = () if talk.peer is None else (rank.number, talk.peer)
            channel = (talk.communicator, *(ends if talk.kind == "send" else ends[::-1]))
            says = talk.tag or step.names[0], step.parts
            said = rank.said.setdefault(channel, [])
            if said and lane.clock[said[-1].lane] < said[-1].clock[said[-1].lane]:
                other = rank.labels[said[-1].step]
                where = f"communicator {talk.communicator!r}"
                text = f"nothing orders {step.label} and {other} on {where}."
                cure = "One lane must issue both, or wait for the other."
                self.report(lane, "order", text, index, cure)
            kind = "" if talk.peer is not None else talk.kind
            start = (kind, *says), index, lane.number, list(lane.clock)
            said.append(TalkWalk(channel, len(said), *start))
            talks.append(said[-1])
        return talks

    def heard(self, lane: LaneWalk, index: int) -> bool:
        """Whether all members have started the lane's collectives; then it knows what they knew."""
        if len(self.ranks) > 1:
            peers = []
            for talk in lane.talks:
                for number in self.members(lane.rank, talk):
                    here = self.ranks[number : number + 1]
                    said = here[0].said.get(talk.channel, []) if here else []
                    if len(said) <= talk.number:
                        return False
                    peers.append((talk, number, said[talk.number]))
            for talk, number, other in peers:
                _merge(lane.clock, other.clock)
                if other.says != talk.says and number > lane.rank.number:
                    theirs = self.ranks[number].labels[other.step]
                    mine = lane.rank.labels[talk.step]
                    which = f"collective {talk.number} of {talk.channel[0]!r}"
                    text = f"{which} is {mine}, but {theirs} on rank {number}."
                    self.report(lane, "order", text, talk.step, "All ranks must run one order.")
        lane.talks = []
        return True

    def members(self, rank: Rank, talk: TalkWalk) -> list[int]:
        """The other ranks of a collective."""
        if len(talk.channel) > 1:
            return [number for number in talk.channel[1:] if number != rank.number]  # type: ignore[misc]
        group = rank.graph.members(str(talk.channel[0]), len(self.ranks))
        return [number for number in group if number != rank.number]

    def deadlock(self, stuck: list[LaneWalk]) -> None:
        """One finding that says where every lane stands."""
        lines = []
        for lane in stuck:
            step = lane.rank.plan.steps[lane.steps[lane.at]]
            rank = f"rank {lane.rank.number} " if len(self.ranks) > 1 else ""
            why = f"stands at {step.label}"
            later = [lane.rank.labels[index] for index in lane.steps[lane.at :]]
            if step.kind == "wait" and step.target in later:
                why += ", which stands behind it on the same lane"
            elif step.kind == "complete" and (step.names, step.parts) not in lane.rank.flying:
                why += ", which nothing has issued yet"
            elif step.kind != "wait":
                why += ", a collective that another rank does not start"
            lines.append(f"{rank}lane {lane.name!r} {why}")
        first = stuck[0]
        text = "nothing can go on: " + "; ".join(lines) + "."
        cure = "Break the circle: drop or move a wait."
        self.report(first, "deadlock", text, first.steps[first.at], cure)

    def report(self, lane: LaneWalk, rule: str, text: str, index: int, cure: str = "") -> None:
        self.findings.append(Finding(rule, text, index, cure, lane.rank.number))


def _merge(clock: Clock, other: Clock) -> None:
    for number, event in enumerate(other):
        if event > clock[number]:
            clock[number] = event
