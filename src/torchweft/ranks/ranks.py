"""Ranks: talks with other processes, agreed before they start and bounded in time.

    channel(name)            a process group as plans use it: a communicator of our own
    .begin(digest, speaker)  at a call's start: tell the others who calls which collectives
    group(name)              before each of them; the first waits until all have told the same
    wait(work)               never longer than the watchdog allows
    .end(last) / .fail(why)  the call is over / the group is dead, and every rank will know

Collectives of a plan do not run on the user's group but on a second one with the same ranks, so
that talk outside of plans cannot get between, nothing waits for longer than our watchdog, and a
rank that fails can take the group down: its peers wake at once, with an error.
"""

from __future__ import annotations

import atexit
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchweft.errors import PlanError, RunError
from torchweft.private.core import _resolve_process_group
from torchweft.ranks.processes import be_polite, has_ended, own_identity, threads
from torchweft.ranks.speakers import Speaker

WATCHDOG_S = 60.0
CONNECT_S = 8.0
NOTICE_S = 1.0
SLICE, SLICE_OVER = timedelta(seconds=1), "Operation timed out!"
REFUSED, EAGER = 0, 1
"""Digests of calls without a plan: one that cannot be done, one that runs the model as it is."""
MENDS, WAITS = re.compile(r"mends (\w+): "), "waits in "
RANKS, NUM_LETTERS = "ranks", 200
Found = TypeVar("Found")


class EagerError(PlanError):
    """Some rank runs its model as it is, and this one has a plan, or the other way round."""


class LostError(Exception):
    """Another rank did not do its share; becomes a `RunError` that names the step.

    channel: where it was waited for, if that is known.
    """

    def __init__(self, text: str, channel: Channel | None = None) -> None:
        super().__init__(text)
        self.channel = channel


def wait(work: Any, name: str = "") -> None:
    """Wait for a c10d work. It ends by itself: done, the peer gone, or after the watchdog.

    In slices, so that Ctrl-C gets through. name: the process group it is of, if that is known.
    """
    while True:
        try:
            work.wait(SLICE)
            return
        except RuntimeError as error:
            if SLICE_OVER not in str(error):
                raise LostError(str(error).splitlines()[0], _channels.get(name)) from error


