"""What the sentences of a report must say, each recomputed: who is named, and every figure.

SAY      the shape of every sentence that tells a figure: change the wording here
FIXED    paragraphs with digits that are the same whatever the records
COMMANDS what sections without rows say to run
POINTS   by section: the book -> its points, in any order
PICTURES by section: the book -> the words of its pictures
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from longseq_bench.core.units import format_bytes, format_seconds, format_share, format_tokens
from tests.reports.oracle import Book, Search, Swept, largest, options_text, per_pass
from tests.reports.tables import (
    as_much,
    baseline_of,
    bottlenecks,
    by,
    cell,
    compared,
    curves,
    density_words,
    dilated,
    doublings,
    exponent,
    fewer_pairs,
    fits,
    fitted_ratio,
    fitted_to,
    held_back,
    limit,
    longer,
    memory_by_sparsity,
    seen,
    time_of,
    works,
)

SAY = {
    # what was run
    "run": "{runs} in {processes} took {took}: {statuses}.",
    "measured": "Measured {first}.",
    "measured from": "Measured from {first} to {last}.",
    "environments": "The records come from {n} environments: {names}. Figures of different "
    "environments are never merged or compared.",
    "note": "Note: {note}",
    "speed": "Speed is the time of {base} over the row's, on the same workload, and on as many "
    "ranks where it was run so, else on the fewest.",
    "relative": "Relative speed is the time of {base} over the row's, on as many ranks where it "
    "ran so, else on the fewest; relative memory is the row's peak of a rank over that of the "
    "baseline on the fewest. Both only of outputs that passed the check. Pairs seen: the share of "
    "the pairs that dense attention sees, where it is less. The length is the longest of those "
    "that most implementations were ok at.",
    "elsewhere": "Elsewhere: {source}.",
    "cut": "Charts are of the first {drawn} of {n} workloads; the tables have all.",
    "version": "With longseq {versions}, commit {commits}:",
    "version alone": "With longseq {versions} (commit not recorded):",
    # the summary
    "at": "At {tokens} tokens ({where}), {rest}",
    "at on": "At {tokens} tokens on {ranks} ranks ({where}), {rest}",
    "fastest": "{one} is the fastest of {n}{kind}, {ratio} as fast as the next, {two}.",
    "overlap": "{some} and {last} can't be told apart: their intervals overlap.",
    "singles": "{one} took least of {n}{kind}, the next is {two}; single passes are among them, so "
    "how far off that may be is not known.",
    "lean": "{one} has the lowest peak memory{rank} of {n}{kind}, the next is {two}.",
    "longest ok": "The longest lengths swept that were ok ({where}): {each}.",
    "exposes": "{one} exposes least communication of {n}, the next is {two}{last}.",
    "expose alike": "these expose least communication and can't be told apart: {each}{last}.",
    "shows": "communication shows in {one}.",
    "most": "; most, {one}",
    "scales": "{one} scales best of {n}, the next is {two}{last}.",
    "scale alike": "these scale best and can't be told apart: {each}{last}.",
    "alone": "{one} alone was run on one rank too.",
    "worst": "; worst, {one}",
    "uneven": "memory is least even with {name}, whose ranks' largest and least peak are {most} "
    "and {least} ({ratio}).",
    "nothing passed": "{name} passed at no length ({where}); {limit}.",
    "memory holds": "{name}: memory holds {tokens} tokens ({where}); nothing was computed there.",
    "takes": "{name} takes {tokens} tokens ({where}){floor}{grown}, {sure}; {limit}.",
    "wrong": "{name} gave a wrong output at {tokens} tokens ({reason}); no speed is shown for it.",
    "thrashing": "{name} at {tokens} tokens made the allocator give back its cached memory and ask "
    "again {times} (thrashing).",
    "miscounted": "{name} at {tokens} tokens ({where}) sent {counted:,} B from {which} in a pass; "
    "its formula says {stated:,} B.",
    "ideal": "{one} reaches the highest share of ideal of {n}, the next is {two}.",
    "ideal alone": "{one} alone has a share of ideal.",
    "ideal alike": "these reach the highest share of ideal and can't be told apart: {each}.",
    "ideal once": "{one} has the highest share of ideal of {n}, the next is {two}; the first comes "
    "from a single pass, so how far off it may be is not known.",
    # recommendations
    "longest": "For the longest sequence by {what} ({where}): {one}, {ratio} the next, {two}.",
    "longest alone": "For the longest sequence by {what} ({where}): {one}, the only one {of}.",
    "longest alike": "For the longest sequence by {what} ({where}): {each}; their "
    "brackets overlap, so none is named the longest.",
    "choose": "{span}, {name} is the fastest {what} ({where}): {one}{at}, {ratio} as fast as the "
    "next, {two}.",
    "choose none": "{span}, the fastest {what} can't be told apart ({where}): {each}{at}.",
    "verdict": "{verdict} ({where}): {each}.",
    "wasteful": "Leave their budget to other things than the floor ({where}): {each}.",
    "waste": "{name} ({share}: {tokens:,} tokens of {floor:,})",
    # sections of other kinds
    "doubling": "{label} ({where}): twice the tokens take {ends} the time from {first} to {last} "
    "tokens; exponent {exponent}.",
    "doubling by fit": "{label} ({where}): no length was timed together with its double; fitted "
    "from {first} to {last} tokens, twice the tokens take {ratio} the time; exponent {exponent}.",
    "saves": "At {tokens} tokens ({where}), where standard attention takes {standard} ({source}): "
    "{took}.",
    "least even": "Least even ({where}): {name} at {tokens} tokens, the largest peak {ratio} the "
    "least.",
    "peaks apart": "At {tokens} tokens ({where}) the largest peak of {n} rows, {most}, is {ratio} "
    "the least, {least}.",
    "lengthens": "Ranks lengthen {label} most ({where}): {ranks} ranks take {tokens:,} tokens, one "
    "takes {alone:,}: {ratio}, {share} of as many times as there are ranks.",
    "dilation": "Dilation brings most to {name} at {tokens} tokens ({where}): it is {ratio} as "
    "fast as with every rate 1{seen}{bare}.",
    "no dilation": "Dilation brings no speed that can be told ({where}).",
    "curve": "The curve takes {ends} the time of the sequence ({where}).",
    "bottlenecks": "Of {n} ({where}): {each}.",
    "work": "{begin}, {n} of {all}: {names}.",
    "against": "Against {base} ({where}), of {n} {what}: {first} runs at {most} its speed, {last} "
    "runs at {least} its speed.",
    # pictures
    "picture": "{title}: {where}. {said}",
    "one point": "{y} of {series}: {value}{failed}.",
    "points": "{y} of {n} series, from {least} ({low}) to {most} ({high}){failed}.",
    "failed": "; {n} failed",
    "reached none": "; {n} passed at no length",
}

FIXED = {
    "Time is the median; ± is the farther end of its 95 % interval (with fewer than 6 samples, of "
    "their range). Over ranks, time is the slowest rank's and memory the largest. A dash is a "
    "value that was not measured; Failures says why.",
    "Density is the share of the visible blocks (of the query-key pairs, where a pattern has no "
    "blocks) that is kept; of pairs, a pair seen twice counts twice. Plan time is of the pass "
    "under the memory budget, and in no other time but where a pattern is chosen by its inputs. "
    "Dense time is that of torch's dense attention on the same inputs, its passes in turn with the "
    "sparse ones; where a whole pass would take too long it is computed from some of its rows. "
    "Share of ideal is dense time times the density of work (of pairs, and a module's projections) "
    "over the time, with what the intervals of both leave possible: 100 % where what is skipped "
    "costs nothing. Memory reduction is the peak of standard attention, with its whole score "
    "matrix, over the row's: measured where the implementation dense was run on the same workload, "
    "else computed by formula.",
    "Exponents of a power law in tokens and ranks, fitted in logarithms to the medians of time and "
    "to the peaks of a rank, with 95 % intervals, as if what is left over were noise. By formula: "
    "time, of the FLOPs stated, shared by the ranks; memory, of the floor, of dense its scores. "
    "Ranks of a CPU share its cores, so their time need not shrink. A dash where tokens and ranks "
    "went together.",
    "The time at twice the tokens over the time at the tokens; ± is the farther end of what the "
    "intervals of both leave possible. 2× is linear, 4× quadratic. The exponent is fitted to all "
    "lengths of the implementation, with its 95 % interval; by formula it is that of the FLOPs. "
    "Where no length was timed together with its double, the time is fitted: 2 to the power of the "
    "exponent, if the longest length is at least twice the shortest.",
    "Speed of dilation: the time of the same segments with every rate 1 over the row's. Dilation "
    "also sees fewer pairs: beside it stands how many times as many pairs are seen without. Pairs "
    "seen is the share of the pairs that dense attention sees; uncovered the share of (token, "
    "head) pairs that see nothing.",
    "Works: trials were ok, so their output (in training their gradients too) passed the check "
    "against a float64 reference, but for those that their length ended (out of memory or time, a "
    "kernel's limit); partly: some ended otherwise. The error is the largest of any of its "
    "outputs, over lengths and masks. What the records have no trial of is not in this table.",
    "There is no length of 8k tokens or more among these records. To have it:",
}

COMMANDS = {
    "longseq list",
    "longseq maxlen --impl block-sparse --sparsity auto --target 1M",
    "longseq maxlen --impl block-sparse -o sparsity=0.99",
    "longseq maxlen --impl dilated --impl hilbert -o segments=4096,8192 -o dilation=1,2",
    "longseq maxlen --impl ring --impl block-sparse -o sparsity=0.99",
    "longseq maxlen --impl ring --memory-budget 64MiB",
    "longseq scaling --impl ring --impl ulysses --world-sizes 1,2",
    "longseq sweep configs/hilbert.yaml",
    "longseq sweep configs/parallel.yaml",
    "longseq sweep configs/quickstart.yaml",
    "longseq sweep configs/sparsity.yaml",
}
"""What sections without rows say to run."""


def say(shape: str, **figures: Any) -> str:
    """A sentence of a shape, as it reads: white space is one space."""
    return " ".join(SAY[shape].format(**figures).split())


def counted(n: int, one: str, several: str = "") -> str:
    """A number of things."""
    return f"{n:,} {one if n == 1 else several or one + 's'}"


def ratio(value: float) -> str:
    """How many times."""
    return cell(value, "ratio")


def tokens_of(figure: Any) -> str:
    """Its length."""
    return format_tokens(figure.tokens)


def timed(row: Swept) -> str:
    """A row by its name and its time."""
    return f"{row.name} ({time_of(row)})"


def summary(book: Book) -> Iterator[str]:
    """What was run, found and wrong."""
    yield say(
        "run",
        runs=counted(len(book.records), "run"),
        processes=counted(sum(r.processes for r in book.records), "process", "processes"),
        took=format_seconds(sum(r.wall_s for r in book.records)),
        statuses=book.statuses(),
    )
    for group in book.groups(book.swept):
        yield from _swept(group)
        yield from _on_ranks(group)
    yield from (_found(book, search) for search in book.searches)
    yield from _warnings(book)


def _swept(group: Sequence[Swept]) -> Iterator[str]:
    classes = list(apart(r for r in group if r.time))
    for what, some in classes:
        for beside in by(lambda r: r.ranks, some) if what == "sparse" else [some]:
            lengths = by(lambda r: r.tokens, beside)
            several = [rows for at in lengths for rows in as_much(at) if len(rows) > 1]
            for rows in several:
                if rows[0].tokens < max(other[0].tokens for other in several):
                    continue
                kind = f" {what}" if len(classes) > 1 else ""
                if what == "sparse":
                    kind = f" sparse{_keeping(rows)}{_on(rows[0])}"
                for rest in filter(None, (_fastest(rows, kind), _leanest(rows, kind))):
                    yield say("at", tokens=tokens_of(rows[0]), where=rows[0].where, rest=rest)
    each = []
    for rows in by(lambda r: r.name, sorted((r for r in group), key=lambda r: r.tokens)):
        if passed := [r for r in rows if r.ok]:
            longest = passed[-1].tokens
            bad = [r for r in rows if not r.ok and r.tokens > longest]
            failed = f" ({bad[0].status} at {tokens_of(bad[0])})" if bad else ""
            each.append(((longest, passed[0]), f"{rows[0].name} {tokens_of(passed[-1])}{failed}"))
    if each:
        order = sorted((r for r in group if r.ok), key=lambda r: r.tokens)
        names = dict.fromkeys(r.name for r in order)
        words = {one[0][1].name: one[1] for one in each}
        told = "; ".join(words[name] for name in names)
        yield say("longest ok", where=group[0].where, each=told)


def _fastest(rows: Sequence[Swept], kind: str) -> str:
    first, second = sorted(rows, key=lambda r: r.time or 0)[:2]
    words = {"one": timed(first), "two": timed(second), "n": len(rows), "kind": kind}
    if first.ends is None or second.ends is None:
        return say("singles", **words)
    known = sorted((r for r in rows if r.ends), key=lambda r: r.time or 0)
    alike = [timed(r) for r in known if r.ends[0] <= first.ends[1]]
    if len(alike) > 1:
        return say("overlap", some=", ".join(alike[:-1]), last=alike[-1])
    return say("fastest", ratio=ratio((second.time or 0) / (first.time or 1)), **words)


def _leanest(rows: Sequence[Swept], kind: str) -> str | None:
    known = sorted((r for r in rows if r.peak is not None), key=lambda r: r.peak or 0)
    if len(known) < 2 or known[0].peak == known[1].peak:
        return None
    one, two = (f"{r.name} ({format_bytes(r.peak or 0)})" for r in known[:2])
    rank = " a rank" if any(r.ranks > 1 for r in rows) else ""
    return say("lean", one=one, two=two, n=len(known), rank=rank, kind=kind)


def _on_ranks(group: Sequence[Swept]) -> Iterator[str]:
    several = (r for r in group if r.ranks > 1 and r.time)
    for rows in sorted(by(lambda r: r.ranks, several), key=lambda rows: rows[0].ranks):
        lengths = by(lambda r: r.tokens, rows)
        shared = [some for some in lengths if len(some) > 1] or lengths
        at = max(shared, key=lambda some: some[0].tokens)
        for rest in filter(None, (_exposed(at), _scaled(at), _uneven(at))):
            yield say("at on", tokens=tokens_of(at[0]), ranks=at[0].ranks, where=at[0].where,
                      rest=rest)  # fmt: skip


def _exposed(rows: Sequence[Swept]) -> str | None:
    known = sorted((r for r in rows if r.exposed), key=lambda r: r.exposed[0])
    words = []
    for r in known:
        sent = r.most("bytes_sent")
        told = "" if sent is None else f", {format_bytes(round(sent))} sent a rank"
        words.append(f"{r.label} ({format_share(r.exposed[0])} of its time{told})")
    if len(known) < 2:
        return say("shows", one=words[0]) if known else None
    most = known[0].exposed[2] if known[0].exposed[2] is not None else 1.0
    alike = [w for r, w in zip(known, words, strict=True) if (r.exposed[1] or 0.0) <= most]
    return _best("exposes", "expose alike", "most", words, alike)


def _best(one: str, several: str, end: str, words: list[str], alike: list[str]) -> str:
    last = SAY[end].format(one=words[-1]) if len(alike) < len(words) > 2 else ""
    if len(alike) > 1:
        return say(several, each=", ".join(alike), last=last)
    return say(one, one=words[0], two=words[1], n=len(words), last=last)


def _scaled(rows: Sequence[Swept]) -> str | None:
    known = sorted((r for r in rows if r.speedup is not None), key=lambda r: -(r.speedup or 0))
    words = [
        f"{r.label} ({ratio(r.speedup or 0)} as fast as one rank, "
        f"{format_share((r.speedup or 0) / r.ranks)} efficiency)"
        for r in known
    ]
    if len(known) < 2:
        return say("alone", one=words[0]) if known else None
    least = known[0].speedup_ends[0] if known[0].speedup_ends else 0.0
    alike = [
        w
        for r, w in zip(known, words, strict=True)
        if r.speedup_ends is None or r.speedup_ends[1] >= least
    ]
    return _best("scales", "scale alike", "worst", words, alike)


def _uneven(rows: Sequence[Swept]) -> str | None:
    known = [r for r in rows if r.imbalance is not None]
    worst = max(known, key=lambda r: r.imbalance or 0, default=None)
    if worst is None or ratio(worst.imbalance or 0) == "1×":
        return None
    ends = {"most": format_bytes(worst.peak or 0), "least": format_bytes(worst.least_peak or 0)}
    return say("uneven", name=worst.label, ratio=ratio(worst.imbalance or 0), **ends)


def _found(book: Book, search: Search) -> str:
    words = {"name": search.name, "where": search.where, "tokens": tokens_of(search)}
    if not search.tokens:
        return say("nothing passed", limit=limit(search), **words)
    if search.trial.fit_only:
        return say("memory holds", **words)
    alone = book.alone_of(search) if search.ranks > 1 else None
    grown = f", {ratio(search.tokens / alone.tokens)} one rank's" if alone and alone.tokens else ""
    floor = "" if search.of_floor is None else f", {format_share(search.of_floor)} of the floor"
    again = counted(search.confirmations, "further run")
    sure = f"confirmed by {again}" if search.confirmations else "not confirmed by a second run"
    return say("takes", floor=floor, grown=grown, sure=sure, limit=limit(search), **words)


def _warnings(book: Book) -> Iterator[str]:
    for row in book.swept:
        if row.status == "wrong":
            reason = row.outcome.reason or "no reason was recorded"
            yield say("wrong", name=row.name, tokens=tokens_of(row), reason=reason)
    for one in [*book.swept, *book.searches]:
        records = one.records if isinstance(one, Swept) else one.at
        if retries := largest(records, "alloc_retries"):
            times = counted(round(retries), "time")
            yield say("thrashing", name=one.name, tokens=tokens_of(one), times=times)
    for row in book.swept:
        unlike = {
            (i, round(sent), round(said)): None
            for record in row.records
            for i in range(row.ranks)
            for sent, said in per_pass(record, i)
            if round(sent) != round(said)
        }
        for ranks in by(lambda one: one[1:], unlike):
            names = ", ".join(str(one[0]) for one in ranks)
            which = f"rank {names}" if len(ranks) == 1 else f"each of ranks {names}"
            _, sent, said = ranks[0]
            yield say("miscounted", name=row.name, tokens=tokens_of(row), where=row.where,
                      counted=sent, stated=said, which=which)  # fmt: skip


def sparse(book: Book) -> Iterator[str]:
    """Who reaches the highest share of ideal."""
    for group in book.groups(r for r in book.swept if r.sparse):
        lengths = by(lambda r: r.tokens, (r for r in group if r.ideal))
        shared = [rows for rows in lengths if len(rows) > 1] or lengths
        if shared:
            rows = max(shared, key=lambda rows: rows[0].tokens)
            rows = sorted(rows, key=lambda r: -r.ideal[0])
            rest = _ideal(rows)
            yield say("at", tokens=tokens_of(rows[0]), where=group[0].where, rest=rest)


def _ideal(rows: Sequence[Any]) -> str:
    words = [
        f"{r.name} ({format_share(r.ideal[0])}: {ratio(r.dense[1] / r.time)} as fast as dense at a "
        f"density of {format_share(r.pairs_seen)}"
        + ("" if r.dense[0] == "measured" else f", dense time {r.dense[0]}")
        + ")"
        for r in rows
    ]
    if len(rows) == 1:
        return say("ideal alone", one=words[0])
    least = rows[0].ideal[1]
    if least is None:
        return say("ideal once", one=words[0], two=words[1], n=len(rows))
    alike = [
        w
        for r, w in zip(rows, words, strict=True)
        if r.ideal[2] is None or r.ideal[2] >= least
    ]  # fmt: skip
    if len(alike) > 1:
        return say("ideal alike", each=", ".join(alike))
    return say("ideal", one=words[0], two=words[1], n=len(rows))


def apart(figures: Iterable[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Exact attention and sparse, which are never set against each other."""
    figures = list(figures)
    for what, is_sparse in (("exact", False), ("sparse", True)):
        if found := [f for f in figures if f.sparse == is_sparse]:
            yield what, found


