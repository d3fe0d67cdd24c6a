"""How a job ends, for all its nodes alike: a pure function over what node 0 is told while ranks run.

`step` is the entry: it takes the state, what happened and when, and returns the new state and what node 0
has to do. What happens if a rank fails, a node is lost, all are silent, a stop is asked for or the job hangs:
each is a case there. It reads no clock and starts nothing; hub.py carries the effects out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from entrypoint.core.bitset import NONE, Bits
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import plain
from entrypoint.job import outcome
from entrypoint.meet import blame
from entrypoint.meet.identity import ParticipantId
from entrypoint.meet.messages import (
    AllDone,
    Done,
    Ended,
    Fail,
    Failed,
    Look,
    LookCloser,
    NoOutput,
    Paused,
    Peek,
    Peeked,
    Report,
    Seen,
    Stalled,
    Stopped,
    Told,
)
from entrypoint.meet.reports import NO_ENDS, Ends, Failure, RankSnapshot
from entrypoint.meet.terms import JobBounds
from entrypoint.meet.wire import WireError

LOST = 1
"""Status of a participant that was lost while ranks ran: no port or peer that another attempt could have."""

# --- what happens -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Now:
    """A moment on both clocks, in seconds."""

    wall: float
    """Since 1970. It may jump."""
    steady: float
    """Since any moment. It only grows, as far as this process runs."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The sender is lost."""

    name: str
    """Of its node, as the scheduler lists it."""
    who: str
    """The participant as a line names it."""
    why: str
    at: float
    """Unix seconds."""


@dataclass(frozen=True)
class FailuresCollected:
    """The time to collect failures is over; also said by node 0 as it leaves."""


@dataclass(frozen=True)
class LookIsOver:
    """The time in which everyone says where its ranks are is over."""


@dataclass(frozen=True)
class PeekIsOver:
    """The same for a Peek."""

    number: int


@dataclass(frozen=True)
class PeekAgain:
    """It is time for the next Peek."""

    number: int


Timer = FailuresCollected | LookIsOver | PeekIsOver | PeekAgain
Event = Report | Lost | Timer

# --- what is to be done -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TellAll:
    """Tell everyone, node 0 included."""

    message: Told


@dataclass(frozen=True)
class Say:
    """Print a line for the user."""

    text: str


@dataclass(frozen=True)
class StartTimer:
    """Let this happen in so many seconds."""

    seconds: float
    event: Timer


Effect = TellAll | Say | StartTimer
Step = tuple["JobState", list[Effect]]

# --- the state ----------------------------------------------------------------------------------------------

Chunks = tuple[tuple[RankSnapshot, ...], ...]
"""Sightings as they came, a tuple for each message."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """The job seems to hang, and everyone was asked where its ranks are."""

    why: str
    since: float
    """Unix seconds."""
    sightings: Chunks = ()
    """Of one rank the last counts."""
    answered: Bits = NONE
    unclear: Bits = NONE
    """Whose ranks are there and have shown no stack, up to the closer look at them."""
    is_closer: bool = False
    """Whether the closer look was asked for."""


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Ranks make no step. An evaluation, a compilation or a download pauses a script that tells nothing of
    it, so a pause is said once and ends nothing. Everyone is asked where its ranks are, again at growing
    intervals: only two looks can prove a deadlock."""

    reporting: Bits
    """Whose ranks make no step."""
    speaking: Bits
    """Those of whom that may be said."""
    why: str
    began: float
    """On the steady clock, as `looked`."""
    looked: float
    """When the last look ended."""
    nap: float
    """Seconds to the look after the next one."""
    is_looking: bool = True
    before: Chunks | None = None
    """What was said in the last look; None if this is the first."""
    found: Chunks = ()
    answered: Bits = NONE
    is_said: bool = False


