"""Writes the report of a run as one HTML page that needs nothing else: style and charts stand in it, and no
script. Begin at `html`.

The functions are pure. Every text goes through `_safe`, which makes it one printable, escaped line: nodes,
commands and errors may hold anything. Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import math
import shlex
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from entrypoint import __version__
from entrypoint.core.errors import DONE, SAVED, UNAVAILABLE
from entrypoint.core.plain import counted, plain
from entrypoint.job.outcome import ALONE
from entrypoint.record import reading
from entrypoint.record.compare import Pair, in_short
from entrypoint.record.traces import Series
from entrypoint.report import charts
from entrypoint.report.charts import Part, duration, percent_of, shown
from entrypoint.report.facts import RATES, AttemptFacts, RunFacts, moment, number, text, texts

STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--dim:#59636e;--line:#d5dae0;--soft:#f4f6f8;--good:#0a6b3d;--bad:#a8231c;
--wait:#7a5200;
--c1:#0068b3;--c2:#c25400;--c3:#00805e;--c4:#8b4f9f;--c5:#8a6d00;--c6:#5f6b76;--c7:#b0305f;--c8:#2f7f8c;--c9:#b4bdc7;
color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--bg:#14181d;--fg:#e4e8ec;--dim:#9aa5b1;--line:#38414b;
--soft:#1d2329;
--good:#5fd39a;--bad:#ff8a80;--wait:#f0b860;--c1:#58b0f5;--c2:#ff9a52;--c3:#46cba3;--c4:#cf9be0;
--c5:#e0c04a;--c7:#ff8fb4;--c8:#6cc7d6;
--c6:#97a3af;--c9:#4d5964}}
@media print{:root{--bg:#fff;--fg:#000;--dim:#444;--line:#bbb;--soft:#fff;--good:#0a6b3d;--bad:#a8231c;
--wait:#7a5200;
--c1:#0068b3;--c2:#c25400;--c3:#00805e;--c4:#8b4f9f;--c5:#8a6d00;--c6:#5f6b76;--c7:#b0305f;
--c8:#2f7f8c;--c9:#b4bdc7}figure,tr,.end,.tiles{break-inside:avoid}
h2,h3,summary,figcaption,thead{break-after:avoid}
details::details-content{content-visibility:visible}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:72rem;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.35rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2rem 0 .5rem;
border-bottom:1px solid var(--line)}
.end{font-size:1.05rem;margin:.5rem 0 1rem;padding:.6rem .8rem;border-left:.3rem solid var(--c6);
background:var(--soft)}
.end.good{border-color:var(--good)}.end.bad{border-color:var(--bad)}.end.wait{border-color:var(--wait)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.5rem;margin:0}
.tiles div{background:var(--soft);padding:.4rem .6rem}.tiles dt{color:var(--dim);font-size:.8rem}
.tiles dd{margin:0;font-size:1.1rem;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
@media print{.charts{grid-template-columns:1fr 1fr}}
figure{margin:0 0 .5rem;min-width:0}figcaption{font-weight:600}
svg{display:block;width:100%;height:auto;overflow:visible}svg.strip{height:revert-layer}
svg text{fill:var(--dim);font-size:12px;font-family:inherit}
.said,.dim,.legend{color:var(--dim);font-size:.85rem;margin:.2rem 0}
.key{display:inline-block;margin-right:1rem}.key i{display:inline-block;width:.8rem;height:.8rem;
margin-right:.35rem;
vertical-align:-1px;background:var(--c6)}.key i.save{width:2px;background:var(--fg)}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--dim);stroke-width:1}
.mark{stroke:var(--c6);stroke-width:1;stroke-dasharray:4 3}.save{stroke:var(--fg);stroke-width:1.5}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.band{opacity:.25}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;border-bottom:1px solid var(--line)}
th{color:var(--dim);font-weight:500}.wide{overflow-x:auto}.wide th,.wide td{overflow-wrap:normal}
.wide td{min-width:4.5rem}td.n,th.n{text-align:right;white-space:nowrap}.pairs th{width:11rem}
.when td:last-child{width:100%}.wide th{overflow-wrap:normal}
.when td:first-child,.when td:nth-child(2){white-space:nowrap}
pre{margin:.4rem 0;padding:.6rem;background:var(--soft);
font:13px/1.45 ui-monospace,"DejaVu Sans Mono",monospace;
white-space:pre-wrap}
details{margin:.4rem 0}summary{cursor:pointer;font-weight:600}
@media (max-width:40rem){
.wide td{overflow-wrap:anywhere}.wide th,.wide td{min-width:0;padding-right:.4rem;font-size:.8rem}
.wide.when td:first-child{white-space:normal;overflow-wrap:normal;min-width:4.8rem}
.wide td.n,.wide th.n{white-space:normal}.stack thead{display:none}.stack tr{display:block;padding:.3rem 0;
border-bottom:1px solid var(--line)}.wide.stack td{display:block;border:0;padding:0;font-size:.9rem}
.stack td[data-of]::before{content:attr(data-of) ": ";color:var(--dim)}.stack td:empty{display:none}
.pairs th{width:7.5rem}body{padding:.7rem}}
""" + "".join(
    f".line.c{at}{{stroke:var(--c{at})}}.fill.c{at},.dot.c{at},.band.c{at}{{fill:var(--c{at})}}"
    f".key i.c{at}{{background:var(--c{at})}}"
    for at in range(1, 10)
)
PARTS = {
    "script": "job script",
    "task": "task and container",
    "plan": "plan and addresses",
    "nodes": "meeting of the nodes",
    "torch": "import of torch",
    "ranks": "start of the ranks",
}
"""The parts of a start, as manifest.json names them, in their order."""
QUEUE = "in the queue"
COLOURS = {"script": 8, "task": 2, "plan": 3, "nodes": 4, "torch": 1, "ranks": 7}
FIRST_STEP = "until the first step"
TRAINING = "training"
MOST_ROWS = 100
MOST_ATTEMPTS = 30
FEW = 16
"""Ranks whose table is not folded."""
MOST_BARS = 512
FEWEST_STEPS = 20
"""With less there is no distribution."""
MOST_NODES = 12
"""Names of nodes that are listed one by one."""
STRAGGLES = 1.25
"""A rank is named if the median rate of all is that many times its own."""
WAITS = 0.05
"""Or if it waits for its data longer than the median, by this share of its time."""


