"""Runs the whole exactness gate and writes docs/exactness.md.

    python -m tests.exactness.table

Every combination of rule, drafter, depth and settings, each with its exact total variation (by enumeration of one block
in every context of the target) and the p-value of a simulation; then random law sets with their corners, the lossy
rules on a stated case, and the known bugs with what the gate measured of each.
"""

import datetime
import os
import platform
import subprocess
import time
from itertools import product
from pathlib import Path

import jax
import numpy as np

from mtpjax.decoding.verify import BLOCK, REJECTION, RULES
from mtpjax.progress import track
from tests.exactness import mutants, simulate
from tests.exactness.drafters import V, table
from tests.exactness.exact import KINDS, Case, draft_chance, error, random_case
from tests.exactness.laws import processed
from tests.exactness.simulate import FAMILY, FULL, GROUPS, TABLE, Combination
from tests.exactness.statistics import LEVEL, POWER, SEEN_TV, rejected

COMMAND = "python -m tests.exactness.table"
DOC = Path(__file__).resolve().parents[2] / "docs" / "exactness.md"
TOLERANCE = 1e-6
SHAPES = [(2, 1), (3, 1), (5, 1), (3, 2), (5, 2), (2, 3), (3, 3), (4, 3), (2, 4), (2, 6)]
SETS = 400
STATED = {
    "typical": ([0.6, 0.4], [0.5, 0.5]),
    "threshold": ([0.8, 0.2], [0.5, 0.5]),
    "relaxed_top_k": ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]),
}


def combination_case(combination: Combination, settings: dict[str, float]) -> Case:
    """One block of a combination, from the very laws of its target and drafter: a set for each context.

    For drafts that are not sampled, a set for each context and draft.
    """
    depth, contexts = combination.depth, list(product(range(V), repeat=2))
    law = np.array([[processed(np.asarray(TABLE)[a, b], **settings) for b in range(V)] for a in range(V)], np.float32)
    own = np.array([processed(row, **settings) for row in table()], np.float32)

    def after(said: tuple[int, ...]) -> tuple[int, int]:
        return said[-2], said[-1]

    p, q = [], []
    for i in range(depth + 1):
        ends = [[after((*context, *said)) for said in product(range(V), repeat=i)] for context in contexts]
        p.append(np.array([[law[end] for end in row] for row in ends]))
        q.append(np.array([[own[end[1]] for end in row] for row in ends]))
    drafts = np.array(list(product(range(V), repeat=depth)))
    if combination.drafter in ("ngram", "deterministic"):
        N = len(contexts) * len(drafts)
        tokens = np.tile(drafts, (len(contexts), 1))[:, None]
        p = [np.repeat(laws, len(drafts), axis=0) for laws in p]
        return Case(p, [], tokens, np.ones((N, 1)), np.full((N, 1), depth), True)
    tokens = np.broadcast_to(drafts, (len(contexts), *drafts.shape))
    zero = tokens == 0
    first = np.where(zero.any(axis=2), zero.argmax(axis=2) + 1, depth)
    count = first if combination.drafter == "stopping" else np.full(first.shape, depth)
    case = Case(p, q[:depth], tokens, np.ones(first.shape), count, False)
    return case._replace(chance=draft_chance(case, case.q))


def simulated_rows() -> tuple[list[str], int]:
    """Rows of the table of combinations, and how many of them fail."""
    found = []
    for combination in track(FULL, "combinations"):
        p_values = simulate.p_values(combination)
        samples = simulate.samples(combination)
        for settings, p_value in zip(GROUPS[combination.group], p_values, strict=True):
            tv = error(RULES[combination.rule], combination_case(combination, settings))
            found.append((combination, settings, tv, samples, p_value))
    fails = [bad or row[2] > TOLERANCE for bad, row in zip(rejected([row[4] for row in found]), found, strict=True)]
    lines = [
        f"| {c} | {', '.join(f'{k} {v:g}' for k, v in s.items())} | {tv:.1e} | {n:,} | {p:.3g} | {word(not bad)} |"
        for (c, s, tv, n, p), bad in zip(found, fails, strict=True)
    ]
    return lines, sum(fails)


def word(good: bool) -> str:
    """The verdict in a word."""
    return "exact" if good else "**FAILS**"


def exact_rows() -> tuple[list[str], int]:
    """Rows of the table of random law sets, and how many of them fail."""
    lines, fails = [], 0
    for rule, kind in track(list(product((REJECTION, BLOCK), KINDS)), "random laws"):
        cases = [
            random_case(np.random.default_rng([*shape, KINDS.index(kind)]), *shape, SETS, kind) for shape in SHAPES
        ]
        worst = max(error(rule, case) for case in cases)
        fails += worst > TOLERANCE
        lines.append(f"| {rule.name} | {kind} | {SETS * len(SHAPES):,} | {worst:.1e} | {word(worst <= TOLERANCE)} |")
    return lines, fails