def longest(book: Book) -> Iterator[str]:
    """Who takes the longest sequence, on as many ranks."""
    for group in book.groups(book.searches):
        for what, some in apart(s for s in group if s.tokens and s.whole):
            for found in sorted(by(lambda s: s.ranks, some), key=lambda found: found[0].ranks):
                others = _no_length(book, found[0])
                yield _longest(found, f"{what} attention{_on(found[0])}", group[0].where, others)


def _no_length(book: Book, found: Search) -> int:
    """How many others, exact or sparse as it is, took no length that is confirmed."""
    skip = {f.implementation for f in [*book.swept, *book.searches] if f.sparse}

    def who(search: Search) -> Any:
        whole = "all" if search.trial.keep == "nothing" else search.trial.keep
        options = options_text(search.options)
        return search.implementation, options, whole, search.trial.allocator

    def alike(search: Search) -> bool:
        told = largest(search.at, "density_achieved") is not None
        skips = search.sparse if told else search.implementation in skip
        # what may stand in one table is told by its last figure from what was cut short
        there = search.group[:-1] == found.group[:-1] and search.ranks == found.ranks
        return there and skips == found.sparse

    beside = [s for s in book.searches if alike(s)]
    return len({who(s) for s in beside} - {who(s) for s in beside if s.tokens and s.whole})