def html(found: RunFacts, pair: Pair | None = None, now: float | None = None) -> str:
    """The page. `pair`: this run and another; `now`: when it is made, in Unix seconds."""
    kind, end = result(found)
    sections = [
        _tiles(found),
        _missing(found),
        _failure(found),
        _time_line(found),
        _curves(found),
        _step_times(found),
        _ranks(found),
        _comparison(pair),
        _what_ran(found),
        _nodes(found),
        _doctor(found),
        _settings(found),
        _log(found),
    ]
    return document(found.name, kind, end, sections, now)


def document(name: str, kind: str, end: str, sections: Iterable[str], now: float | None = None) -> str:
    """A page of these sections, of which some may be empty. `kind`: good, wait or bad, for `end`, its first
    sentence; `now`: when it is made, in Unix seconds."""
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time.time() if now is None else now))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_safe(name)}: {_safe(end)[:80]}</title><style>{STYLE}</style></head><body>"
        f'<h1>{_safe(name)}</h1><p class="end {kind}">{_safe(end)}</p>'
        + "\n".join(filter(None, sections))
        + f'<p class="dim">Made by apptrain {_safe(__version__)} on {made}. All times are UTC. '
        "What looks like a secret is shown as &lt;secret&gt;.</p></body></html>\n"
    )