@dataclass(frozen=True, kw_only=True)
class JobState:
    """All that node 0 knows of a job whose ranks run. Sets of participants are by `index`."""

    nodes: Sequence[str]
    """Their names in the allocation's order."""
    hub: int
    """Which of them is node 0 of this meeting."""
    local_ranks: int
    """Participants on each node: 1, or in mode `rank` its tasks."""
    bounds: JobBounds
    present: Bits
    """Who has met."""
    active: Bits
    """Who takes part; the others are spares, whose loss is no failure."""
    world: int
    """Ranks in all."""
    finished: Bits = NONE
    """Done, failed or lost: nothing that happens to their connections now is a loss."""
    done: Bits = NONE
    saved: Bits = NONE
    """The ranks of those that are done that saved to go on."""
    failures: tuple[Failure, ...] = ()
    ends: Ends = NO_ENDS
    gone: Bits = NONE
    """Nodes that were lost, those among them that had nothing to do."""
    silent: Bits = NONE
    stop: Stopped | None = None
    """What was told of a planned end."""
    is_over: bool = False
    """Whether the last message was told."""
    hang: Hang | None = None
    pause: Pause | None = None
    peeks: int = 0
    """How often everyone was asked to peek: the timers of an earlier time mean nothing."""
    longest_pause: float = 0.0
    """Seconds that a pause has lasted after which the job went on."""

    def index(self, participant: ParticipantId) -> int:
        node, local_rank = participant
        return node * self.local_ranks + (local_rank or 0)


def step(state: JobState, sender: ParticipantId, event: Event, now: Now) -> Step:
    """What follows from an event. `sender`: the participant that it came from, its times by our clock; of a
    timer node 0 itself. WireError: the sender may not say that now.
    """
    who = state.index(sender)
    match event:
        case Stopped() as stopped:
            return _stop(state, stopped)
        case Ended(end=end):
            return replace(state, ends=state.ends.with_(end)), []
        case Done(saved=saved):
            all_saved = state.saved | Bits.of(saved)
            return _done(
                replace(
                    state,
                    finished=state.finished.with_(who),
                    done=state.done.with_(who),
                    saved=all_saved,
                )
            )
        case Fail(failure=failure):
            state, effects = _collect(state, failure)
            return _then(effects, _judge_if_complete(replace(state, finished=state.finished.with_(who)), now))
        case Lost() as lost:
            return _lose(state, sender, lost, now)
        case FailuresCollected():
            return _decide(state)
        case Stalled(why=why):
            return _look(state, why, now)
        case NoOutput(why=why):
            return _silence(state, who, why, now)
        case Seen(sightings=sightings, last=last) if state.hang is not None:
            return _judge_if_complete(replace(state, hang=_seen(state.hang, who, sightings, last)), now)
        case LookIsOver():
            return _judge(state, now)
        case Paused(why=why):
            return _pause(state, who, why, now)
        case Peeked(sightings=sightings, last=last):
            return _peeked(state, who, sightings, last, now)
        case PeekIsOver(number=number):
            is_due = state.pause is not None and state.pause.is_looking and state.peeks == number
            return _peek_is_over(state, now) if is_due else (state, [])
        case PeekAgain(number=number):
            is_due = state.pause is not None and state.peeks == number
            return _peek(state) if is_due else (state, [])
    raise WireError("it sent a message that has no meaning here")


def loss(node_rank: int, node: str, why: str, at: float) -> Failure:
    """A participant that was lost at that time, in Unix seconds."""
    return Failure(
        node_rank=node_rank,
        node=node,
        rank=None,
        status=LOST,
        signal=0,
        time=at,
        error=f"{outcome.LOST}{why}",
    )


def _then(effects: Sequence[Effect], following: Step) -> Step:
    state, more = following
    return state, [*effects, *more]


def _tell(state: JobState, message: Told) -> Step:
    """Nothing is told after the last message."""
    if state.is_over:
        return state, []
    is_last = isinstance(message, Failed | AllDone)
    return replace(state, is_over=is_last), [TellAll(message)]


