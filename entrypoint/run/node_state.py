"""What one node does while its ranks run: a pure function of all that can happen to it.

`step` is the entry: it takes the state, an event and the time, and returns the new state and what is to be
done. What happens if a rank ends, another node fails, a stop is asked for, a signal comes or the job hangs
depends on the phase that the node is in; each phase has one function below. It reads no clock, file or
process: supervise.py looks at those, and carries the effects out.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from types import MappingProxyType

from entrypoint.core.errors import DONE, SAVED, STUCK
from entrypoint.core.frozen import dataclass
from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome
from entrypoint.meet import blame
from entrypoint.meet.job_state import Now, Say
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
)
from entrypoint.meet.reports import NO_ENDS, End, Ends, Failure, RankSnapshot, when
from entrypoint.ranks.ranks import AgentEnded, NetworkSeen, RankEnded, RankStarted
from entrypoint.run.endings import RankTrace, asked_to_end, failure_of, listed, to_failure, to_outcome

PLANNED = (signal.SIGUSR1, signal.SIGUSR2)
"""They ask for a planned end: a job's warning before its end is one of the two."""
FAILURE_GRACE = 3.0
"""Seconds from SIGTERM to SIGKILL for ranks whose job has failed: a failure ends all within 5 s."""
SETTLE = 0.25
"""Seconds in which the ranks of a node that fail together are told apart by their times."""
SETTLE_ECHO = 1.25
"""Seconds more if a rank has only lost another one, and nobody else is asked."""
VERDICT = 10.0
"""Seconds for all nodes to agree on the first failure; their ranks are ended meanwhile."""
AGENT_EXIT = 10.0
"""Seconds for torchrun's agents to leave their exit barrier once every node is done."""
LOOK = 5.0
"""Seconds beyond the hub's own bound for its verdict on a hang."""
SILENT_STOP = 10.0
"""Seconds after which a rank that does not catch the stop signal is told to the user."""
LAST_CALL = 30.0
"""Seconds before the end of a job that is to go on as another, at which ranks that catch no stop signal are
ended: the scheduler's own end would be the last. Half of what is left, if that is less."""
CATCHES = 0.2
"""Seconds between two looks at which ranks catch the stop signal, while one is awaited."""
CATCHES_LATER = 2.0
"""The same once all have been told, or the user knows of the others: for a shell all processes of the machine
are looked at."""
ALIVE = 0.02
"""Seconds between two looks at whether ranks have ended after SIGTERM."""

# --- what happens -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bare:
    """What its name alone says."""


@dataclass(frozen=True, kw_only=True)
class Exited:
    """A rank ended."""

    ended: RankEnded
    step: int | None
    """The last one that it told; None if it told none."""
    alone: bool
    """Whether it trained, and was in no process group with others."""


@dataclass(frozen=True, kw_only=True)
class Signalled:
    """Somebody signalled this process."""

    signum: int


@dataclass(frozen=True)
class StopAsked:
    """The stop file is there."""

    left: float | None
    """Seconds to the end of the job; None if it does not say."""


@dataclass(frozen=True)
class Settled:
    """The time in which failing ranks are told apart is over."""

    said: Mapping[int, RankTrace]
    """What each rank that has failed left behind."""


@dataclass(frozen=True)
class RanksSeen:
    """A look at the ranks after SIGTERM."""

    alive: bool
    """Whether any process is left."""


class RanksKilled(_Bare):
    """Nothing of the ranks is left."""


class VerdictIsLate(_Bare):
    """The time for all nodes to agree is over."""


@dataclass(frozen=True)
class StacksCollected:
    """Where the ranks are: the answer to CollectStacks."""

    sightings: tuple[RankSnapshot, ...]


@dataclass(frozen=True)
class PeekCollected:
    """Where the ranks are: the answer to CollectPeek."""

    sightings: tuple[RankSnapshot, ...]


class StacksKept(_Bare):
    """The stacks are in the run directory, as far as it took them."""


class AgentLeft(_Bare):
    """torchrun's agent has ended, or its time is up."""


@dataclass(frozen=True)
class Catching:
    """A look at who heeds the stop signal."""

    ranks: Mapping[int, tuple[int | None, tuple[int, ...]]]
    """Of each rank that runs its process, None until it is known, and the processes that heed the signal for
    it, with those that got it."""