def result(found: RunFacts) -> tuple[str, str]:
    """(good, wait, or bad; the run's end in one sentence)."""
    if not found.attempts:
        return "wait", "Nothing tells that this run has begun."
    last = found.attempts[-1]
    ended, status = last.outcome, last.status
    if status is None:
        return "wait", "No end is known: the run goes on, or its first node was lost."
    if status == DONE:
        if reading.trained_alone(last.known):
            ranks = text(last.known, "world_size") or "several"
            return "wait", f"Done{_achieved(found)}. But {ALONE.format(ranks)}."
        return "good", f"Done{_achieved(found)}."
    if status == SAVED:
        return "wait", "Saved at a planned end: the same command with this run directory goes on."
    why = f": {_who(last)}" if ended else ""
    if status == UNAVAILABLE and ended and ended.rank is None:
        return "bad", f"The nodes did not come together, status {status}{why}"
    if not last.has_started:
        return "bad", f"It failed before its ranks started, status {status}{why}"
    return "bad", f"It failed, status {status}{why}"


def _who(last: AttemptFacts) -> str:
    ended = last.outcome
    if ended is None:
        return ""
    rank = "" if ended.rank is None else f"rank {ended.rank} on "
    where = ended.node or "a node"
    signal = f" (signal {ended.signal})" if ended.signal else ""
    return f"{rank}{where}{signal}: {ended.reason}"


def _achieved(found: RunFacts) -> str:
    result, words = found.result, []
    accuracy, steps = number(result, "accuracy"), number(result, "steps")
    if accuracy is not None:
        words.append(f"{text(result, 'split') or 'the'} accuracy {percent_of(accuracy)}")
    if steps is not None:
        words.append(f"after {counted(int(steps), 'step')}")
    times = [one.seconds for one in found.attempts]
    known = [seconds for seconds in times if seconds is not None]
    if known:
        bound = "at least " if len(known) < len(times) else ""
        words.append(f"in {bound}{duration(sum(known))}")
    if nodes := found.node_names:
        words.append(f"on {counted(len(nodes), 'node')}")
    if len(found.attempts) > 1:
        words.append(f"in {counted(len(found.attempts), 'attempt')}")
    return f": {' '.join(words)}" if words else ""