def _longest(found: list[Any], what: str, where: str, others: int) -> str:
    found.sort(key=lambda s: -s.tokens)
    words = [f"{s.name} ({s.tokens:,} tokens{density_words(s)}, {limit(s)})" for s in found]
    most = found[0].tokens
    alike = [
        w
        for s, w in zip(found, words, strict=True)
        if s.tokens == most or s.failed is None or s.failed > most
    ]
    begin = {"what": what, "where": where}
    if len(alike) > 1:
        return say("longest alike", each=", ".join(alike), **begin)
    if len(found) == 1:
        several = f"of {others + 1:,} searched that reached a confirmed length"
        return say("longest alone", one=words[0], of=several if others else "that was searched",
                   **begin)  # fmt: skip
    return say("longest", one=words[0], two=words[1], ratio=ratio(most / found[1].tokens), **begin)


def fastest(book: Book) -> Iterator[str]:
    """Who is the fastest over which lengths."""
    for group in book.groups(book.swept):
        for what, found in apart(r for r in group if r.ends and r.time):
            for rows in sorted(by(lambda r: r.ranks, found), key=lambda rows: rows[0].ranks):
                for contests in _contests(rows):
                    yield from _choices(contests, f"{what} attention", group)


def _contests(rows: Sequence[Any]) -> list[list[list[Any]]]:
    """Of each density: by length, those of two or more that see as much as all the others do."""
    found: list[list[list[Any]]] = []
    for at in sorted(by(lambda r: r.tokens, rows), key=lambda at: at[0].tokens):
        for some in (some for some in as_much(at) if len(some) > 1):
            for other in found:
                each = [seen(r) for r in [*some, *(r for one in other for r in one)]]
                if min(each) >= 0.9 * max(each):
                    other.append(some)
                    break
            else:
                found.append([some])
    return found