@dataclass(frozen=True, kw_only=True)
class Signs:
    """What one look at whether the ranks go on shows."""

    passed: float
    """Seconds since the last look in which this process ran: a suspended job does not seem to hang."""
    is_stalled: bool
    """Whether a rank that tells its steps has made none for too long."""
    is_paused: bool
    """Whether the ranks' optimizers have made none for too long."""
    heard: float
    """When a rank last wrote something."""
    any_ended: bool


Event = (
    RankStarted
    | Exited
    | AgentEnded
    | NetworkSeen
    | Signalled
    | StopAsked
    | Stopped
    | Failed
    | AllDone
    | Look
    | LookCloser
    | Peek
    | Settled
    | RanksSeen
    | RanksKilled
    | VerdictIsLate
    | StacksCollected
    | PeekCollected
    | StacksKept
    | AgentLeft
    | Catching
    | Signs
)

# --- what is to be done -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TellHub:
    """Report this to node 0."""

    report: Report


class TerminateRanks(_Bare):
    """SIGTERM to the process groups of all ranks."""


class KillRanks(_Bare):
    """End what is left of them. RanksKilled follows."""


@dataclass(frozen=True)
class SignalRank:
    """The stop signal to the process of a rank, or to one that heeds it in its place."""

    pid: int


@dataclass(frozen=True)
class ForgetBeats:
    """A rank was started again: the signs of life of the earlier one do not count."""

    rank: int


@dataclass(frozen=True)
class CollectStacks:
    """Find out where the ranks are, for the job's end. StacksCollected follows."""

    closer: bool
    """Ranks that show nothing otherwise may be ended for it."""


class CollectPeek(_Bare):
    """Find out where they are, and let them go on. PeekCollected follows."""


class KeepStacks(_Bare):
    """Write the stacks that were found into the run directory. StacksKept follows."""


@dataclass(frozen=True)
class KeepSignal:
    """It asks for a planned end while this attempt ends by itself: it is for the one that may follow."""

    signum: int


@dataclass(frozen=True)
class ShowFailure:
    """The output shows what belongs to this failure."""

    failure: Failure


@dataclass(frozen=True)
class AwaitAgent:
    """Wait for torchrun's agent, so many seconds at most. AgentLeft follows."""

    seconds: float


@dataclass(frozen=True)
class LookAfter:
    """Look at the world after so many seconds: an event of this kind follows."""

    seconds: float
    kind: type[Settled | RanksSeen | VerdictIsLate | Catching]


@dataclass(frozen=True)
class Finish:
    """The end, with this node's outcome."""

    outcome: Outcome


Effect = (
    TellHub
    | Say
    | TerminateRanks
    | KillRanks
    | SignalRank
    | ForgetBeats
    | CollectStacks
    | CollectPeek
    | KeepSignal
    | KeepStacks
    | ShowFailure
    | AwaitAgent
    | LookAfter
    | Finish
)
Step = tuple["NodeState", list[Effect]]

# --- the state ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """The ranks run, or have ended well and the others are waited for."""

    is_done: bool = False
    """Whether all ranks here have ended well, and node 0 was told."""


@dataclass(frozen=True)
class Settling:
    """A rank has failed, or the ranks could not be started: which one was the first shows in a moment."""

    agent: AgentEnded | None = None
    verdict: Failed | None = None
    """What was told meanwhile."""
    is_longer: bool = False
    """Whether this is the longer time for a rank that has only lost another one."""


@dataclass(frozen=True)
class Failing:
    """This node has told its failure. Its ranks are being ended, and the nodes agree on the first one."""

    mine: Failure
    first: Failure | None = None
    are_ended: bool = False


@dataclass(frozen=True)
class EndingRanks:
    """The ranks are being ended, and the outcome is known."""

    outcome: Outcome
    may_hurry: bool = False
    """Whether Ctrl-C ends their grace."""
    keeps_stacks: bool = False


@dataclass(frozen=True)
class Looking:
    """The job seems to hang: this node says where its ranks are, and waits for what all make of it."""

    why: str
    is_busy: bool = True
    """Whether the ranks are being looked at."""
    is_closer: bool = False
    """Whether that is the closer look."""
    wants_closer: bool = False
    """Whether it was asked for meanwhile."""
    own: Failure | None = None
    """What this node alone would make of it."""
    verdict: Failed | None = None
    """What was told meanwhile."""