def _tiles(found: RunFacts) -> str:
    result = found.result
    last = found.attempts[-1].known if found.attempts else {}
    tiles: list[tuple[str, str]] = []

    def add(name: str, key: str, shape: Any) -> None:
        value = number(result, key)
        if value is not None:
            tiles.append((name, shape(value)))

    add("accuracy", "accuracy", percent_of)
    add("steps", "steps", lambda value: f"{value:.0f}" if abs(value) < 1e15 else shown(value))
    add("images/s", "images_per_s", shown)
    for name, unit in RATES.items():
        rates = [rate for rate in found.trace[name].floats if math.isfinite(rate)]
        if rates and number(result, name) is None:
            tiles.append((f"{unit}, median", shown(statistics.median(rates))))
    add("TFLOP/s", "tflop_per_s", shown)
    add("of the GPUs' peak", "peak_share", percent_of)
    add("training", "train_s", duration)
    add("to the first step", "first_step_s", duration)
    add("peak memory of a rank", "peak_memory_bytes", _bytes)
    add("peak GPU memory of a rank", "peak_gpu_memory_bytes", _bytes)
    size, nodes = number(last, "world_size"), len(found.node_names)
    if nodes:
        ranks = f", {counted(int(size), 'rank')}" if size else ""
        tiles.append(("where", f"{counted(nodes, 'node')}{ranks}"))
    for name in ("device", "scheduler", "job_id"):
        if value := text(last, name) or text(found.plan, name):
            tiles.append((name.replace("_id", ""), value))
    if len(found.attempts) > 1:
        tiles.append(("attempts", str(len(found.attempts))))
    rows = "".join(f"<div><dt>{_safe(name)}</dt><dd>{_safe(value)}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles">{rows}</dl>' if rows else ""


def _missing(found: RunFacts) -> str:
    if not found.missing:
        return ""
    rows = "".join(f"<li>{_safe(line)}</li>" for line in found.missing[:MOST_ROWS])
    return f"<h2>What is missing</h2><ul>{rows}</ul>"


def _failure(found: RunFacts) -> str:
    name, tail = found.tail
    if not tail and not found.stacks:
        return ""
    shown_tail = f"<p>The end of {_safe(name)}:</p>{_pre(tail)}" if tail else ""
    stacks = found.stacks
    kept = f"<p>Where the ranks were is in {_names(stacks)}.</p>" if stacks else ""
    return f"<h2>The failure</h2>{shown_tail}{kept}"


def _time_line(found: RunFacts) -> str:
    """A strip for each attempt, one for the parts of the last start, and a table of what happened when."""
    attempts = [one for one in found.attempts if one.began is not None][-MOST_ATTEMPTS:]
    events = _events(found)
    if not events:
        return ""
    drawn = []
    if attempts:
        begin = min((one.began or 0.0) - one.queued for one in attempts)
        last_sign = attempts[-1].last_sign or begin
        end = max([*(when for when, _ in events), begin, last_sign])
        rows = [(_row_name(one), _parts(found, one, end)) for one in attempts]
        bound = "at least " if attempts[-1].ended is None else ""
        queued = sum(one.queued for one in attempts)
        of_queue = f", {duration(queued)} of it in the queue" if queued else ""
        drawn.append(
            charts.strips(
                "The whole run",
                rows,
                begin=begin,
                end=end,
                marks=[when for _, when in found.saves][:500],
                said=f"{counted(len(found.attempts), 'attempt')} in {bound}{duration(end - begin)}{of_queue}",
            )
        )
        first = [part for part in _parts(found, attempts[-1], end) if part.name not in (QUEUE, TRAINING)]
        if first:
            words = ", ".join(f"{part.name} {duration(part.end - part.begin)}" for part in first)
            drawn.append(
                charts.strips(
                    "The start of the last attempt" if len(attempts) > 1 else "The start",
                    [("", first)],
                    begin=first[0].begin,
                    end=first[-1].end,
                    said=words,
                )
            )
    table = table_of(["time", "after", "what"], list(_dated(events)), style="when")
    note = '<p class="dim">When the job was submitted, and how long it queued, is not recorded.</p>'
    known = any("queued_s" in one.known for one in attempts)
    return f"<h2>Time line</h2>{''.join(drawn)}{table}{'' if known else note}"


def _dated(events: Sequence[tuple[float, str]]) -> Iterator[list[str]]:
    """The rows of the events; the date stands where it changes."""
    before = ""
    for when, what in events:
        date, of_day = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(when)).split()
        yield [of_day if date == before else f"{date} {of_day}", duration(when - events[0][0]), what]
        before = date


def _row_name(attempt: AttemptFacts) -> str:
    status = attempt.status
    ended = "no end is known" if status is None else "done" if status == DONE else f"status {status}"
    return f"attempt {attempt.number}: {ended}"


def _parts(found: RunFacts, attempt: AttemptFacts, end: float) -> list[Part]:
    """What an attempt spent its time on, one part after another."""
    at = attempt.began
    if at is None:
        return []
    parts = [Part(QUEUE, at - attempt.queued, at, 9)] if attempt.queued else []
    for name in [*(name for name in PARTS if name in attempt.parts), *(attempt.parts.keys() - PARTS.keys())]:
        parts.append(Part(PARTS.get(name, name), at, at + attempt.parts[name], COLOURS.get(name, 6)))
        at += attempt.parts[name]
    last = max(at, attempt.ended or end)
    first = _first_step(found, attempt)
    if first is not None and at < first <= last:
        parts.append(Part(FIRST_STEP, at, first, 5))
        at = first
    return [*parts, Part(TRAINING, at, last, 6)]


def _first_step(found: RunFacts, attempt: AttemptFacts) -> float | None:
    """When the first step of this attempt was done, in Unix seconds."""
    began, first = moment(found.result.get("began")), number(found.result, "first_step_s")
    if found.result.get("attempt") != attempt.number or began is None or first is None:
        return None
    return began + first


