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
import contextlib
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchweft.errors import PlanError, RunError
from torchweft.plan.plan import Step
from torchweft.private.core import _resolve_process_group
from torchweft.ranks.faults import EagerError, LostError, WholeError
from torchweft.ranks.processes import NOTICE_S, be_polite, bounded, has_ended, own_identity, threads
from torchweft.ranks.speakers import Roles, Speaker
from torchweft.ranks.waiters import beside

WATCHDOG_S = 60.0
CONNECT_S = 8.0
MAX_AHEAD = 16  # calls that a host may be ahead of another
SLICE, SLICE_OVER = timedelta(seconds=1), "Operation timed out!"
REFUSED, EAGER, STOCK = 0, 1, 2
WITHOUT_PLAN = MappingProxyType({REFUSED: "cannot do it", EAGER: "runs the model as it is"})
"""What a rank does whose digest is not that of a plan."""
MENDS, WAITS = re.compile(r"mends (\w+): "), "waits in "
RANKS, NUM_LETTERS = "ranks", 200
EVERY, NO_WISH = 1000, -1  # shares are counted in calls of a thousand


def is_among(number: int, share: int) -> bool:
    """Whether a call is among the share (of a thousand) that runs by plans; they lie evenly."""
    return number * share // EVERY > (number - 1) * share // EVERY


def wait(work: Any, name: str = "", *, over: Callable[[], bool] = bool) -> None:
    """Wait for a c10d work. It ends by itself: done, the peer gone, or after the watchdog.

    In slices, so that Ctrl-C gets through. name: the process group it is of, if that is known.
    over: says, after a slice, whether nobody wants the work any more.
    """
    while not over():
        try:
            work.wait(SLICE)
            return
        except RuntimeError as error:
            if SLICE_OVER not in str(error):
                raise LostError(str(error).splitlines()[0], _channels.get(name)) from error


def wait_for_message(work: Any, name: str = "") -> None:
    """Wait for a message as `wait` does, on another thread: Ctrl-C gets through, and what other
    ranks tell of a fault. Raises `LostError`."""
    known = _channels.get(name)
    try:
        error = beside(work, lambda: known is not None and known.is_told)
    except TimeoutError:
        raise LostError("another rank has given up", known) from None
    if error is not None:
        raise LostError(str(error).splitlines()[0], known) from error


def lost(error: BaseException, name: str) -> LostError | None:
    """What an error of torch.distributed says of the other ranks of a group; None: nothing."""
    if not isinstance(error, dist.DistError) and "gloo" not in str(error):
        return None
    return LostError(str(error).splitlines()[0], _channels.get(name))