def _keeping(rows: Iterable[Any]) -> str:
    each = sorted(seen(r) for r in rows)
    ends = [format_share(each[0]), format_share(each[-1])]
    return "" if each[0] == 1 else f" of density {' to '.join(dict.fromkeys(ends))}"


def _on(figure: Any) -> str:
    return f" on {figure.ranks} ranks" if figure.ranks > 1 else ""


def _choices(contests: list[list[Any]], what: str, group: Sequence[Swept]) -> Iterator[str]:
    best: list[tuple[Any, Any]] = []
    for at in contests:
        at.sort(key=lambda r: r.time)
        names = [r.name for r in at if r.ends[0] <= at[0].ends[1]]
        bad = [r.tokens for r in group if r.name in names and not r.ok]
        # equal for those between which none of them failed
        best.append(((names, sum(n < at[0].tokens for n in bad)), at))
    for _, run in groupby(best, key=lambda one: one[0]):
        lengths = [at for _, at in run]
        at = lengths[-1]
        first, last, one = tokens_of(lengths[0][0]), tokens_of(at[0]), len(lengths) == 1
        span = f"At {last} tokens" if one else f"From {first} to {last} tokens"
        alike = [r for r in at if r.ends[0] <= at[0].ends[1]]
        words = [f"{r.label} ({time_of(r)})" for r in alike]
        whom = f"{what}{_keeping(r for some in lengths for r in some)}{_on(at[0])}"
        told = {
            "span": span,
            "what": whom,
            "where": at[0].where,
            "at": "" if one else f" at {last}",
        }
        if len(alike) > 1:
            yield say("choose none", each=", ".join(words), **told)
        else:
            told |= {"ratio": ratio(at[1].time / at[0].time), "two": at[1].label}
            yield say("choose", name=at[0].label, one=words[0], **told)