@dataclass(frozen=True)
class Leaving:
    """All is done; torchrun's agent is waited for."""

    alone: bool
    split: str = ""
    """As of AllDone."""


Phase = Running | Settling | Failing | EndingRanks | Looking | Leaving


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A planned end was asked for."""

    since: float
    """When all ranks had been told last, on the steady clock; infinite once the user knows of the others."""
    time_up: float
    """When ranks that were not told are ended; infinite if nothing is known of the job's end."""
    told: frozenset[int] = frozenset()
    """The processes that got the signal."""
    reached: frozenset[int] = frozenset()
    """The processes of the ranks for which one has got it."""
    deaf: frozenset[int] = frozenset()
    """Ranks that have not caught the signal, and of which the user was not told yet."""


@dataclass(frozen=True, kw_only=True)
class HangPolicy:
    """What counts as a hang."""

    step: float
    """Seconds without a step of a rank that tells its steps; 0: any."""
    silence: float
    """Seconds in which no rank of the job writes anything; 0: any."""
    start: float
    """Seconds without a step after which a rank's own workers are looked for the first time."""
    is_chosen: bool
    """Whether the user set `step`: then it counts for scripts that tell nothing of evaluations too."""
    again: float
    """Seconds between the first two looks at ranks that make no step."""

    @property
    def interval(self) -> float | None:
        """Seconds between two looks; None if nothing counts as a hang."""
        bounds = [bound / 4 for bound in (self.step, self.silence) if bound]
        return min([1.0, *bounds]) if bounds else None


@dataclass(frozen=True, kw_only=True)
class HangWatch:
    """What is known from earlier looks."""

    policy: HangPolicy
    heard: float = 0.0
    silence: float = 0.0
    """Seconds in which no rank wrote anything."""
    since_end: float = 0.0
    """Seconds since a rank ended."""
    pause: str | None = None
    """What was reported as Paused."""
    is_over: bool = False
    """Whether a stalled rank was reported, which is the last report."""


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """All that a node knows of its ranks, from their start to its outcome."""

    node: str
    place: int
    """In the allocation."""
    ranks: tuple[int, ...]
    is_alone: bool
    """Whether it is the job's only participant: then nobody is asked, and nobody is told."""
    may_restart: bool
    """Whether torchrun's agent decides what a failure means."""
    stop_signal: str
    term_grace: float
    """Seconds that ranks have to save after a SIGTERM of ours."""
    verdict_bound: float
    """Seconds for the verdict on a hang."""
    watch: HangWatch
    phase: Phase = Running()
    begun: frozenset[int] = frozenset()
    ended: Mapping[int, Exited] = field(default_factory=dict)
    stop: Stop | None = None
    deadline: float = 0.0
    """When ranks that were terminated are killed, on the steady clock."""
    lost: tuple[int, ...] = ()
    """Nodes that are known to be lost, by their places in the allocation."""
    network: str = ""
    """That NCCL has taken by its own log; empty if nobody looks."""

    @property
    def failures(self) -> list[RankEnded]:
        """Failed ranks, the first one first; a rank ended by signal after another's 75 has saved too."""
        ends = [one.ended for one in self.ended.values()]
        saved = min((one.time for one in ends if one.status == SAVED), default=None)
        failed = [
            one
            for one in ends
            if one.status not in (DONE, SAVED)
            and not (saved is not None and one.signal and one.time >= saved)
        ]
        return sorted(failed, key=when)

    @property
    def all_have_ended(self) -> bool:
        return len(self.ended) == len(self.ranks)

    @property
    def why_final(self) -> str:
        """Why nothing may follow in this allocation, whatever has failed; empty if something may."""
        is_split = isinstance(self.phase, Leaving) and self.phase.split
        if is_split or any(one.ended.status == SAVED for one in self.ended.values()):
            return "a rank has saved at a planned end"
        return "a planned end was asked for" if self.stop else ""

    def end_of(self, exited: Exited) -> End:
        ended = exited.ended
        return End(
            rank=ended.rank,
            node_rank=self.place,
            node=self.node,
            status=ended.status,
            time=ended.time,
            step=exited.step,
            alone=exited.alone,
        )

    @property
    def ends(self) -> Ends:
        """Of the ranks here that have ended well."""
        well = [one for one in self.ended.values() if one.ended.status in (DONE, SAVED)]
        return Ends.of(map(self.end_of, well))