class Channel:
    """One process group as plans use it, one call at a time."""

    def __init__(
        self, name: str, user: dist.ProcessGroup, watchdog_s: float, before: Channel | None = None
    ) -> None:
        self.name, self.watchdog_s = name, watchdog_s
        self.user = weakref.ref(user, lambda _: _forget(self))
        self.rank, self.size = user.rank(), user.size()
        self.others = {*range(self.size)} - {self.rank}
        self.world = dist.get_process_group_ranks(user)
        self.carried = False  # whether collectives run on the user's group
        self.group: Any = None
        self.store: Any = None
        self.peers: dict[int, str] = {}
        self.num_calls = 0
        self.dead = ""
        self.mends = ""  # if dead, the rule by which a new one is opened at the next call
        self.differs = False  # whether all its ranks know that they do not agree on this call
        self.steps: Sequence[Step] = ()  # of the call before
        self.roles: Roles = weakref.WeakKeyDictionary()
        self.num_roles = 0
        # Of each model: the share of calls by plans, the next share, from which call on.
        self._shares: MutableMapping[Speaker, tuple[int, int, int]] = weakref.WeakKeyDictionary()
        if before is not None and before.user() is user:  # the ranks know each other's models
            self.roles, self.num_roles = before.roles, before.num_roles
            shares = before._shares.items()
            self._shares.update({speaker: (share, share, 0) for speaker, (_, share, _) in shares})
        self._opening, self._busy = threading.Lock(), threading.Lock()
        self._told: tuple[Any, torch.Tensor] | None = None
        self._announced: tuple[Any, torch.Tensor, Speaker] | None = None
        self._speaker: Speaker | None = None
        self._whole: Callable[[], int] = int
        self._num_talks: MutableMapping[Speaker, int] = weakref.WeakKeyDictionary()
        self._digest, self._claim, self._place, self._graph = REFUSED, 0, 0, ""
        self._asks = False  # whether this rank wants to agree on costs in this call
        self._agreed: set[tuple[int, int, int]] = set()  # what all ranks have said alike before
        self._pending: queue.Queue[Any] = queue.Queue(MAX_AHEAD)  # agreements still to come
        self._keeper: threading.Thread | None = None

    @property
    def title(self) -> str:
        """The group as errors name it."""
        return f"group {self.name!r} (ranks {self._listed(range(self.size))})"

    # A call: begin, agree, end or fail.

    def begin(
        self, digest: int, speaker: Speaker, graph: str = "", whole: Callable[[], int] = int
    ) -> None:
        """Tell the other ranks what this call will do. Raises `RunError` on a dead group.

        graph: the name of the planned graph, for the others to read if they do not agree. whole:
        gives the digest of the call with the batch whole, if it can be run so instead, else 0.
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
        self._await_announced()
        self.num_calls, self.differs = self.num_calls + 1, False
        self._digest, self._speaker, self._graph, self._whole = digest, speaker, graph, whole
        self._claim = self.roles.get(speaker) or speaker.first_claim(self.roles)
        self._place = speaker.place(self.name)
        wish = NO_WISH if speaker.wanted is None else speaker.wanted
        number = self._num_talks[speaker] = self._num_talks.get(speaker, 0) + 1
        self._asks = speaker.asks_costs(number)
        message = [self.num_calls, digest, self._claim, self._place, wish, self._asks]
        self._told = self._send(message, torch.int64)

    def announce(self, speaker: Speaker) -> None:
        """Tell the other ranks that this one runs a call as it is, and go on.

        Who has a plan for that call leaves it before the first collective: `EagerError`.
        """
        try:
            self.begin(STOCK, speaker)
        except LostError as error:
            self.fail(self.why(str(error)))
            raise RunError(f"run: {self.dead}.") from error
        assert self._told is not None, "a call that has begun was told"
        self._announced, self._told = (*self._told, speaker), None
        self.end(())

    def _await_announced(self) -> None:
        """What others said of a call that was only announced; by now they have come to it."""
        if self._announced is not None:
            (work, told, speaker), self._announced = self._announced, None
            wait(work, self.name)
            self._hear(told.tolist(), speaker)

    def agree(self) -> None:
        """Wait until every rank has told its plan. Raises `PlanError`, on all, if they differ.

        On an accelerator, where a host runs ahead of its device and of other hosts, a call that
        was agreed on before is not waited for: a thread compares what comes, and takes the groups
        down if a rank calls something else.
        """
        if self._told is None:
            return
        (work, told), self._told = self._told, None
        claimed = self._digest, self._claim, self._place
        if self.carried and not self._asks and claimed in self._agreed:
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="weft keeper", daemon=True)
                self._keeper.start()
            try:
                self._pending.put((work, told, self._speaker), timeout=self.watchdog_s)
            except queue.Full:
                raise LostError(f"timed out: a rank is {MAX_AHEAD} calls behind", self) from None
            return
        wait(work, self.name)
        assert self._speaker is not None, "only a call that has begun is agreed on"
        said = told.tolist()
        all_ask = all(row[-1] for row in said)
        rows = self._hear(said, self._speaker)
        _, digest, claim, _ = rows[0]
        if any(row != rows[0] for row in rows) or digest == REFUSED:
            _, digests, claims, _ = zip(*rows, strict=True)
            if STOCK in digests:  # who says so has gone on, so nobody can be asked for more
                self.differs = True
                over = EagerError("ranks: another rank runs the model as it is.", rule=RANKS)
                over.is_over = True
                raise over
            if REFUSED in digests or len(set(digests)) > 1:
                kind = EagerError if EAGER in digests else PlanError
                if min(digests) > STOCK:
                    self._look_for_whole()
                raise self._disagree(kind, "do not plan the same collectives")
            if len({(number, place) for number, _, _, place in rows}) > 1:
                raise self._disagree(PlanError, "are not at the same place of a call")
            if self._are_swapped(self._speaker, claims):
                raise self._disagree(PlanError, "call different models")
            claim = min((claim for claim in claims if claim > 0), default=-1)
        if claim < 0:
            claim = self.num_roles = self.num_roles + 1
        if claim != self._claim:
            self.roles[self._speaker] = claim
        if self.carried and digest != REFUSED:
            self._agreed.add((digest, claim, self._place))
        if all_ask:
            self._speaker.agree_on_costs(self._gather, f"agreed at call {self.num_calls}")

    def _look_for_whole(self) -> None:
        """Raise `WholeError`, on all ranks, if all can run this call with the batch whole."""
        said = {row[0] for row in self._gather([self._whole()], torch.int64).tolist()}
        if len(said) == 1 and 0 not in said:
            self.differs = True
            raise WholeError(
                "ranks: the ranks cut this call differently, as one with fewer rows than parts "
                "does, so all of them run it whole.",
                rule=RANKS,
            )

    def _keep(self) -> None:
        """Compare what ranks say of calls that have gone on meanwhile."""
        while (pending := self._pending.get()) is not None:
            work, told, speaker = pending
            try:
                wait(work, self.name, over=self._is_left)
            except LostError as error:
                self._take_down(self.why(str(error)))
                return
            if self._is_left() and not work.is_completed():
                return  # a thread that is inside torch when Python ends aborts the process
            rows = self._hear(told.tolist(), speaker)
            if any(row != rows[0] for row in rows):
                calls = "; ".join(
                    f"rank {self.world[rank]} made call {number} of model {claim} ({digest:016x})"
                    for rank, (number, digest, claim, _) in enumerate(rows)
                )
                self._take_down(f"the ranks call different models or plans: {calls}")
                return
            del pending, work, told, speaker  # which would keep the group open

    def _is_left(self) -> bool:
        """Whether the channel was closed without a fault."""
        return self.group is None and not self.dead

    def _hear(self, rows: list[list[int]], speaker: Speaker) -> list[list[int]]:
        """What ranks say of a call, without their wishes, which all ranks note alike.

        A wish comes true at a call that no host can have come to. Until then others are not heard:
        who has one says it again. Of two the smaller share is taken.
        """
        number, wishes = rows[0][0], {row[-2] for row in rows} - {NO_WISH}
        for row in rows:
            del row[-2:]
        _, now, at = self._shares.get(speaker, (EVERY, EVERY, 0))
        if wishes and number >= at:
            share = min(wishes)
            self._shares[speaker] = now, share, number + MAX_AHEAD + 2
            speaker.share = share
            speaker.wanted = None if speaker.wanted == share else speaker.wanted
        return rows

    def is_planned(self, speaker: Speaker) -> bool:
        """Whether the next call of a model is among those that run by plans; on all ranks alike."""
        before, share, at = self._shares.get(speaker, (EVERY, EVERY, 0))
        number = self.num_calls + 1
        return is_among(number, share if number >= at else before)

    def _take_down(self, why: str) -> None:
        """End the user's group too: its collectives may wait for each other on the devices."""
        user = self.user()
        self.fail(why, note=f"gave up: {why}")
        if user is not None:
            with contextlib.suppress(RuntimeError):
                user.abort()

    def _are_swapped(self, speaker: Speaker, claims: Sequence[int]) -> bool:
        """Whether two ranks have, each, another model for what the other one claims."""
        if len(set(claims)) == 1:
            return False
        mine = [speaker.has_other(claim, self.roles) for claim in claims]
        has_other = self._gather(mine, torch.int64).bool()
        unlike = torch.tensor([[one != other for other in claims] for one in claims])
        return bool((has_other & has_other.T & unlike).any())

    def _disagree(self, kind: type[PlanError], what: str) -> PlanError:
        """The error of ranks that cannot talk, with what each of them was about to do."""
        speaker = self._speaker
        assert speaker is not None, "only a call that has begun can differ"
        plan = f"plans collectives {self._digest:016x} of {self._graph}{speaker.costs_name}"
        role = f"model {self.roles[speaker]}" if speaker in self.roles else "new"
        text = f"call {self.num_calls}, {WITHOUT_PLAN.get(self._digest, plan)}: {speaker.name}"
        letters = f"{text} ({role} of this group)".encode()[:NUM_LETTERS].ljust(NUM_LETTERS)
        lines = [
            f"  rank {self.world[rank]}: {bytes(text).decode(errors='replace').strip()}"
            for rank, text in enumerate(self._gather([*letters], torch.uint8).tolist())
        ]
        self.differs = True
        return kind(
            f"ranks: the ranks of group {self.name!r} {what}, so no collective was started.\n"
            + "\n".join(lines)
            + "\n  Every rank must call the same models in the same order, with equal costs=, and "
            "meet shares of rows (of a reduce_scatter or weft.decompose) with equal weights and "
            "inputs; compile on each rank only the models that it calls.",
            rule=RANKS,
        )

    def _send(self, numbers: Sequence[float], dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
        """Start to tell everybody these numbers: the work, and the rows that it fills, one a rank.

        Raises `LostError` if a rank is gone.
        """
        with torch.inference_mode(False):  # gloo takes no inference tensors
            mine = torch.tensor([numbers], dtype=dtype)
            told = torch.empty(self.size, len(numbers), dtype=dtype)
        try:
            return self.group._allgather_base(told, mine), told
        except RuntimeError as error:
            raise LostError(str(error).splitlines()[0], self) from error

    def _gather(self, numbers: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """Everybody's numbers, a row a rank. Raises `LostError` if a rank is gone."""
        work, told = self._send(numbers, dtype)
        wait(work, self.name)
        return told

    def largest(self, mine: Sequence[float]) -> list[float]:
        """The largest of all ranks' numbers, place by place; all ranks ask between the same calls.

        Raises `RunError` if a rank is gone.
        """
        if self.dead:
            raise RunError(f"run: group {self.name!r} is dead: {self.dead}.")
        try:
            largest: list[float] = self._gather(mine, torch.float64).amax(0).tolist()
        except LostError as error:
            self.fail(self.why(str(error)))
            raise RunError(f"run: {self.dead}.") from error
        return largest

    def end(self, steps: Sequence[Step]) -> None:
        """A call of these steps is over."""
        self.steps = steps
        if self._busy.locked():  # or the keeper has taken the group down meanwhile
            self._busy.release()

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
        self.leave()

    def tell(self, note: str) -> None:
        """Leave a note for the ranks that wait for this one, if the store still answers."""
        if (store := self.store) is not None:
            bounded(lambda: store.set(f"fault/{self.rank}", note[:400]))

    def close(self) -> None:
        """Close the connections, in a thread of its own: works in flight may still hold them.

        This happens too when the user's group is destroyed, and at the end of Python.
        """
        if self._keeper is not None:
            with contextlib.suppress(queue.Full):
                self._pending.put_nowait(None)
        if self.group is not None:
            held, self.group, self._told = [self.group, self.store], None, None
            self._announced = None
            self.store = None
            threading.Thread(target=held.clear, name="weft close", daemon=True).start()

    def why(self, error: str) -> str:
        """What is known of the ranks that did not do their share."""
        until = time.monotonic() + NOTICE_S
        late = "timed out" in error.lower() or "timeout" in error.lower()
        waiting: dict[int, str] = {}
        while time.monotonic() < until and len(waiting) < self.size - 1:
            if ended := [rank for rank, who in self.peers.items() if has_ended(who)]:
                return f"rank {self._listed(ended)} has ended"
            notes = self._notes()
            waiting = {rank: note for rank, note in notes.items() if note.startswith(WAITS)}
            if told := {rank: note for rank, note in notes.items() if rank not in waiting}:
                rules = [MENDS.match(note) for note in told.values()]
                self.mends = min(rule[1] if rule else "" for rule in rules)
                return self._quoted({r: MENDS.sub("", n, count=1) for r, n in told.items()})
            time.sleep(0.05)
        if elsewhere := {r: note for r, note in waiting.items() if note != WAITS + self.title}:
            return f"not all ranks came to {self.title}: {self._quoted(elsewhere)}"
        missing = self.others - waiting.keys() or self.others  # or all came, but too late
        if late:
            return (
                f"no answer from rank {self._listed(missing)} for {self.watchdog_s:g} s in "
                f"{self.title}: it is stopped, slow or busy with something else"
            )
        return f"a rank of {self.title} closed its connections ({error})"

    @property
    def is_told(self) -> bool:
        """Whether another rank has left word of a fault, and not only of what it waits for."""
        return any(not note.startswith(WAITS) for note in self._notes().values())

    def _notes(self) -> dict[int, str]:
        def read() -> dict[int, str]:
            left = [rank for rank in sorted(self.others) if self.store.check([f"fault/{rank}"])]
            return {rank: self.store.get(f"fault/{rank}").decode() for rank in left}

        return bounded(read) or {}

    def _listed(self, ranks: Iterable[int]) -> str:
        """Ranks of this group, by their numbers in the world."""
        return ", ".join(str(self.world[rank]) for rank in sorted(ranks))

    def _quoted(self, notes: Mapping[int, str]) -> str:
        return "; ".join(f"rank {self.world[rank]} {note}" for rank, note in notes.items())

    # Connecting.

    def open(self, user: dist.ProcessGroup) -> None:
        """Connect to the others, once. Raises `LostError`, and the group is dead, if they fail.

        A lock for each channel: ranks whose threads open two groups may do so in another order.
        """
        with self._opening:
            if self.group is not None or self.dead:  # another thread was here before
                return
            try:
                self.group = self._connect(user)
            except LostError as error:
                self.tell(f"gave up: {error}")
                self.dead, error.channel = str(error), self
                raise

    def _connect(self, user: dist.ProcessGroup) -> Any:
        """A group of our own with the same ranks. Between accelerators it only tells the calls."""
        self.carried = is_carried(str(dist.get_backend_config(user)))
        try:
            # A corner of the group's store, new at each opening: all ranks open equally often.
            store = c10d.PrefixStore(f"weft/{self.name}", user.get_group_store())
            self.store = c10d.PrefixStore(str(store.add(f"opened/{self.rank}", 1)), store)
            self.store.set(f"ready/{self.rank}", own_identity())
            self._meet()
            if notes := self._notes():
                raise LostError(self._quoted(notes))
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
        missing = self.others
        while missing:
            here = {rank for rank in missing if self.store.check([f"ready/{rank}"])}
            self.peers |= {rank: self.store.get(f"ready/{rank}").decode() for rank in here}
            missing = missing - here
            if ended := [r for r in missing if has_ended(_introduced(self.world[r]))]:
                raise LostError(f"rank {self._listed(ended)} has ended")
            if missing and time.monotonic() > until:
                raise LostError(
                    f"rank {self._listed(missing)} did not come to the first call within "
                    f"{self.watchdog_s:g} s"
                )
            time.sleep(pause_s if missing else 0)
            pause_s = min(2 * pause_s, 0.1)


_channels: dict[str, Channel] = {}
"""By the names of process groups, as torch has them; each goes when its group is destroyed."""
_registering = threading.Lock()


def channel(name: str, watchdog_s: float = WATCHDOG_S) -> Channel:
    """The channel of a process group, opened at its first use by all its ranks together."""
    user = user_group(name)
    with _registering:
        known = _channels.get(name)
        if known is None or known.user() is not user or (known.dead and known.mends):
            if known is not None:
                known.close()
            known = _channels[name] = Channel(name, user, watchdog_s, known)
    if known.group is None:
        known.open(user)
    return known


def is_carried(config: str) -> bool:
    """Whether collectives run on the user's group: "cpu:gloo,cuda:nccl" has another than gloo."""
    return any(pair.partition(":")[2] != "gloo" for pair in config.split(","))


def _forget(ended: Channel) -> None:
    ended.close()
    if _channels.get(ended.name) is ended:
        del _channels[ended.name]


def group(name: str) -> Any:
    """The group that a collective of a plan runs on, once all ranks agree on the call."""
    known = _channels.get(name)
    if known is None:
        return user_group(name)  # outside of a call
    known.agree()
    return user_group(name) if known.carried else known.group


def place_in(name: Any, rank: int) -> int:
    """The number in a group of a rank of the world."""
    known = _channels.get(name)
    world = dist.get_process_group_ranks(group(name)) if known is None else known.world
    if rank not in world:
        raise RunError(f"message: rank {rank} is not in its process group, {world}.")
    return world.index(rank)


def user_group(name: str) -> dist.ProcessGroup:
    try:
        return _resolve_process_group(c10d.GroupName(name))
    except RuntimeError as error:
        raise RunError(f"run: the process group {name!r} is gone: it was destroyed.") from error


def introduce() -> None:
    """Tell the other ranks which process this is, so that they notice its end at any time."""
    if dist.is_available() and dist.is_initialized():
        store, rank = c10d._get_default_store(), dist.get_rank()
        bounded(lambda: store.set(f"weft/rank/{rank}", own_identity()))


def _introduced(rank: int) -> str:
    store, key = c10d._get_default_store(), f"weft/rank/{rank}"
    return store.get(key).decode() if store.check([key]) else ""


@atexit.register
def _close_all() -> None:
    """Close every channel while Python still stands: a gloo thread that outlives it aborts."""
    for each in [*_channels.values()]:
        each.close()
    for thread in threading.enumerate():
        if thread.name in ("weft close", "weft keeper"):
            thread.join(SLICE.total_seconds() + NOTICE_S)