# --- ends and failures --------------------------------------------------------------------------------------


def _stop(state: JobState, stopped: Stopped) -> Step:
    """Told once, and once more if only then the job's end is known: its warning may follow a stop by hand."""
    if state.stop and (state.stop.left is not None or stopped.left is None):
        return state, []
    return _tell(replace(state, stop=stopped), stopped)


def _done(state: JobState) -> Step:
    if state.failures or not state.active <= state.done:
        return state, []
    each_alone = len(state.ends) == state.world > 1 and state.ends.alone
    is_split = 0 < len(state.saved) < state.world
    split = outcome.split(f"rank {rank}" for rank in state.saved).error if is_split else ""
    return _tell(state, AllDone(each_alone, split))


def _lose(state: JobState, sender: ParticipantId, lost: Lost, now: Now) -> Step:
    who, (node, _) = state.index(sender), sender
    gone = replace(state, gone=state.gone.with_(node))
    if who not in state.active:
        is_news = node not in state.gone and not state.is_over
        return gone, [Say(f"the spare {lost.who} is lost: {lost.why}")] if is_news else []
    if who in state.finished:
        return state, []
    gone, effects = _collect(
        replace(gone, finished=gone.finished.with_(who)), loss(node, lost.name, lost.why, lost.at)
    )
    return _then(effects, _judge_if_complete(gone, now))


def _collect(state: JobState, failure: Failure) -> Step:
    """Takes a failure; a rank that ends while everyone looks is not the first."""
    if state.hang and failure.rank is not None and failure.time >= state.hang.since:
        return state, []
    state = replace(state, failures=(*state.failures, failure))
    if len(state.failures) > 1:
        return state, []
    # Who only lost another rank may end before that one does.
    follows = blame.is_consequence(failure)
    return state, [
        StartTimer(state.bounds.collect_echo if follows else state.bounds.collect, FailuresCollected())
    ]


def _decide(state: JobState) -> Step:
    """Calls one of the failures the first, if there is any."""
    if not state.failures:
        return state, []
    return _tell_failure(state, blame.first(state.failures, state.ends, world=state.world))


def _tell_failure(state: JobState, failure: Failure) -> Step:
    return _tell(state, Failed(replace(failure, error=plain(failure.error)), tuple(state.gone)))


# --- a hang: everyone looks, and the rank that the others wait for is named ---------------------------------


def _look(state: JobState, why: str, now: Now) -> Step:
    if state.hang or state.failures:
        return state, []
    state = replace(state, hang=Hang(why=why, since=now.wall))
    return _then([StartTimer(state.bounds.look, LookIsOver())], _tell(state, Look(why)))


def _silence(state: JobState, who: int, why: str, now: Now) -> Step:
    """When all that have not finished are silent, the job seems to hang."""
    silent = state.silent.with_(who) if why else state.silent.without(who)
    state = replace(state, silent=silent)
    return _look(state, why, now) if state.active <= silent | state.finished else (state, [])


def _seen(hang: Hang, who: int, sightings: tuple[RankSnapshot, ...], last: bool) -> Hang:
    is_unclear = any(one.state and not one.stack for one in sightings)
    return replace(
        hang,
        sightings=(*hang.sightings, sightings),
        unclear=hang.unclear.with_(who) if is_unclear else hang.unclear,
        answered=hang.answered.with_(who) if last else hang.answered,
    )


def _judge_if_complete(state: JobState, now: Now) -> Step:
    hang = state.hang
    if hang is None or not state.active <= hang.answered | state.finished:
        return state, []
    if hang.is_closer or not hang.unclear - state.finished:
        return _judge(state, now)
    # Only now: a rank that is ended for its stack is missing to those that wait for it.
    closer = replace(hang, is_closer=True, answered=hang.answered - hang.unclear)
    return _tell(replace(state, hang=closer), LookCloser())