def step(state: NodeState, event: Event, now: Now) -> Step:
    """What follows from an event."""
    match event:
        case Catching(ranks=ranks):
            return _signal_who_catches(state, ranks, now)
        case PeekCollected(sightings=sightings):
            return state, [TellHub(Peeked(sightings, last=True))]
        case Signs() as signs:
            return _observe(state, signs)
        case NetworkSeen(network=network):
            return replace(state, network=network), []
        case Signalled(signum=signum) if signum in PLANNED and not isinstance(state.phase, Running):
            return state, [KeepSignal(signum)]
    match state.phase:
        case Running() as phase:
            return _running(state, phase, event, now)
        case Settling() as phase:
            return _settling(state, phase, event, now)
        case Failing() as phase:
            return _failing(state, phase, event, now)
        case EndingRanks() as phase:
            return _ending(state, phase, event, now)
        case Looking() as phase:
            return _looking(state, phase, event, now)
        case Leaving() as phase:
            return _leaving(state, phase, event, now)


def _then(effects: Sequence[Effect], following: Step) -> Step:
    state, more = following
    return state, [*effects, *more]


# --- while the ranks run ------------------------------------------------------------------------------------


def _running(state: NodeState, phase: Running, event: Event, now: Now) -> Step:
    match event:
        case RankStarted(rank=rank):
            return _if_done(*_rank_started(state, rank))
        case Exited() as exited:
            state, effects = _rank_exited(state, exited)
            # With restarts left, torchrun's agent decides what a failure means.
            if not state.may_restart and exited.ended in state.failures:
                return _then(effects, _settle(state, None))
            return _if_done(state, effects)
        case AgentEnded() as agent if not phase.is_done:
            return _settle(state, agent)
        case Failed(failure=failure, lost=lost):
            terminated = failure.rank is None and failure.signal == signal.SIGTERM
            grace = state.term_grace if terminated else FAILURE_GRACE
            ending = _end_ranks(replace(state, lost=lost), EndingRanks(to_outcome(failure)), grace, now)
            return _then([ShowFailure(failure)], ending)
        case AllDone() as told:
            return _leave(state, told)
        case Peek():
            return state, [TellHub(Peeked((), last=True)) if state.all_have_ended else CollectPeek()]
        case Look(why=why):
            looking = replace(state, phase=Looking(why))
            if state.all_have_ended:
                return _found(looking, Looking(why), (), now)
            return looking, [CollectStacks(closer=False)]
        case Stopped(left=left):
            return _stop(state, left, now)
        case StopAsked(left=left):
            return state, [TellHub(Stopped(left))]
        case Signalled(signum=signum) if signum in PLANNED:
            return state, [TellHub(Stopped(None))]
        case Signalled(signum=signum):
            return _end_for(state, asked_to_end(state.node, signum, now.wall), now)
    return state, []


def _rank_started(state: NodeState, rank: int) -> Step:
    ended = MappingProxyType({one: exited for one, exited in state.ended.items() if one != rank})
    # Of a rank that starts for the first time a sign of life may be there already.
    effects: list[Effect] = [ForgetBeats(rank)] if rank in state.begun else []
    return replace(state, ended=ended, begun=state.begun | {rank}), effects


def _rank_exited(state: NodeState, exited: Exited) -> Step:
    state = replace(state, ended=MappingProxyType({**state.ended, exited.ended.rank: exited}))
    is_end = not state.may_restart and exited.ended.status in (DONE, SAVED)
    return state, [TellHub(Ended(state.end_of(exited)))] if is_end else []


def _if_done(state: NodeState, effects: list[Effect]) -> Step:
    """Once all ranks here have ended well, node 0 is told; a single participant leaves."""
    if state.phase != Running() or not state.all_have_ended or state.failures:
        return state, effects
    if not state.is_alone:
        saved = sorted(one.ended.rank for one in state.ended.values() if one.ended.status != DONE)
        return replace(state, phase=Running(is_done=True)), [*effects, TellHub(Done(tuple(saved)))]
    alone = len(state.ended) > 1 and all(one.alone for one in state.ended.values())
    return replace(state, phase=Leaving(alone)), [*effects, AwaitAgent(AGENT_EXIT)]