Bounds = tuple[float, float, float]


def ranks_pay(book: Book) -> Iterator[str]:
    """From which length ranks are faster than one."""
    known = [r for r in book.swept if r.ranks > 1 and r.speedup_ends]

    def bounds(row: Any) -> Bounds:
        return row.speedup_ends[0], row.speedup, row.speedup_ends[1]

    yield from _paying(book, known, "one rank", bounds)


def sparse_pays(book: Book) -> Iterator[str]:
    """From which length sparse attention is faster than dense."""
    known = [r for r in book.swept if r.sparse and r.over_dense and r.ideal]
    yield from _paying(book, known, "dense attention", lambda r: r.over_dense, _dense_is)


def _dense_is(row: Any) -> str:
    source = "computed" if row.dense[0].startswith("computed") else row.dense[0]
    return "" if source == "measured" else f", dense time {source}"


def _paying(
    book: Book, rows: Sequence[Swept], against: str, bounds: Callable[[Any], Bounds],
    note: Callable[[Any], str] = lambda row: "",
) -> Iterator[str]:  # fmt: skip
    for group in book.groups(rows):
        verdicts = []
        for series in by(lambda r: r.name, sorted(group, key=lambda r: r.tokens)):
            known = {r.tokens: bounds(r) for r in series}
            bad = [
                r
                for r in book.swept
                if r.group == group[0].group and r.name == series[0].name and not r.ok
            ]
            verdict, shown = _verdict(known, {r.tokens for r in bad}, against)
            each = [
                f"{ratio(known[r.tokens][1])} at {tokens_of(r)} tokens{note(r)}"
                for r in series
                if r.tokens in shown
            ]
            above = [r for r in bad if r.tokens > max(known) and verdict.startswith("Faster")]
            each += [f"{r.status} at {tokens_of(r)}" for r in sorted(above, key=_tokens)[:1]]
            verdicts.append((verdict, f"{series[0].name} ({', '.join(each)})"))
        for same in by(lambda one: one[0], verdicts):
            each = ", ".join(words for _, words in same)
            yield say("verdict", verdict=same[0][0], where=group[0].where, each=each)


def _tokens(row: Any) -> int:
    return int(row.tokens)


def _verdict(known: dict[int, Bounds], bad: set[int], against: str) -> tuple[str, list[int]]:
    """Faster from the shortest length from which on every length was, by its interval, and none
    failed up to the longest that is known."""
    last, gains = max(known), []
    for n in sorted({*known, *bad}, reverse=True):
        if n > last:
            continue
        if n in bad or known[n][0] <= 1:
            break
        gains.append(n)
    if gains:
        first = min(gains)
        since = ", the shortest timed more than once" if first == min(known) else ""
        from_ = f"Faster than {against} from {format_tokens(first)} tokens{since}"
        return from_, sorted({first, last})
    if max(high for _, _, high in known.values()) < 1:
        return f"Slower than {against} at every length timed more than once", [last]
    return f"Not known to be faster than {against} at the longest length timed more than once", [
        last
    ]


def wasteful(book: Book) -> Iterator[str]:
    """Maxima that memory limits, far from the floor."""
    for group in book.groups(book.searches):
        far = [
            s for s in group if s.limited_by == "memory" and s.whole and 0 < (s.of_floor or 0) < 0.9
        ]
        each = [
            say("waste", name=s.name, share=format_share(1 - s.of_floor), tokens=s.tokens,
                floor=s.floor_tokens)
            for s in sorted(far, key=lambda s: s.of_floor)
        ]  # fmt: skip
        if each:
            yield say("wasteful", where=group[0].where, each=", ".join(each))