class Channel:
    """One process group as plans use it, one call at a time."""

    def __init__(self, name: str, user: dist.ProcessGroup, watchdog_s: float) -> None:
        self.name, self.watchdog_s = name, watchdog_s
        self.user = weakref.ref(user, lambda _: self.close())
        self.rank, self.size = user.rank(), user.size()
        self.world = dist.get_process_group_ranks(user)
        self.carried = False  # whether collectives run on the user's group
        self.store: Any = None
        self.peers: dict[int, str] = {}
        self.num_calls = 0
        self.dead = ""
        self.mends = ""  # if dead, the rule by which a new one is opened at the next call
        self.differs = False  # whether all its ranks know that they do not agree on this call
        self.last = ""
        self._busy = threading.Lock()
        self._told: tuple[Any, torch.Tensor] | None = None
        self._speaker: Speaker | None = None
        self._text = ""
        self.roles: weakref.WeakKeyDictionary[Speaker, int] = weakref.WeakKeyDictionary()
        self.num_roles = 0
        self.group: Any = None

    @property
    def title(self) -> str:
        """The group as errors name it."""
        return f"group {self.name!r} (ranks {_listed(self.world)})"

    # A call: begin, agree, end or fail.

    def begin(self, digest: int, speaker: Speaker, text: str) -> None:
        """Tell the other ranks what this call will do. Raises `RunError` on a dead group.

        text: the call as the others read it if they do not agree.
        """
        if self.dead:
            raise RunError(
                f"run: group {self.name!r} is dead: {self.dead}. Make a new process group and "
                "compile the model again."
            )
        if not self._busy.acquire(blocking=False):
            raise RunError(
                f"run: group {self.name!r} is in another call; with collectives there is one "
                "caller at a time, for ranks could not tell whose turn it is."
            )
        self.num_calls, self.differs = self.num_calls + 1, False
        self._speaker, self._text = speaker, f"call {self.num_calls}, {text}"
        speaker.settle(self.roles)
        with torch.inference_mode(False):
            claim, place = speaker.claim(self.roles), speaker.place(self.name)
            mine = torch.tensor([self.num_calls, digest, claim, place])
            told = torch.empty(mine.numel() * self.size, dtype=torch.int64)
        try:
            self._told = (self.group._allgather_base(told, mine), told)
        except RuntimeError as error:
            raise LostError(str(error).splitlines()[0], self) from error

    def agree(self) -> None:
        """Wait until every rank has told its plan. Raises `PlanError`, on all, if they differ."""
        if self._told is None:
            return
        (work, told), self._told = self._told, None
        wait(work, self.name)
        rows = told.view(self.size, -1).tolist()
        _, digest, claim, _ = rows[0]
        assert self._speaker is not None, "only a call that has begun is agreed on"
        if any(row != rows[0] for row in rows) or digest == REFUSED:
            digests, claims = [row[1] for row in rows], [row[2] for row in rows]
            if REFUSED in digests or len(set(digests)) > 1:
                kind = EagerError if EAGER in digests else PlanError
                raise self._disagree(kind, "do not plan the same collectives")
            if len({(number, place) for number, _, _, place in rows}) > 1:
                raise self._disagree(PlanError, "are not at the same place of a call")
            if self._are_swapped(self._speaker, claims):
                raise self._disagree(PlanError, "call different models")
            claim = min((claim for claim in claims if claim > 0), default=-1)
        if claim < 0:
            claim = self.num_roles = self.num_roles + 1
        self.roles[self._speaker] = claim

    def _are_swapped(self, speaker: Speaker, claims: list[int]) -> bool:
        """Whether two ranks have, each, another model for what the other one claims."""
        if len(set(claims)) == 1:
            return False
        mine = [speaker.has_other(claim, self.roles) for claim in claims]
        has_other = self._gather(torch.tensor(mine, dtype=torch.int64)).view(self.size, -1)
        unlike = torch.tensor([[one != other for other in claims] for one in claims])
        return bool((has_other.bool() & has_other.bool().T & unlike).any())

    def _disagree(self, kind: type[PlanError], what: str) -> PlanError:
        """The error of ranks that cannot talk, with what each of them was about to do."""
        role = self.roles.get(self._speaker) if self._speaker is not None else None
        text = f"{self._text} ({f'model {role}' if role else 'new'} of this group)"
        letters = text.encode()[:NUM_LETTERS].ljust(NUM_LETTERS)
        texts = self._gather(torch.frombuffer(bytearray(letters), dtype=torch.uint8))
        lines = [
            f"  rank {self.world[rank]}: {bytes(text.tolist()).decode(errors='replace').strip()}"
            for rank, text in enumerate(texts.view(self.size, -1))
        ]
        self.differs = True
        return kind(
            f"ranks: the ranks of group {self.name!r} {what}, so no collective was started.\n"
            + "\n".join(lines)
            + "\n  Every rank must call the same models in the same order; compile on each rank "
            "only the models that it calls.",
            rule=RANKS,
        )

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Everybody's tensor, one after another. Raises `LostError` if a rank is gone."""
        with torch.inference_mode(False):
            told = torch.empty(self.size * mine.numel(), dtype=mine.dtype)
            wait(self.group._allgather_base(told, mine.clone()), self.name)  # no inference tensor
        return told

    def largest(self, mine: list[float]) -> list[float]:
        """The largest of all ranks' numbers, place by place; all ranks ask between the same calls.

        Raises `RunError` if a rank is gone.
        """
        if self.dead:
            raise RunError(f"run: group {self.name!r} is dead: {self.dead}.")
        try:
            told = self._gather(torch.tensor(mine, dtype=torch.float64))
        except LostError as error:
            self.fail(self.why(str(error)))
            raise RunError(f"run: {self.dead}.") from error
        found: list[float] = told.view(self.size, -1).amax(0).tolist()
        return found

    def end(self, last: str) -> None:
        """A call is over; `last` is the last collective it finished."""
        self.last = last
        self._busy.release()

    def refuse(self, speaker: Speaker) -> None:
        """Tell the others that this rank cannot do the call; nothing is dead."""
        try:
            self.begin(REFUSED, speaker, f"cannot do it: {speaker.name}")
            self.agree()
        except PlanError:
            self.leave()
        except LostError as error:
            self.fail(self.why(str(error)))

    def leave(self) -> None:
        """Give up a call of which no collective was started."""
        self._told = None
        if self._busy.locked():
            self._busy.release()

    def fail(self, why: str, *, note: str = "", mends: str = "") -> None:
        """Take the group down: peers that wait wake up, later calls are told.

        note: what the others should hear of it. mends: by this rule only the call has failed; the
        next one opens the group anew, on every rank.
        """
        if self.dead:
            return
        self.dead, self.mends = why, self.mends or mends
        if note:
            self.tell((f"mends {self.mends}: " if self.mends else "") + note)
        self.close()
        if self._busy.locked():
            self._busy.release()

    def tell(self, note: str) -> None:
        """Leave a note for the ranks that wait for this one, if the store still answers."""
        if (store := self.store) is not None:
            _bounded(lambda: store.set(f"fault/{self.rank}", note[:400]))

    def close(self) -> None:
        """Close the connections, in a thread of its own: works in flight may still hold them.

        This happens too when the user's group is destroyed.
        """
        if self.group is not None:
            held, self.group, self._told = [self.group, self.store], None, None
            self.store = None
            threading.Thread(target=held.clear, name="weft close", daemon=True).start()

    def why(self, error: str) -> str:
        """What is known of the ranks that did not do their share."""
        until = time.monotonic() + NOTICE_S
        late = "timed out" in error.lower() or "timeout" in error.lower()
        waiting: dict[int, str] = {}
        while time.monotonic() < until and len(waiting) < self.size - 1:
            if ended := [r for r, who in self.peers.items() if has_ended(who)]:
                return f"rank {_listed(self.world[r] for r in ended)} has ended"
            notes = self._notes()
            waiting = {r: note for r, note in notes.items() if note.startswith(WAITS)}
            if told := {r: note for r, note in notes.items() if r not in waiting}:
                rules = [rule[1] if (rule := MENDS.match(n)) else "" for n in told.values()]
                self.mends = min(rules)
                told = {self.world[r]: MENDS.sub("", note, count=1) for r, note in told.items()}
                return "; ".join(f"rank {r} {note}" for r, note in told.items())
            time.sleep(0.05)
        elsewhere = {r: note for r, note in waiting.items() if note != WAITS + self.title}
        if elsewhere:
            told = {self.world[r]: note for r, note in elsewhere.items()}
            stuck = "; ".join(f"rank {r} {note}" for r, note in told.items())
            return f"not all ranks came to {self.title}: {stuck}"
        others = [r for r in range(self.size) if r != self.rank]
        missing = [r for r in others if r not in waiting] or others  # all came, but too late
        if late:
            return (
                f"no answer from rank {_listed(self.world[r] for r in missing)} for "
                f"{self.watchdog_s:g} s in {self.title}: it is stopped, slow or busy with "
                "something else"
            )
        return f"a rank of {self.title} closed its connections ({error})"

    def _notes(self) -> dict[int, str]:
        def read() -> dict[int, str]:
            ranks = [r for r in range(self.size) if r != self.rank]
            found = [r for r in ranks if self.store.check([f"fault/{r}"])]
            return {r: self.store.get(f"fault/{r}").decode() for r in found}

        return _bounded(read) or {}

    def is_over(self, user: dist.ProcessGroup) -> bool:
        """Whether another channel takes the place of this one at the next call."""
        return self.user() is not user or bool(self.dead and self.mends)

    # Connecting.

    def open(self, user: dist.ProcessGroup) -> None:
        """Connect to the other ranks. Raises `LostError`, and the group is dead, if they fail."""
        try:
            self.group = self._connect(user)
        except LostError as error:
            self.tell(f"gave up: {error}")
            self.dead, error.channel = str(error), self
            raise

    def _connect(self, user: dist.ProcessGroup) -> Any:
        """A group of our own with the same ranks. Between accelerators it only tells the calls."""
        config = str(dist.get_backend_config(user)).replace(",", ":").split(":")
        self.carried = bool(set(config) & {"nccl", "xccl"})
        try:
            self.store = _store_of(user, self.name)
            self.store.set(f"ready/{self.rank}", own_identity())
            self._meet()
            if notes := self._notes():
                told = (f"rank {self.world[rank]} {note}" for rank, note in notes.items())
                raise LostError("; ".join(told))
            before = threads()
            backend = dist.ProcessGroupGloo(
                self.store, self.rank, self.size, timedelta(seconds=CONNECT_S)
            )
            be_polite(threads() - before)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            gone = "the store or a rank is gone: it has ended, or has closed the group"
            raise LostError(f"{gone} ({why})") from error
        backend._set_default_timeout(timedelta(seconds=self.watchdog_s))
        group = dist.ProcessGroup(self.store, self.rank, self.size)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), kind, backend)
        group._set_default_backend(kind)
        return group

    def _meet(self) -> None:
        """Wait until every rank is here to connect; notice one that has ended on its way."""
        until, pause_s = time.monotonic() + self.watchdog_s, 0.001
        missing = [rank for rank in range(self.size) if rank != self.rank]
        while missing:
            here = [rank for rank in missing if self.store.check([f"ready/{rank}"])]
            for rank in here:
                self.peers[rank] = self.store.get(f"ready/{rank}").decode()
            missing = [rank for rank in missing if rank not in here]
            ended = [rank for rank in missing if has_ended(_introduced(self.world[rank]))]
            if ended:
                raise LostError(f"rank {_listed(self.world[r] for r in ended)} has ended")
            if missing and time.monotonic() > until:
                raise LostError(
                    f"rank {_listed(self.world[r] for r in missing)} did not come to the first "
                    f"call within {self.watchdog_s:g} s"
                )
            time.sleep(pause_s if missing else 0)
            pause_s = min(2 * pause_s, 0.1)