def _leave(state: NodeState, told: AllDone) -> Step:
    return replace(state, phase=Leaving(told.alone, told.split)), [AwaitAgent(AGENT_EXIT)]


def _leaving(state: NodeState, phase: Leaving, event: Event, now: Now) -> Step:
    if not isinstance(event, AgentLeft):
        return state, []
    said: list[Effect] = []
    if state.stop and state.stop.deaf:
        who = f"{listed(sorted(state.stop.deaf))} on {state.node}"
        said = [Say(f"a stop was asked for, but {who} caught no {state.stop_signal} and has ended")]
    if phase.split:
        return state, [*said, Finish(Outcome(status=1, error=phase.split))]
    if not state.ended:
        done = Outcome(status=DONE, node=state.node, time=now.wall, alone=phase.alone)
        return state, [*said, Finish(done)]
    wells = ((f"rank {one.ended.rank}", _well(state, one.ended)) for one in state.ended.values())
    return state, [*said, Finish(replace(outcome.of_job(wells), alone=phase.alone))]


def _well(state: NodeState, ended: RankEnded) -> Outcome:
    status = DONE if ended.status == DONE else SAVED
    return Outcome(status=status, rank=ended.rank, node=state.node, time=ended.time)


# --- a failure of this node ---------------------------------------------------------------------------------


def _settle(state: NodeState, agent: AgentEnded | None) -> Step:
    return replace(state, phase=Settling(agent)), [LookAfter(SETTLE, Settled)]


def _settling(state: NodeState, phase: Settling, event: Event, now: Now) -> Step:
    match event:
        case Exited() as exited:
            return _rank_exited(state, exited)
        case AgentEnded() as agent:
            return replace(state, phase=replace(phase, agent=phase.agent or agent)), []
        case Failed() as failed:
            return replace(state, phase=replace(phase, verdict=failed)), []
        case Settled(said=said):
            return _settled(state, phase, said, now)
    return state, []


def _settled(state: NodeState, phase: Settling, said: Mapping[int, RankTrace], now: Now) -> Step:
    failures = [failure_of(state.node, state.place, one, said[one.rank]) for one in state.failures]
    is_echo = bool(failures) and blame.is_consequence(blame.first(failures))
    if is_echo and state.is_alone and not phase.is_longer:
        return replace(state, phase=replace(phase, is_longer=True)), [LookAfter(SETTLE_ECHO, Settled)]
    mine = _first_failure(state, failures, phase.agent or AgentEnded(), now)
    state, effects = _end_ranks(state, Failing(mine), FAILURE_GRACE, now)
    if state.is_alone:
        return _agree(state, Failing(mine), mine, effects)
    effects = [TellHub(Fail(mine)), *effects]
    if phase.verdict:
        return _agree(replace(state, lost=phase.verdict.lost), Failing(mine), phase.verdict.failure, effects)
    return state, [*effects, LookAfter(VERDICT, VerdictIsLate)]


def _first_failure(state: NodeState, failures: Sequence[Failure], agent: AgentEnded, now: Now) -> Failure:
    """The failure of this node: its first failed rank's, else what kept the ranks from starting."""
    if failures:
        ends = state.ends if state.is_alone else NO_ENDS
        first = blame.first(failures, ends, world=len(state.ranks))
        return replace(first, error=first.error or agent.error)
    error = agent.error or "the ranks ended without a status"
    ended = Outcome(status=agent.status, node=state.node, time=now.wall, error=error)
    return to_failure(state.place, ended)


def _failing(state: NodeState, phase: Failing, event: Event, now: Now) -> Step:
    match event:
        case Failed(failure=failure, lost=lost) if phase.first is None:
            return _agree(replace(state, lost=lost), phase, failure, [])
        case VerdictIsLate() if phase.first is None:
            return _agree(state, phase, phase.mine, [])
        case RanksSeen(alive=alive):
            return _kill_if_due(state, alive, now)
        case RanksKilled() if phase.first is not None:
            return state, [Finish(to_outcome(phase.first))]
        case RanksKilled():
            return replace(state, phase=replace(phase, are_ended=True)), []
    return state, []