def doubling(book: Book) -> Iterator[str]:
    """What twice the tokens cost each."""
    for group in book.groups(book.swept):
        pairs = doublings(group)
        for fit in fits(group, ["time"]):
            own = [p for p in pairs if p.row.label == fit.label]
            if own and own[0].other is None:
                rows = fitted_to(group, fit.label)
                first, last = (format_tokens(r.tokens) for r in (rows[0], rows[-1]))
                yield say(
                    "doubling by fit", label=fit.label, where=group[0].where, first=first,
                    last=last, ratio=fitted_ratio(fit), exponent=exponent(fit.tokens),
                )  # fmt: skip
            elif own and fit.tokens:
                each = sorted(p.other.time / p.row.time for p in own)
                ends = " to ".join(dict.fromkeys((ratio(each[0]), ratio(each[-1]))))
                first = format_tokens(min(p.row.tokens for p in own))
                last = format_tokens(max(p.other.tokens for p in own))
                yield say("doubling", label=fit.label, where=group[0].where, ends=ends,
                          first=first, last=last, exponent=exponent(fit.tokens))  # fmt: skip


def saves(book: Book) -> Iterator[str]:
    """What the longest length takes beside standard attention."""
    known = [r for r in book.swept if r.saving is not None and r.implementation != "dense"]
    for group in book.groups(known):
        tokens = max(r.tokens for r in group)
        at = sorted((r for r in group if r.tokens == tokens), key=lambda r: r.peak)
        ends = [f"{format_bytes(r.peak)} ({r.label})" for r in (at[0], at[-1])]
        several = f"of {len(at)} the least {ends[0]}, the most {ends[1]}"
        yield say("saves", where=at[0].where, tokens=format_tokens(tokens),
                  standard=format_bytes(at[0].standard[0]), source=at[0].standard[1],
                  took=several if len(at) > 1 else ends[0])  # fmt: skip


def least_even(book: Book) -> Iterator[str]:
    """Whose ranks' peaks are farthest apart."""
    for group in book.groups(r for r in book.swept if r.ranks > 1 and r.imbalance is not None):
        worst = max(group, key=lambda r: r.imbalance)
        if ratio(worst.imbalance) == ratio(1.0):
            continue
        yield say("least even", where=worst.where, name=worst.name, tokens=tokens_of(worst),
                  ratio=ratio(worst.imbalance))  # fmt: skip


def peaks_apart(book: Book) -> Iterator[str]:
    """How far apart peaks of sparsities are."""
    for _, _, group in memory_by_sparsity(book):
        tokens = max(r.tokens for r in group)
        at = [r for r in group if r.tokens == tokens]
        at.sort(key=lambda r: float(r.options["sparsity"]))
        least, most = min(at, key=lambda r: r.peak), max(at, key=lambda r: r.peak)
        times = ratio(most.peak / least.peak)
        if times == ratio(1.0):
            continue
        yield say("peaks apart", tokens=format_tokens(tokens), where=least.where, n=len(at),
                  most=most.label, least=least.label, ratio=times)  # fmt: skip


def lengthens(book: Book) -> Iterator[str]:
    """Whose maximum ranks raise most, where they raise any."""
    for group in longer(book):
        pairs = [p for p in group if p.row.tokens > p.other.tokens]
        if not pairs:
            continue
        best = max(pairs, key=lambda p: p.row.tokens / p.other.tokens)
        grown = best.row.tokens / best.other.tokens
        yield say("lengthens", label=best.row.label, where=best.row.where, ranks=best.row.ranks,
                  tokens=best.row.tokens, alone=best.other.tokens, ratio=ratio(grown),
                  share=format_share(grown / best.row.ranks))  # fmt: skip


def dilation(book: Book) -> Iterator[str]:
    """Whom dilation speeds up most, of those that it surely does."""
    for group in dilated(book):
        pairs = [p for p in group if p.other]
        sure = [p for p in pairs if p.row.ends and p.other.ends]
        sure = [p for p in sure if p.other.ends[0] > p.row.ends[1]]
        if sure:
            best = max(sure, key=lambda p: p.other.time / p.row.time)
            fewer, none = fewer_pairs(best), best.row.most("uncovered")
            yield say(
                "dilation", name=best.row.name, tokens=tokens_of(best.row), where=best.row.where,
                ratio=ratio(best.other.time / best.row.time),
                seen=f" and sees {ratio(fewer)} fewer pairs" if fewer else "",
                bare=f", {format_share(none)} of (token, head) pairs see nothing" if none else "",
            )  # fmt: skip
        elif pairs:
            yield say("no dilation", where=pairs[0].row.where)


def curve(book: Book) -> Iterator[str]:
    """What the curve costs."""
    for pairs in filter(None, curves(book)):
        each = sorted(p.other.time / p.row.time for p in pairs)
        ends = " to ".join(dict.fromkeys((ratio(each[0]), ratio(each[-1]))))
        yield say("curve", ends=ends, where=pairs[0].row.where)


def held(book: Book) -> Iterator[str]:
    """What held back how many."""
    for kind, _, rows in bottlenecks(book):
        swept = kind == "bottleneck"
        counts = Counter(held_back(r) if swept else r.limited_by for r in rows)
        each = ", ".join(f"{name} in {n}" for name, n in counts.most_common())
        where = rows[0].where if swept else f"longest lengths: {rows[0].where}"
        yield say("bottlenecks", n=len(rows), where=where, each=each)


def work(book: Book) -> Iterator[str]:
    """What works, on each machine and device."""
    begins = {"yes": "work", "partly": "work in part", "no": "do not work"}
    for here in by(lambda r: (r.environment.fingerprint, r.trial.device), book.swept):
        machine = book.machines[here[0].environment.fingerprint]
        where = f"On {here[0].trial.device}" + (f", machine {machine}" if machine else "")
        each = by(lambda r: (r.label, r.ranks), here)
        for verdict, begin in begins.items():
            if names := [rows[0].name for rows in each if works(rows) == verdict]:
                yield say("work", begin=f"{where} {begin}", n=len(names), all=len(each),
                          names=", ".join(names))  # fmt: skip


def against(book: Book) -> Iterator[str]:
    """The fastest and the slowest beside the baseline."""
    for where, pairs in compared(book):
        known = sorted((p for p in pairs if p.extra is not None), key=lambda p: -p.extra)
        for what in ("exact", "sparse"):
            some = [p for p in known if p.row.sparse == (what == "sparse")]
            if len(some) > 1:
                yield say("against", base=baseline_of(book), where=where, n=len(some), what=what,
                          first=some[0].row.name, most=ratio(some[0].extra),
                          last=some[-1].row.name, least=ratio(some[-1].extra))  # fmt: skip