_channels: dict[str, Channel] = {}
_opening: dict[str, threading.Lock] = {}


def channel(name: str, watchdog_s: float = WATCHDOG_S) -> Channel:
    """The channel of a process group, opened at its first use by all its ranks together."""
    user = _user_group(name)
    found = _channels.get(name)
    if found is None or found.is_over(user):
        # A lock for each: ranks whose threads open two groups may do so in another order.
        with _opening.setdefault(name, threading.Lock()):
            found = _channels.get(name)
            if found is None or found.is_over(user):
                before, found = found, Channel(name, user, watchdog_s)
                if before is not None:
                    before.close()
                    if before.user() is user:  # the ranks know each other's models already
                        found.roles, found.num_roles = before.roles, before.num_roles
                _channels[name] = found
                found.open(user)
    return found


def group(name: str) -> Any:
    """The group that a collective of a plan runs on, once all ranks agree on the call."""
    found = _channels.get(name)
    if found is None:
        return _user_group(name)  # outside of a call
    found.agree()
    return _user_group(name) if found.carried else found.group


def _user_group(name: str) -> dist.ProcessGroup:
    try:
        return _resolve_process_group(c10d.GroupName(name))
    except RuntimeError as error:
        raise RunError(f"run: the process group {name!r} is gone: it was destroyed.") from error