def stated_case(p: list[float], q: list[float]) -> Case:
    """One drafted token from q, and the law p before and behind it."""
    n = len(p)
    laws = [np.broadcast_to(np.float32(p), (1, n**i, n)) for i in range(2)]
    tokens = np.arange(n).reshape(1, n, 1)
    case = Case(laws, [np.float32(q).reshape(1, 1, n)], tokens, np.ones((1, n)), np.ones((1, n), int), False)
    return case._replace(chance=draft_chance(case, case.q))


def lossy_rows() -> list[str]:
    """Rows of the table of lossy rules, at their default numbers."""
    lines = []
    for name, (p, q) in STATED.items():
        numbers = ", ".join(f"{k} {v:g}" for k, v in RULES[name].settings.items())
        tv = error(RULES[name], stated_case(p, q))
        lines.append(f"| {name} | {numbers} | {p} | {q} | {tv:.3f} | lossy |")
    return lines


def mutant_rows() -> tuple[list[str], int]:
    """Rows of the table of bugs, and how many went unseen."""
    lines, unseen = [], 0
    unit = {"exact": "TV {:.1e}", "u = 0": "{:.0f} impossible tokens", "verify": "p = {:.1e}", "run": "p = {:.1e}"}
    for mutant in track(mutants.MUTANTS, "known bugs"):
        measured = mutant.measure()
        seen = mutant.caught(measured)
        unseen += not seen
        shown = unit[mutant.layer].format(measured)
        lines.append(f"| {mutant.name} | {mutant.layer} | {shown} | {'seen' if seen else '**UNSEEN**'} |")
    return lines, unseen


def git(*arguments: str) -> str:
    """What git says of this checkout."""
    command = ["git", "-C", str(DOC.parent.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def where() -> list[str]:
    """Date, commit, device, versions."""
    commit, changed = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "mtpjax", "tests")
    device = jax.devices()[0]
    return [
        f"- date: {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
        f"- commit: {commit}{' with uncommitted changes' if changed else ''}",
        f"- device: {device.platform}, {device.device_kind}, {os.cpu_count()} cores, {platform.machine()}",
        f"- jax {jax.__version__}, Python {platform.python_version()}",
        f"- command: `{COMMAND}`",
    ]


def section(title: str, text: str, columns: list[str], rows: list[str]) -> list[str]:
    """A heading, what the table says, the table."""
    return ["", f"## {title}", "", text, "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *rows]


def document() -> tuple[str, int]:
    """The page and the number of failures in it."""
    start, place = time.perf_counter(), where()
    combinations, failed = simulated_rows()
    laws, failed_laws = exact_rows()
    bugs, unseen = mutant_rows()
    failures = failed + failed_laws + unseen
    minutes = (time.perf_counter() - start) / 60
    lines = [
        "# Exactness\n\nWritten by a command; change the tests, not this page.\n",
        *place,
        f"- took {minutes:.1f} minutes; {failures} failures",
        *section(
            "Combinations of rule, drafter and settings",
            "Exact TV: total variation between the joint law of one block and the target's, by enumeration of every "
            "draft, coin and next token through the rule's own f32 code; the largest over all contexts of the target. "
            "Samples: rows of whole outputs through the public call, compared with the target's law by χ². Verdict: "
            f"exact if TV ≤ {TOLERANCE:g} and Holm's procedure at {LEVEL:g} over all {FAMILY} tests does not reject. "
            f"Each test sees a TV of {SEEN_TV} with a chance of at least {POWER}. An output of one possible text (a "
            "greedy row) has p-value 1 if it is that text, else 0.",
            ["combination", "setting", "exact TV", "samples", "χ² p-value", "verdict"],
            combinations,
        ),
        *section(
            "Random laws and their corners",
            f"(Vocabulary, depth): {', '.join(map(str, SHAPES))}. Zeros, equal and nearly equal laws, disjoint "
            "supports, one-hot p and q. `stopping`: the drafter may stop after any prefix. `deterministic`: one-hot q, "
            "any number proposed.",
            ["rule", "drafts", "law sets", "largest TV", "verdict"],
            laws,
        ),
        *section(
            "Lossy rules on a stated case",
            "One draft from q where the target's law is p; at the rules' default numbers.",
            ["rule", "numbers", "p", "q", "exact TV", "verdict"],
            lossy_rows(),
        ),
        *section(
            "Known bugs, put back",
            "Each is put into the code or the drafter; the gate's layer must fail: a TV above the tolerance, a token "
            "that the target can't say, or a p-value under 1e-9.",
            ["bug", "layer", "measured", "verdict"],
            bugs,
        ),
    ]
    return "\n".join(lines) + "\n", failures


def main() -> int:
    """Write the page; 1 if anything in it fails."""
    text, failures = document()
    DOC.parent.mkdir(exist_ok=True)
    DOC.write_text(text, encoding="utf-8")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