Rule = Callable[[Book], Iterator[str]]


def recommended(kind: str) -> list[Rule]:
    """The rules of each report's recommendations."""
    return {
        "extreme": [longest, fastest, sparse_pays, wasteful],
        "devices": [ranks_pay],
        "scaling": [longest, ranks_pay],
        "capabilities": [ranks_pay, sparse_pays],
        "implementations": [fastest, longest, ranks_pay],
        "summary": [],
    }[kind]


POINTS: dict[str, Rule] = {
    "Summary": summary,
    "Sparse attention": sparse,
    "Time a doubling": doubling,
    "Memory against standard attention": saves,
    "Batch, length, time and memory": least_even,
    "Memory by sparsity": peaks_apart,
    "Single against many": lengthens,
    "Segments and dilation": dilation,
    "Along the curve and along the sequence": curve,
    "Bottlenecks": held,
    "Modes run here": work,
    "Time, memory, relative speed": against,
}


def heads(book: Book) -> list[str]:
    """The paragraphs of the head after the title."""
    dates = sorted(r.started_at for r in book.records)
    same = dates[0] == dates[-1]
    said = [say("measured" if same else "measured from", first=dates[0], last=dates[-1])]
    if len(book.environments) > 1:
        names = ", ".join(book.machines.values())
        said.append(say("environments", n=len(book.environments), names=names))
    return said + [say("note", note=note) for note in book.notes]