def _events(found: RunFacts) -> list[tuple[float, str]]:
    events: list[tuple[float, str]] = []
    for one in found.attempts:
        if one.began is not None and one.queued:
            events.append((one.began - one.queued, "the job is submitted"))
        if one.began is not None and one.started is not None:
            again = (
                f", from {text(one.known.get('checkpoint'), 'path')}" if one.known.get("checkpoint") else ""
            )
            events.append((one.began, f"attempt {one.number} begins{again}"))
            events.append((one.started, "the ranks have started"))
        if (first := _first_step(found, one)) is not None:
            events.append((first, "the first step is done"))
        if one.ended is not None and one.status is not None:
            status = "done" if one.status == DONE else f"status {one.status}"
            why = f": {_who(one)}" if one.outcome and one.status not in (DONE, SAVED) else ""
            events.append((one.ended, f"attempt {one.number} ends, {status}{why}"))
    saves = sorted((when, step) for step, when in found.saves)
    kept = saves if len(saves) <= 20 else [*saves[:10], *saves[-10:]]
    events += [(when, f"checkpoint of step {step}") for when, step in kept]
    events = sorted(event for event in events if 0 < event[0] < 2**40)
    if len(events) > MOST_ROWS:
        half = MOST_ROWS // 2
        left_out = (events[half][0], f"... {len(events) - 2 * half} more ...")
        events = [*events[:half], left_out, *events[-half:]]
    return events


def _curves(found: RunFacts) -> str:
    trace = found.trace
    marks = [
        step
        for one in found.attempts
        if (step := number(one.known.get("checkpoint"), "step")) is not None and one.number
    ]
    final = number(found.result, "accuracy")
    accuracy = {"while training": trace["accuracy"]}
    if final is not None and (steps := number(found.result, "steps")) and text(found.result, "split"):
        accuracy[f"{text(found.result, 'split')}, at the end"] = _single(int(steps), final)
    drawn = [
        charts.curves("Loss", {"loss": trace["loss"]}, marks=marks),
        charts.curves("Accuracy", accuracy, marks=marks, dots=True, percent=True),
        charts.curves("Learning rate", {"learning rate": trace["lr"]}, marks=marks),
        *(
            charts.curves(f"Throughput, {unit}", {"rate": trace[name]}, unit=f" {unit}", marks=marks)
            for name, unit in RATES.items()
        ),
    ]
    if not any(drawn):
        return ""
    note = (
        "The line is the mean of neighbouring steps, and the band reaches from the least to the most."
        if len(trace["loss"]) > charts.BUCKETS
        else ""
    )
    note += " A dashed line is where an attempt went on from a checkpoint." if marks else ""
    note = f'<p class="dim">{note}</p>' if note else ""
    return f'<h2>Training</h2><div class="charts">{"".join(drawn)}</div>{note}'


def _single(step: int, value: float) -> Series:
    series = Series()
    series.put(step, value)
    return series