def introduce() -> None:
    """Tell the other ranks which process this is, so that they notice its end at any time."""
    if dist.is_available() and dist.is_initialized():
        store, rank = c10d._get_default_store(), dist.get_rank()
        _bounded(lambda: store.set(f"weft/rank/{rank}", own_identity()))


def _introduced(rank: int) -> str:
    store, key = c10d._get_default_store(), f"weft/rank/{rank}"
    return store.get(key).decode() if store.check([key]) else ""


def _store_of(user: dist.ProcessGroup, name: str) -> Any:
    """A corner of the group's store, new at each opening: all ranks open equally often."""
    store = c10d.PrefixStore(f"weft/{name}", user.get_group_store())
    return c10d.PrefixStore(str(store.add(f"opened/{user.rank()}", 1)), store)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _bounded(ask: Callable[[], Found]) -> Found | None:
    """What a store answers within a moment; None if it does not, for its host may be the dead."""
    answers: list[Found] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError:
            return

    thread = threading.Thread(target=run, name="weft store", daemon=True)
    thread.start()
    thread.join(NOTICE_S)
    return answers[0] if answers else None


@atexit.register
def _close_all() -> None:
    """Close every channel while Python still stands: a gloo thread that outlives it aborts."""
    for found in _channels.values():
        found.close()
    for thread in threading.enumerate():
        if thread.name == "weft close":
            thread.join(NOTICE_S)