def paragraphs(book: Book) -> list[str]:
    """Paragraphs with figures that the records give."""
    versions = ", ".join(dict.fromkeys(r.environment.longseq for r in book.records))
    found = [r.environment.commit for r in book.records if r.environment.commit]
    commits = ", ".join(dict.fromkeys(found))
    shape = "version" if commits else "version alone"
    said = say(shape, versions=versions, commits=commits)
    bare = said.removesuffix(":") + "; the command was not recorded."
    told = [said if any(r.command for r in book.records) else bare]
    if book.swept:
        told.append(say("relative", base=baseline_of(book)))
    if book.baseline:
        told.append(say("speed", base=book.baseline))
    if book.elsewhere:
        told.append(say("elsewhere", source=book.elsewhere.source))
    on_ranks = [r for r in book.swept if r.ranks > 1]
    sped = [r for r in on_ranks if r.speedup is not None]
    for rows, kinds in ((book.swept, 3), (book.swept, 1), (on_ranks, 1), (sped, 1)):
        if (n := len(list(book.groups(rows)))) > MOST // kinds:
            told.append(say("cut", drawn=MOST // kinds, n=n))
    return told


MOST = 12
"""Pictures of a section."""

Points = Sequence[tuple[str, float, float]]
"""Of a picture: series, x, y."""


def picture(
    y: str, kind: str, x: str, where: str, points: Points, failed: str = "", title: str = ""
) -> str:
    """The words of a picture. failed: what it says of failures."""
    low, high = min(points, key=lambda p: p[2]), max(points, key=lambda p: p[2])
    least, most = cell(low[2], kind), cell(high[2], kind)
    n = len({p[0] for p in points})
    if len(points) == 1:
        said = say("one point", y=y, series=low[0], value=least, failed=failed)
    else:
        said = say("points", y=y, n=n, least=least, low=low[0], most=most, high=high[0],
                   failed=failed)  # fmt: skip
    title = (title or y) + (f" against {x}" if x else "")
    return say("picture", title=title, where=where, said=said)


def lines(y: str, kind: str, group: Sequence[Swept], value: Callable[[Any], Any]) -> str | None:
    """A quantity against tokens; bars where nothing was measured or failed at another length."""
    points = [(r.name, r.tokens, v) for r in group if (v := value(r))]
    if not points:
        return None
    bad = [r.tokens for r in group if r.status not in ("ok", "unsupported")]
    failed = SAY["failed"].format(n=counted(len(bad), "trial")) if bad else ""
    where, lengths = group[0].where, {*bad, *(p[1] for p in points)}
    if len(lengths) == 1:
        at = f"{where}, {format_tokens(lengths.pop())} tokens"
        return picture(y, kind, "", at, points, failed)
    return picture(y, kind, "tokens", where, points, failed)


def times(group: Sequence[Swept]) -> str | None:
    """Times."""
    return lines("Time", "seconds", group, lambda r: r.time)


def peaks(group: Sequence[Swept]) -> str | None:
    """Peaks of what was ok."""
    return lines("Peak memory", "bytes", group, lambda r: r.peak if r.ok else None)


def rates(group: Sequence[Swept]) -> str | None:
    """Tokens a second."""
    return lines("Tokens/s", "count", group, lambda r: r.tokens_a_second)


def paid(group: Sequence[Swept]) -> str | None:
    """Speed-ups by length."""
    return lines("Speed-up", "ratio", group, lambda r: r.speedup)


def speedups(group: Sequence[Swept]) -> str | None:
    """Speed-ups by ranks, with those of one rank; they need several numbers of ranks."""
    several = {r.label for r in group if r.ranks > 1 and r.speedup}
    points = [
        (f"{r.label}, {tokens_of(r)} tokens", r.ranks, r.speedup)
        for r in group
        if r.speedup and r.label in several
    ]
    if len({p[1] for p in points}) < 2:
        return None
    return picture("Speed-up", "ratio", "ranks", group[0].where, points)


def roofline(group: Sequence[Swept]) -> str | None:
    """FLOP/s on one rank."""
    points = [
        (r.label, flops / r.floor, flops / r.time)
        for r in group
        if r.ranks == 1 and r.time and (flops := r.most("flops"))
    ]
    if len({p[1] for p in points}) < 2:
        return None
    at = "FLOPs a byte of the floor"
    return picture("FLOP/s", "flop_rate", at, group[0].where, points)


def each_peak(group: Sequence[Swept]) -> str | None:
    """Peaks of each rank at the length that most ran."""
    known = [r for r in group if r.ranks > 1 and r.rank_peaks and r.ok]
    counts = Counter(r.tokens for r in known)
    if not known:
        return None
    tokens = max(counts, key=lambda n: (counts[n], n))
    points = [
        (f"{r.label}, rank {i} of {r.ranks}", 0, peak)
        for r in known
        if r.tokens == tokens
        for i, peak in enumerate(r.rank_peaks or ())
        if peak is not None
    ]
    where = f"{known[0].where}, {format_tokens(tokens)} tokens"
    return picture("Peak memory", "bytes", "", where, points)


def ideals(group: Sequence[Swept]) -> str | None:
    """Shares of ideal against sparsity, at one length."""
    known = [r for r in group if r.ideal and r.ideal[0] and r.pairs_seen is not None]
    points = [
        (" ".join(w for w in r.name.split(" ") if not w.startswith("sparsity=")), r.pairs_seen,
         r.ideal[0])
        for r in sorted(known, key=lambda r: -r.pairs_seen)
        if r.pairs_seen < 1
    ]  # fmt: skip
    where = f"{group[0].where}, {tokens_of(group[0])} tokens"
    x = "sparsity (of pairs)"
    return picture("Share of ideal", "share", x, where, points) if points else None


def pictures(
    *kinds: Callable[[Sequence[Swept]], str | None],
    of: Callable[[Swept], bool] = lambda row: True,
) -> Rule:
    """Pictures of each workload's rows."""

    def made(book: Book) -> Iterator[str]:
        for group in list(book.groups(filter(of, book.swept)))[: MOST // len(kinds)]:
            yield from filter(None, (kind(group) for kind in kinds))

    return made


def shares(book: Book) -> Iterator[str]:
    """Pictures of shares of ideal, the longest length first."""
    rows, made = [r for r in book.swept if r.sparse], []
    for tokens in sorted({r.tokens for r in rows}, reverse=True):
        groups = list(book.groups(r for r in rows if r.tokens == tokens))
        made += filter(None, map(ideals, groups[:MOST]))
    yield from made[:MOST]


APART: dict[str, tuple[str, Callable[[Search], bool]]] = {
    "": ("Max tokens", lambda s: not s.trial.fit_only and s.trial.keep != "nothing"),
    "Longest lengths with results written over inputs": (
        "Max tokens",
        lambda s: not s.trial.fit_only and s.trial.keep == "nothing",
    ),
    "Longest lengths that fit, memory alone, nothing checked or timed": (
        "Tokens that fit",
        lambda s: s.trial.fit_only,
    ),
}
"""Maxima that are never in one picture: a title, the axis, which."""


def reached_none(searches: Iterable[Search]) -> str:
    """How many passed at no length, of what is supported."""
    n = sum(not s.tokens and s.limited_by != "unsupported" for s in searches)
    return SAY["reached none"].format(n=counted(n, "search", "searches")) if n else ""


def maxima(book: Book) -> Iterator[str]:
    """Maxima of a machine, device, mode and budget as bars, each told by what differs."""

    def same(s: Search) -> Any:
        return s.environment.fingerprint, s.trial.device, s.workload.mode, s.trial.memory_budget

    together = [
        (title, y, some)
        for title, (y, among) in APART.items()
        for some in by(same, filter(among, book.searches))
        if any(s.tokens for s in some)
    ]
    for title, y, some in together[:MOST]:
        differ = [told for told in TOLD if len({told(s) for s in some}) > 1]
        points = [
            (", ".join([s.name, *(told(s) for told in differ)]), 0, s.tokens)
            for s in some
            if s.tokens
        ]
        budget, machine = some[0].trial.memory_budget, book.machines[same(some[0])[0]]
        where = f"{some[0].workload.mode}, {some[0].trial.device}"
        where += f", {format_bytes(budget)} budget a rank" if budget else ""
        where += f", machine {machine}" if machine else ""
        yield picture(y, "tokens", "", where, points, reached_none(some), title)


TOLD: list[Callable[[Search], str]] = [
    lambda s: s.workload.dtype,
    lambda s: "causal" if s.workload.causal else "not causal",
    lambda s: f"batch {s.workload.batch}",
    lambda s: f"heads {s.workload.heads}",
    lambda s: f"kv_heads {s.workload.kv_heads}",
    lambda s: f"head_dim {s.workload.head_dim}",
    lambda s: f"{format_seconds(t)} a pass" if (t := s.trial.time_budget) else "no time limit",
    lambda s: f"threads {s.trial.threads}",
]


def over_ranks(book: Book) -> Iterator[str]:
    """Maxima against ranks."""
    found = []
    for title, (y, among) in APART.items():
        for group in list(book.groups(filter(among, book.searches)))[:MOST]:
            points = [(s.label, s.ranks, s.tokens) for s in group if s.tokens]
            none = reached_none(group)
            ranks = {s.ranks for s in group if s.tokens or s.limited_by != "unsupported"}
            if points and len(ranks) > 1:
                at = group[0].where
                found.append(picture(y, "tokens", "ranks", at, points, none, title))
    yield from found[:MOST]


PICTURES: dict[str, Rule] = {
    "Longest lengths": maxima,
    "Lengths swept": pictures(times, peaks, rates),
    "Sparse attention": shares,
    "Sparsity against length": shares,
    "Longest lengths over ranks": over_ranks,
    "Ranks": pictures(speedups),
    "Many ranks": pictures(speedups),
    "Batch, length, time and memory": pictures(each_peak, of=lambda row: row.ranks > 1),
    "Speed-up and efficiency by length": pictures(
        paid, of=lambda row: row.ranks > 1 and row.speedup is not None
    ),
    "Time, memory, relative speed": pictures(times, peaks, roofline),
}