def _judge(state: JobState, now: Now) -> Step:
    """Names the rank that the others wait for."""
    assert state.hang is not None
    mute = state.present - state.hang.answered - state.finished
    unseen = [state.nodes[index // state.local_ranks] for index in mute]
    by_rank = {one.rank: one for one in _flat(state.hang.sightings)}
    found = blame.verdict(list(by_rank.values()), state.hang.why, unseen=unseen, now=now.wall)
    if found is not None:
        return _tell_failure(state, found)
    if state.failures:
        return _decide(state)
    text = f"{state.hang.why}, and no rank was found"
    return _collect(state, loss(state.hub, state.nodes[state.hub], text, now.wall))


def _flat(chunks: Chunks) -> Iterator[RankSnapshot]:
    return (one for chunk in chunks for one in chunk)


# --- a pause: everyone looks from time to time, and two looks may prove a deadlock --------------------------


def _pause(state: JobState, who: int, why: str | None, now: Now) -> Step:
    pause = state.pause
    if why is None:
        return _go_on(state, who, now), []
    if pause is not None:
        speaking = pause.speaking.with_(who) if why else pause.speaking.without(who)
        pause = replace(pause, reporting=pause.reporting.with_(who), speaking=speaking, why=why or pause.why)
        return replace(state, pause=pause), []
    only = NONE.with_(who)
    pause = Pause(
        reporting=only,
        speaking=only if why else NONE,
        why=why,
        began=now.steady,
        looked=now.steady,
        nap=state.bounds.again,
    )
    return _peek(replace(state, pause=pause))


def _go_on(state: JobState, who: int, now: Now) -> JobState:
    """A participant's ranks make steps again; of the last one the pause is over."""
    pause = state.pause
    if pause is None:
        return state
    reporting = pause.reporting.without(who)
    if reporting:
        return replace(state, pause=replace(pause, reporting=reporting, speaking=pause.speaking.without(who)))
    longest = max(state.longest_pause, now.steady - pause.began)
    return replace(state, pause=None, longest_pause=longest)


def _peek(state: JobState) -> Step:
    assert state.pause is not None
    pause = replace(state.pause, is_looking=True, found=(), answered=NONE)
    state = replace(state, pause=pause, peeks=state.peeks + 1)
    return _then([StartTimer(state.bounds.look, PeekIsOver(state.peeks))], _tell(state, Peek()))


def _peeked(state: JobState, who: int, sightings: tuple[RankSnapshot, ...], last: bool, now: Now) -> Step:
    pause = state.pause
    if pause is None or not pause.is_looking:
        return state, []
    answered = pause.answered.with_(who) if last else pause.answered
    pause = replace(pause, found=(*pause.found, sightings), answered=answered)
    state = replace(state, pause=pause)
    return _peek_is_over(state, now) if state.active <= answered else (state, [])


def _peek_is_over(state: JobState, now: Now) -> Step:
    pause = state.pause
    assert pause is not None
    why = pause.why if pause.speaking else ""
    is_whole = state.active <= pause.answered
    found = list(_flat(pause.found))
    if is_whole and pause.before is not None and not state.hang and not state.failures:
        stuck = blame.deadlock(
            list(_flat(pause.before)),
            found,
            now.steady - pause.looked,
            why,
            state.ends,
            world=state.world,
            now=now.wall,
        )
        if stuck is not None:
            return _tell_failure(replace(state, pause=None), stuck)
    effects: list[Effect] = [StartTimer(pause.nap, PeekAgain(state.peeks))]
    is_due = bool(why) and not pause.is_said and now.steady - pause.began >= state.longest_pause
    if is_due and (text := blame.pause(found, why)):
        effects.append(Say(text))
        pause = replace(pause, is_said=True)
    pause = replace(
        pause, is_looking=False, before=pause.found, found=(), looked=now.steady, nap=2 * pause.nap
    )
    return replace(state, pause=pause), effects