def _step_times(found: RunFacts) -> str:
    batch = number(found.config, "batch_size")
    rates = [rate for rate in found.trace["images_per_s"].floats if math.isfinite(rate) and rate > 0]
    parts = _step_parts(found)
    if not batch or batch <= 0 or len(rates) < FEWEST_STEPS:
        return f'<h2>Steps</h2><div class="charts">{parts}</div>' if parts else ""
    times = sorted(batch / rate for rate in rates)
    at = {share: times[min(len(times) - 1, int(share * len(times)))] for share in (0.5, 0.95, 0.99)}
    low, high = times[0], max(at[0.99], times[0] * 1.001)
    count = max(5, min(40, len(times) // 4))
    edges = [low + (high - low) * place / count for place in range(count + 1)]
    below = [*(bisect_left(times, edge) for edge in edges[:-1]), len(times)]
    counts = [below[at + 1] - below[at] for at in range(count)]
    longest = times[-1]
    said = (
        f"half of the {len(times)} steps take up to {duration(at[0.5])}, 95 % up to {duration(at[0.95])}, "
        f"99 % up to {duration(at[0.99])}, the longest {duration(longest)}"
    )
    if longest > high:
        said += "; the last bar holds all longer ones too"
    factor, unit = (1e3, "ms") if high < 1 else (1.0, "s")
    chart = charts.bars(
        "Step times", [factor * edge for edge in edges], counts, x_label=f"{unit} a step", said=said
    )
    return f'<h2>Steps</h2><div class="charts">{chart}{parts}</div>'


def _step_parts(found: RunFacts) -> str:
    """What the ranks' time in the loop went to, as far as result.json tells."""
    ranks = _rank_rows(found)
    whole = [value for rank in ranks if (value := number(rank, "train_s"))]
    if not whole:
        return ""
    mean, left = statistics.fmean(whole), statistics.fmean(whole)
    rows = []
    names = sorted({name for rank in ranks for name in rank if name.endswith("_s") and name != "train_s"})
    for name in [name for name in names if not name.endswith("_per_s")][:12]:
        known = [value for rank in ranks if (value := number(rank, name)) is not None]
        if not known:
            continue  # As the exchange on GPUs, which no rank times: it is part of the rest.
        spent = statistics.fmean(known)
        left -= spent
        rows.append([_part_name(name), duration(spent), f"{100 * spent / mean:.1f} %"])
    if left >= 0:
        rest = "the rest" if len(rows) > 1 else "compute, communication and the rest"
        rows.append([rest, duration(left), f"{100 * left / mean:.1f} %"])
    held = number(found.result.get("checkpoints"), "held_s")
    if held is not None:
        rows.append(["of it, held up by checkpoints", duration(held), f"{100 * held / mean:.1f} %"])
    table = table_of(["of the time in the loop", "mean of the ranks", "share"], rows, numbers=(1, 2))
    return f"<figure><figcaption>Parts of the steps</figcaption>{table}</figure>"


def _part_name(name: str) -> str:
    known = {
        "input_wait_s": "waiting for data",
        "sync_wait_s": "exchanging with other ranks, or waiting for them",
    }
    return known.get(name, name[:-2].replace("_", " "))


def _rank_rows(found: RunFacts) -> list[Mapping[str, Any]]:
    ranks = found.result.get("ranks")
    return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []


def _ranks(found: RunFacts) -> str:
    ranks = _rank_rows(found)
    if not ranks:
        return ""
    named = stragglers(ranks)
    said = "".join(f"<li>{_safe(line)}</li>" for line in named[:20])
    verdict = f"<ul>{said}</ul>" if said else "<p>No rank stands out.</p>" if len(ranks) > 1 else ""
    slowest = sorted(ranks, key=lambda rank: number(rank, "images_per_s") or 0.0)
    few = ranks if len(ranks) <= MOST_ROWS else slowest[:MOST_ROWS]
    rows = [
        [
            text(rank, "rank"),
            text(rank, "node"),
            _or_dash(number(rank, "images_per_s"), shown),
            _or_dash(number(rank, "input_wait_s"), duration),
            _or_dash(number(rank, "peak_memory_bytes"), _bytes),
            _or_dash(number(rank, "peak_gpu_memory_bytes"), _bytes),
        ]
        for rank in few
    ]
    heads = ["rank", "node", "images/s", "waits for data", "peak memory", "peak GPU memory"]
    table = table_of(heads, rows, numbers=(2, 3, 4, 5))
    note = (
        f'<p class="dim">The {len(few)} slowest of {len(ranks)} ranks.</p>' if len(few) < len(ranks) else ""
    )
    table = (
        f"<details{' open' if len(few) <= FEW else ''}><summary>All ranks</summary>{table}{note}</details>"
    )
    return f"<h2>Ranks</h2>{verdict}{_spread(ranks)}{_rank_charts(ranks)}{table}"


def _rank_charts(ranks: Sequence[Mapping[str, Any]]) -> str:
    """A bar for each rank."""
    if not 3 <= len(ranks) <= MOST_BARS:
        return ""
    drawn = ""
    for title, name, shape in (
        ("Images per second of each rank", "images_per_s", shown),
        ("Seconds that each rank waits for data", "input_wait_s", duration),
    ):
        values = [max(0.0, number(rank, name) or 0.0) for rank in ranks]
        edges = [at - 0.5 for at in range(len(ranks) + 1)]
        said = f"from {shape(min(values))} to {shape(max(values))}"
        drawn += charts.bars(title, edges, values, x_label="rank", said=said) if any(values) else ""
    return f'<div class="charts">{drawn}</div>'


def _spread(ranks: Sequence[Mapping[str, Any]]) -> str:
    rates = [rate for rank in ranks if (rate := number(rank, "images_per_s")) is not None]
    if len(rates) < 2:
        return ""
    low, middle, high = min(rates), statistics.median(rates), max(rates)
    return (
        f"<p>Images per second of a rank: {_safe(shown(low))} to {_safe(shown(high))}, "
        f"half of them up to {_safe(shown(middle))}.</p>"
    )


def stragglers(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each rank that is much slower than the others, or waits much longer for its data."""
    if len(ranks) < 2:
        return []
    found = []
    usual_rate, usual_wait = _median(ranks, "images_per_s"), _median(ranks, "input_wait_s")
    for rank in ranks:
        who = f"rank {text(rank, 'rank')} on {text(rank, 'node')}"
        rate, wait, whole = (number(rank, name) for name in ("images_per_s", "input_wait_s", "train_s"))
        if rate and usual_rate and rate * STRAGGLES < usual_rate:
            found.append(f"{who} makes {shown(rate)} images/s, the median of all is {shown(usual_rate)}.")
        if wait and whole and usual_wait is not None and wait - usual_wait > WAITS * whole:
            found.append(
                f"{who} waits {duration(wait)} for its data, the median of all is {duration(usual_wait)}."
            )
        if len(found) >= MOST_ROWS:
            break
    return found


def _median(ranks: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [value for rank in ranks if (value := number(rank, name)) is not None]
    return statistics.median(values) if values else None


def _comparison(pair: Pair | None) -> str:
    if pair is None:
        return ""
    other = pair.runs[1]
    rows = [
        [
            one.name,
            *map(in_short, one.values),
            one.rule if one in pair.explained else "",
        ]
        for one in pair.differ[:MOST_ROWS]
    ]
    heads = ["", "this run", "the other", "why it matters"]
    table = table_of(heads, rows, style="stack") if rows else "<p>Nothing that is known differs.</p>"
    steps = f"<p>{_safe(pair.in_steps())}.</p>" if all(pair.parting.lengths) else ""
    return (
        f"<h2>Compared with {_safe(other)}</h2>{steps}{table}"
        f'<p class="dim">Equal: {_safe(", ".join(pair.equal) or "nothing that is known")}.</p>'
    )


def _value(value: object) -> str:
    if value is None:
        return "unknown"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _what_ran(found: RunFacts) -> str:
    last = found.attempts[-1].known if found.attempts else {}
    code = found.manifest["code"] or {}
    repository = code.get("repository") or {}
    image = found.manifest["image"] or {}
    versions = last.get("versions") or {}
    changed = number(repository, "changed")
    rows = [
        (
            "program",
            " ".join(
                filter(None, [text(code.get("program"), "name"), text(code.get("program"), "sha256")[:12]])
            ),
        ),
        ("commit", text(repository, "commit") + (f", {changed:.0f} files changed" if changed else "")),
        ("image", " ".join(filter(None, [text(image, "stack"), text(image, "id")])) or "none"),
        ("CUDA", text(image, "cuda")),
        *((str(name), str(value)) for name, value in list(versions.items())[:20]),
        ("transport", text(last, "transport")),
        ("threads a rank", text(last, "threads")),
        ("venv", text(last, "venv")),
    ]
    command = shlex.join(found.command[:500])
    line = _pre([command[:8000]]) if command else ""
    return f"<h2>What ran</h2>{line}{_pairs(rows)}"


def _nodes(found: RunFacts) -> str:
    rows = []
    for kind in found.manifest["hardware"][:MOST_ROWS]:
        cpu = kind.get("cpu") or {}
        gpus = texts(kind.get("gpus"))
        counts = {name: gpus.count(name) for name in dict.fromkeys(gpus)}
        rows.append(
            [
                _names(texts(kind.get("nodes"))),
                _safe(
                    " ".join(
                        filter(
                            None,
                            [text(cpu, "usable"), "cores of" * bool(text(cpu, "usable")), text(cpu, "model")],
                        )
                    )
                ),
                _safe(_or_dash(number(kind, "memory"), _bytes)),
                _safe(", ".join(f"{count} of {name}" for name, count in list(counts.items())[:8]) or "-"),
                _safe(text(kind, "driver") or "-"),
                _safe(text(kind, "kernel") or "-"),
            ]
        )
    if not rows:
        names = found.node_names
        return f"<h2>Nodes</h2><p>{_names(names)}</p>" if names else ""
    heads = ["nodes", "CPUs", "memory", "GPUs", "driver", "kernel"]
    return f"<h2>Nodes</h2>{table_of(heads, rows, is_html=True, style='stack')}"


def _names(names: Sequence[str]) -> str:
    few = ", ".join(map(_safe, names[:MOST_NODES]))
    return few + (f" and {len(names) - MOST_NODES} more" if len(names) > MOST_NODES else "")


def _doctor(found: RunFacts) -> str:
    return f"<h2>The doctor's findings</h2>{_pre(found.doctor)}" if found.doctor else ""


def _settings(found: RunFacts) -> str:
    """Plan, configuration and environment, folded."""
    plan, sources = found.plan, found.plan.get("sources")
    names = (
        "scheduler",
        "mode",
        "device",
        "nnodes",
        "nproc_per_node",
        "world_size",
        "master_addr",
        "master_port",
    )
    rows = []
    for name in names:
        if value := text(plan, name):
            source = text(sources, name)
            rows.append((name, f"{value} ({source})" if source else value))
    argv = texts(plan.get("argv"))
    rows += [("argv", shlex.join(argv[:500])[:2000])] * bool(argv)
    folded = [_folded("Plan", _pairs(rows)), _folded("Configuration", _pairs(_flat(found.config)))]
    environment = found.manifest["environment"]
    values = [(name, str(value)) for name, value in list((environment.get("values") or {}).items())[:300]]
    folded.append(_folded("Environment that results may depend on", _pairs(values)))
    inside = "".join(folded)
    return f"<h2>Settings</h2>{inside}" if inside else ""


def _flat(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(name), _value(value)[:400]) for name, value in list(config.items())[:400]]


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{title}</summary>{inside}</details>" if inside else ""


def _log(found: RunFacts) -> str:
    if not found.said:
        return ""
    folded = _folded(f"{counted(len(found.said), 'line')} of apptrain and of the program", _pre(found.said))
    return f"<h2>What was said</h2>{folded}"


def table_of(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    is_html: bool = False,
    style: str = "",
) -> str:
    """`numbers`: columns that are aligned on the right; `is_html`: the cells are safe already; `style`: a
    class of the page's style."""

    def cell(kind: str, at: int, inside: str) -> str:
        look = ' class="n"' if at in numbers else ""
        of = f' data-of="{_safe(heads[at])}"' if style == "stack" and kind == "td" and heads[at] else ""
        return f"<{kind}{look}{of}>{inside}</{kind}>"

    head = "".join(cell("th", at, _safe(name)) for at, name in enumerate(heads))
    body = "".join(
        f"<tr>{''.join(cell('td', at, one if is_html else _safe(one)) for at, one in enumerate(row))}</tr>"
        for row in rows
    )
    return (
        f'<div class="wide {style}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th>{_safe(name)}</th><td>{_safe(value)}</td></tr>" for name, value in rows if value)
    return f'<table class="pairs">{body}</table>' if body else ""


def _pre(lines: Iterable[str]) -> str:
    return f"<pre>{escape(chr(10).join(map(_printable, lines)))}</pre>"


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _safe(value: str) -> str:
    return escape(str(plain(value)))


def _or_dash(value: float | None, shape: Any) -> str:
    return "-" if value is None else shape(value)


def _bytes(value: float) -> str:
    return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"