def _agree(state: NodeState, phase: Failing, first: Failure, effects: list[Effect]) -> Step:
    """The first failure of the whole job is known."""
    state = replace(state, phase=replace(phase, first=first))
    ends: list[Effect] = [Finish(to_outcome(first))] if phase.are_ended else []
    return state, [*effects, ShowFailure(first), *ends]


# --- ranks are ended ----------------------------------------------------------------------------------------


def _end_ranks(state: NodeState, phase: Failing | EndingRanks, grace: float, now: Now) -> Step:
    """SIGTERM to all, and SIGKILL when none is left or their grace is over."""
    return (
        replace(state, phase=phase, deadline=now.steady + grace),
        [TerminateRanks(), LookAfter(0.0, RanksSeen)],
    )


def _kill_if_due(state: NodeState, alive: bool, now: Now) -> Step:
    if alive and now.steady < state.deadline:
        return state, [LookAfter(ALIVE, RanksSeen)]
    return state, [KillRanks()]


def _ending(state: NodeState, phase: EndingRanks, event: Event, now: Now) -> Step:
    match event:
        case RanksSeen(alive=alive):
            return _kill_if_due(state, alive, now)
        case RanksKilled() if phase.keeps_stacks:
            return state, [KeepStacks()]
        case RanksKilled() | StacksKept():
            return state, [Finish(phase.outcome)]
        case Signalled(signum=signal.SIGINT) if phase.may_hurry:
            return replace(state, deadline=now.steady), []
    return state, []


def _end_for(state: NodeState, mine: Outcome, now: Now) -> Step:
    """SIGTERM (scancel, qdel) lets ranks save if time allows, Ctrl-C does not; no requeue follows."""
    grace = state.term_grace if mine.signal == signal.SIGTERM else FAILURE_GRACE
    told: list[Effect] = [] if state.is_alone else [TellHub(Fail(to_failure(state.place, mine)))]
    return _then(told, _end_ranks(state, EndingRanks(mine, may_hurry=True), grace, now))


# --- a hang -------------------------------------------------------------------------------------------------


def _observe(state: NodeState, signs: Signs) -> Step:
    """Whether the ranks go on, as far as a look at them shows; what is new of it is reported."""
    watch, policy = state.watch, state.watch.policy
    if watch.is_over:
        return state, []
    why = f"no step for {policy.step:g} s"
    is_paused = bool(policy.step) and signs.is_paused
    if policy.step and (signs.is_stalled or (is_paused and policy.is_chosen)):
        return replace(state, watch=replace(watch, is_over=True)), [TellHub(Stalled(why))]
    reports: list[Effect] = []
    # Whoever has ended well may be needed by others, who perhaps have never made a step.
    since_end = watch.since_end + signs.passed if signs.any_ended else 0.0
    pause = "" if policy.step and since_end > policy.step else None
    if is_paused:
        pause = why
    if pause != watch.pause:
        reports.append(TellHub(Paused(pause)))
    silence = watch.silence + signs.passed if signs.heard == watch.heard else 0.0
    was_silent, is_silent = watch.silence > policy.silence, silence > policy.silence
    if policy.silence and was_silent != is_silent:
        text = f"no rank has written anything for {policy.silence:g} s (--silence-timeout)"
        reports.append(TellHub(NoOutput(text if is_silent else "")))
    watch = replace(watch, heard=signs.heard, silence=silence, since_end=since_end, pause=pause)
    return replace(state, watch=watch), reports


def _looking(state: NodeState, phase: Looking, event: Event, now: Now) -> Step:
    match event:
        case StacksCollected(sightings=sightings):
            return _found(state, phase, sightings, now)
        case LookCloser() if phase.is_busy:
            return replace(state, phase=replace(phase, wants_closer=True)), []
        case LookCloser():
            return _look_closer(state, phase)
        case Failed() as failed if phase.is_busy:
            return replace(state, phase=replace(phase, verdict=failed)), []
        case Failed(failure=failure, lost=lost):
            return _end_hang(replace(state, lost=lost), phase, failure, now)
        case AllDone() as told:  # the last rank ended well as we were asked to look
            return _leave(state, told)
        case VerdictIsLate():
            return _end_hang(state, phase, phase.own, now)
    return state, []


def _look_closer(state: NodeState, phase: Looking) -> Step:
    closer = replace(phase, is_busy=True, is_closer=True, wants_closer=False)
    return replace(state, phase=closer), [CollectStacks(closer=True)]


def _found(state: NodeState, phase: Looking, sightings: tuple[RankSnapshot, ...], now: Now) -> Step:
    """The ranks were looked at: node 0 is told, a single participant looks closer and judges by itself."""
    if state.is_alone:
        if sightings and not phase.is_closer:
            return _look_closer(state, phase)
        return _end_hang(state, phase, blame.verdict(sightings, phase.why, unseen=(), now=now.wall), now)
    effects: list[Effect] = [TellHub(Seen(sightings, last=True))]
    if not phase.is_closer:
        own = blame.verdict(sightings, phase.why, unseen=(), now=now.wall)
        phase = replace(phase, own=own)
        effects.append(LookAfter(state.verdict_bound, VerdictIsLate))
    phase = replace(phase, is_busy=False)
    if phase.verdict:
        verdict = phase.verdict
        return _then(effects, _end_hang(replace(state, lost=verdict.lost), phase, verdict.failure, now))
    if phase.wants_closer:
        return _then(effects, _look_closer(state, phase))
    return replace(state, phase=phase), effects


def _end_hang(state: NodeState, phase: Looking, failure: Failure | None, now: Now) -> Step:
    stuck = Outcome(status=STUCK, node=state.node, time=now.wall, error=f"stuck, {phase.why}")
    ending = EndingRanks(to_outcome(failure) if failure else stuck, keeps_stacks=True)
    return _end_ranks(state, ending, 0.0, now)


# --- the planned end ----------------------------------------------------------------------------------------


def _stop(state: NodeState, left: float | None, now: Now) -> Step:
    time_up = float("inf") if left is None else now.steady + left - min(LAST_CALL, left / 2)
    if state.stop is not None:  # the job's end is known only now
        return replace(state, stop=replace(state.stop, time_up=time_up)), []
    stop = Stop(since=now.steady, time_up=time_up)
    return replace(state, stop=stop), [LookAfter(0.0, Catching)]


def _signal_who_catches(
    state: NodeState, ranks: Mapping[int, tuple[int | None, tuple[int, ...]]], now: Now
) -> Step:
    """Sends the stop signal to each rank once it catches it, never to torchrun's agent: it would die. A rank
    that torchrun starts anew has another process id, and is told too, as is what a shell starts next."""
    stop = state.stop
    assert stop is not None
    news = [one for _, heeding in ranks.values() for one in heeding if one not in stop.told]
    effects: list[Effect] = [SignalRank(pid) for pid in news]
    reached = stop.reached | {pid for pid, heeding in ranks.values() if pid is not None and heeding}
    stop = replace(stop, told=stop.told | {*news}, reached=reached)
    untold = [rank for rank, (_, heeding) in ranks.items() if not heeding]
    is_said = stop.since == float("inf")
    deaf = set() if is_said else {rank for rank in untold if ranks[rank][0] not in reached}
    stop = replace(stop, deaf=stop.deaf & state.ended.keys() | deaf)
    if not untold:
        stop = replace(stop, since=now.steady)
    elif now.steady > stop.time_up:
        return _then(effects, _time_up(replace(state, stop=stop), untold, now))
    elif now.steady - stop.since > SILENT_STOP:
        stop = replace(stop, since=float("inf"), deaf=stop.deaf - {*untold})
        silent, node, name = listed(untold), state.node, state.stop_signal
        effects.append(Say(f"a stop was asked for, but {silent} on {node} catches no {name} and runs on"))
    nap = CATCHES if untold and stop.since < float("inf") else CATCHES_LATER
    return replace(state, stop=stop), [*effects, LookAfter(nap, Catching)]


def _time_up(state: NodeState, ranks: Sequence[int], now: Now) -> Step:
    """The job goes on as another: this one ends as by SIGTERM before the scheduler ends it for good."""
    if not isinstance(state.phase, Running):
        return state, []
    why = f"the job's time is up, and {listed(ranks)} on {state.node} catches no {state.stop_signal}"
    mine = asked_to_end(state.node, int(signal.SIGTERM), now.wall)
    return _end_for(state, replace(mine, error=f"{why}: {mine.error}"), now)
