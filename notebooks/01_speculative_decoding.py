# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Speculative decoding, step by step
#
# A language model writes one token per pass, and every pass reads all of its weights. Reading them is what takes the
# time; scoring five tokens in one pass costs far less than five passes. Speculative decoding uses that: something
# cheap *drafts* a few tokens, the model (the *target*) checks them all in one pass, and keeps those that it would
# have said itself. The output does not change. Only the number of passes does.
#
# This notebook runs it on a real model, takes one step apart, checks that the output is the same, with and without
# sampling, and then asks what it costs and when it does not pay. Ten minutes to read; a few to run on a CPU.

# %% tags=["parameters"] smoke="NEW_TOKENS, STEPS, ROWS, WIDTHS, TIMED = 6, 1, 2_000, (1, 2), 1"
NEW_TOKENS = 64  # the most tokens to generate in one call
STEPS = 99  # steps of the loop to take by hand
ROWS = 20_000  # samples wherever a law is checked
WIDTHS = (1, 2, 3, 5, 9)  # window widths to time
TIMED = 8  # timed passes of each width

# %% [markdown]
# ## Load and generate
#
# Loading is one line. Without an argument it takes the model that comes with the project; give it the path of a GGUF
# file or of a Hugging Face folder for any other. We choose f32 here, so that "the same output" can mean *exactly*.

# %%
import mtpjax

lm = mtpjax.load(precision="f32")
lm

# %%
PROMPT = """Correct the spelling mistakes in this text and give the whole text back:

The libary opens at nine in the morning and closes at six in the evening. Books can be borowed for three weeks. \
A book that is not returned in time costs ten cents for each day."""

plain = mtpjax.generate(lm, PROMPT, chat=True, max_new_tokens=NEW_TOKENS)
print(plain.text[0])
print()
print(plain.stats)

# %% [markdown]
# It is a small model: it mends *borowed* and leaves *libary*. The figures: how many tokens came out; tokens per
# second after the first; how long the prompt took (the time to the first token); and, apart from all of these, the
# time that JAX spent compiling. A second call of the same shape compiles nothing.
#
# ## One step, taken apart
#
# The loop of the library is a chain of pure functions, and each can be called alone. First the prompt goes through
# the target, which says the first token:

# %%
from mtpjax.decoding import loop
from mtpjax.decoding.drafters import Params
from mtpjax.decoding.drive import start_state
from mtpjax.decoding.generate import encode_prompts, target_of
from mtpjax.decoding.request import make_request

target = target_of(lm)
ids = encode_prompts(lm, [PROMPT], chat=True)
request = make_request(target, ids, max_new_tokens=NEW_TOKENS, stop_ids=lm.tokenizer.stop_ids, drafter="ngram", depth=4)
rule, drafter = request.rule, request.drafter
params = Params(lm.params, request.drafter_params)  # the target's, and the drafter's: none here

state = start_state(target, request)
state = loop.prefill(params, state, target=target, memory=drafter.memory, rule=rule, chunk=request.chunk)

# %%
import html

from IPython.display import HTML


def word(token):
    """A token as it can be read: the quotes show its spaces."""
    return repr(lm.tokenizer.decode([int(token)], skip_special=False))


def cell(token):
    return html.escape(word(token))


def accepted(token):
    return f"<b style='color:#1b7f5c'>{cell(token)} ✓</b>"


def rejected(token):
    return f"<s style='color:#b3402a'>{cell(token)}</s>"


def table(header, rows):
    lines = [f"<tr>{''.join(f'<td>{entry}</td>' for entry in row)}</tr>" for row in rows]
    return HTML(f"<table><tr>{''.join(f'<th>{entry}</th>' for entry in header)}</tr>{''.join(lines)}</table>")


last = state.tokens[0, state.length[0] - 1]
print(f"the prompt has {state.prompt_length[0]} tokens; the target's first token is {word(last)}")

# %% [markdown]
# **Draft.** The drafter here is *prompt lookup*, which has no weights: it looks for the last words in the text so far
# and proposes what followed them there. At depth 4 it proposes four tokens.

# %%
proposal, state = loop.draft(params, state, drafter)
print("proposed:", *[word(token) for token in proposal.tokens[0]])

# %% [markdown]
# **Score.** One target pass over the *window*: the last token, then the drafts. At each place the target says what
# should come next, given everything before, as if the drafts were right.

# %%
logits, features, cache = loop.score(params, state, proposal, target, drafter.memory.features)
print("logits:", logits.shape, "= (batch, window, vocabulary)")

# %% [markdown]
# **Verify.** Drafts are kept from the left as long as they are what the target says. At the first that is not, its
# place goes to the target's own token, and what was drafted behind it is thrown away: it answered to a text that will
# not be written. So every pass gives at least one token, and at most depth + 1.

# %%
verdict = loop.verify(target, rule, state, proposal, logits)
count = int(verdict.accepted[0])

window = [last, *proposal.tokens[0]]
says = logits[0].argmax(axis=-1)
rows = []
for place, read in enumerate(window):
    if place == len(window) - 1:
        draft = "(no draft: a bonus)"
    else:
        draft = (accepted if place < count else rejected)(proposal.tokens[0, place])
    kept = "" if place > count else "committed"
    rows.append((place, cell(read), cell(says[place]) if place <= count else "-", draft, kept))
table(("place", "the target reads", "and says next", "the draft was", ""), rows)

# %% [markdown]
# **Commit** and **settle.** The accepted drafts and the target's token are appended. The cache now holds keys of
# rejected drafts too, but they lie behind the committed length, where no query looks: rolling back is not counting
# them.

# %%
before = state.length
state = loop.commit(state.replace(cache=cache), proposal, verdict)
state = loop.settle(params, state, before, verdict, features, target, drafter)
print(f"{int(state.length[0] - before[0])} tokens from one pass; the cache holds {state.cache.length[0]} tokens")

# %% [markdown]
# ## The whole loop, by hand
#
# The same five calls, until the text ends. Bold is an accepted draft, struck through a rejected one.

# %%
rows = []
while int(state.status[0]) == loop.RUNNING and len(rows) < STEPS:
    before = state.length
    proposal, state = loop.draft(params, state, drafter)
    logits, features, cache = loop.score(params, state, proposal, target, drafter.memory.features)
    verdict = loop.verify(target, rule, state, proposal, logits)
    state = loop.commit(state.replace(cache=cache), proposal, verdict)
    state = loop.settle(params, state, before, verdict, features, target, drafter)

    count, proposed = int(verdict.accepted[0]), int(proposal.count[0])
    drafts = [(accepted if i < count else rejected)(proposal.tokens[0, i]) for i in range(proposed)]
    emitted = int(state.length[0] - before[0])
    rows.append((len(rows) + 2, " ".join(drafts) or "(none found)", cell(verdict.next_token[0]), emitted))
table(("step", "drafts", "the target's own", "tokens"), rows)

# %% [markdown]
# Most steps copy. At *borrowed*, a word that the prompt does not have, there is nothing to copy; the step after it
# finds "for" and guesses what followed the last time, all wrong, and the target's own token is all that it gives.
# Then the copying goes on. In the last step the end-of-text token was drafted too, and what stood behind it no longer
# counts.
#
# The library compiles exactly this into one `while_loop`, and `generate` drives it. Accepted drafts are marked:

# %%
fast = mtpjax.generate(lm, PROMPT, chat=True, max_new_tokens=NEW_TOKENS, drafter="ngram", depth=4)
fast

# %%
s = fast.stats
print(f"{s.new_tokens} tokens in {s.target_passes} passes behind the first token")
print(f"acceptance length: {s.acceptance_length:.2f} tokens a pass")
print("drafts of which 0, 1, ... tokens were accepted:", s.accept_histogram)
print("rate at each place, given that those before were accepted:", [round(r, 2) for r in s.rates_conditional])

# %% [markdown]
# ## Is it the same text?
#
# For greedy decoding there is nothing to argue about. The ids are equal:

# %%
assert fast.ids == plain.ids
print("equal:", fast.ids == plain.ids)

# %% [markdown]
# In bf16 a pass over five tokens rounds a little differently from a pass over one, and two tokens that are almost
# equally likely can change places. That is rounding and not the rule, and it happens to plain decoding in another
# batch as well.
#
# ## And with sampling?
#
# Now the target has a law *p* and the draft was drawn from another law *q*. A draft *x* is accepted with probability
# min(1, p(x)/q(x)). If it is rejected, the token is drawn from what *q* gave too little of: max(p − q, 0), made to
# sum to one ([Leviathan et al.](https://arxiv.org/abs/2211.17192), [Chen et al.](https://arxiv.org/abs/2302.01318)).
# On four tokens we can add up every way in which a token can come out:

# %%
import numpy as np

p = np.array([0.50, 0.25, 0.15, 0.10])  # the target's law
q = np.array([0.20, 0.45, 0.05, 0.30])  # the draft's law

accept = np.minimum(1, p / q)
alpha = np.sum(q * accept)
residual = np.maximum(p - q, 0)
residual = residual / residual.sum()
outcome = q * accept + (1 - alpha) * residual

distance = np.abs(p - q).sum() / 2
print("the law of what comes out:", outcome.round(10))
print("the target's law         :", p)
print(f"a draft is accepted with probability {alpha:.2f}; 1 - TV(p, q) = {1 - distance:.2f}")

# %% [markdown]
# The acceptance rate is 1 minus the total-variation distance of the two laws: how often a draft passes says how close
# the drafter is to the target. Now the library's own rule, on many rows with a key each:

# %%
import jax
import jax.numpy as jnp

from mtpjax.decoding.drafters import Proposal, chain
from mtpjax.decoding.verify import RULES

drafts = jnp.asarray(np.random.default_rng(0).choice(4, size=(ROWS, 1), p=q), jnp.int32)
proposal = Proposal(
    tokens=drafts,
    q=jnp.broadcast_to(jnp.asarray(q, jnp.float32), (ROWS, 1, 4)),
    count=jnp.ones(ROWS, jnp.int32),
    parents=chain(1),
)
laws = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (ROWS, 2, 4))  # one place to verify, one behind it
keys = jax.vmap(jax.random.key)(jnp.arange(ROWS))
verdict = RULES["rejection"].verify(laws, proposal, keys, {})

passed = np.asarray(verdict.accepted) == 1
token = np.where(passed, drafts[:, 0], verdict.next_token)
frequency = np.bincount(token, minlength=4) / ROWS
print("frequency of each token:", frequency.round(3))
print(f"accepted: {passed.mean():.3f}, expected {alpha:.3f}")

# %%
import matplotlib.pyplot as plt

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", sharey=True)
place = np.arange(4)
left.bar(place - 0.2, p, 0.4, label="target's law p", color="#5b5ea6")
left.bar(place + 0.2, q, 0.4, label="draft's law q", color="#d9a441")
right.bar(place, q * accept, 0.6, label="accepted drafts: min(p, q)", color="#1b7f5c")
right.bar(place, (1 - alpha) * residual, 0.6, bottom=q * accept, label="drawn after a rejection", color="#a8d5c2")
right.plot(place, frequency, "kD", markersize=4, label="frequency in the simulation")
left.set(title="two laws", xticks=place, xlabel="token", ylabel="probability")
right.set(title="what comes out is p", xticks=place, xlabel="token")
left.legend()
right.legend()
plt.show()

# %% [markdown]
# ## Your own target
#
# To the loop a target is a record of pure functions. Here is one without a network: the law of the next token is the
# row of a table, and there is nothing to cache. Everything else of the library works on it unchanged.

# %%
from mtpjax.decoding.drive import run
from mtpjax.decoding.result import emitted_ids
from mtpjax.decoding.target import Target

V = 4


def forward(params, ids, cache, positions, mask, logits_at, features):
    logits = params[ids]  # [batch, window, V]: what follows depends on the last token alone
    if logits_at is not None:  # the prompt's pass wants one place of each row only
        logits = jnp.take_along_axis(logits, logits_at[:, :, None], axis=1)
    return logits, (), cache


table_target = Target(
    forward,
    init_cache=lambda batch, capacity: jnp.zeros(batch, jnp.int32),
    set_length=lambda cache, length: length,
    vocab_size=V,
    emit_vocab=V,
    max_context=64,
)
weights = jnp.asarray(np.random.default_rng(1).normal(size=(V, V)), jnp.float32)

# %% [markdown]
# The joint law of three tokens after a prompt can be enumerated: 64 sequences. We sample them with and without
# drafts. Every sample is off the exact law by chance; speculation must not be off by more than plain sampling is.

# %%
P = np.asarray(jax.nn.softmax(weights))
prompt = [0, 1, 2, 3, 0]
exact = np.einsum("a,ab,bc->abc", P[prompt[-1]], P, P).ravel()
chance = np.sqrt(2 * exact * (1 - exact) / (np.pi * ROWS)).sum() / 2


def sampled_law(**settings):
    request = make_request(table_target, [prompt] * ROWS, max_new_tokens=3, temperature=1.0, seed=7, **settings)
    final, stats = run(table_target, weights, request)
    a, b, c = np.array(emitted_ids(final)).T
    return np.bincount(a * V * V + b * V + c, minlength=V**3) / ROWS, stats


rows = []
for name, settings in {"plain": {}, "prompt lookup, depth 2": {"drafter": "ngram", "depth": 2}}.items():
    law, stats = sampled_law(**settings)
    tv = np.abs(law - exact).sum() / 2
    rows.append((name, f"{tv:.4f}", f"{stats.acceptance_length:.2f}"))
rows.append(("expected from chance alone", f"{chance:.4f}", ""))
table((f"{ROWS:,} samples", "TV to the exact law", "tokens a pass"), rows)

# %% [markdown]
# ## What does it cost?
#
# Let τ be the acceptance length, v the time of a window pass in plain passes, and c that of one draft. A step takes
# γ·c + v and gives τ tokens, so
#
# $$\text{gain} = \frac{\mathbb{E}[\tau]}{\gamma c + v},
# \qquad \mathbb{E}[\tau] = \frac{1 - \alpha^{\gamma+1}}{1 - \alpha}$$
#
# where γ is the depth, and the second formula holds if each draft is accepted with the same probability α, whatever
# happened to the others. Prompt lookup compares a few hundred integers: c is 0. Papers often set v = 1. Here it is
# measured:

# %%
import time
from functools import partial
from statistics import median


@partial(jax.jit, donate_argnames="cache")
def window_pass(params, cache, ids, positions):
    logits, _, cache = target.forward(params, ids, cache, positions, None, None, ())
    return jnp.argmax(logits, axis=-1), cache


def pass_ms(width):
    cache = target.set_length(target.init_cache(1, 256), jnp.full(1, 128))
    window, positions = jnp.ones((1, width), jnp.int32), 128 + jnp.arange(width)[None, :]
    times = []
    for _ in range(TIMED + 1):
        start = time.perf_counter()
        choice, cache = window_pass(lm.params, cache, window, positions)
        choice.block_until_ready()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times[1:])  # the first one compiles


cost_ms = {width: pass_ms(width) for width in WIDTHS}
v = {width: ms / cost_ms[1] for width, ms in cost_ms.items()}
table(
    ("window (tokens)", *cost_ms),
    [("pass (ms)", *(f"{ms:.1f}" for ms in cost_ms.values())), ("v", *(f"{ratio:.2f}" for ratio in v.values()))],
)

# %%
depth = np.arange(max(WIDTHS))
cost = np.interp(depth + 1, list(v), list(v.values()))
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.plot(list(v), list(v.values()), "o-", color="black")
left.axhline(1, color="lightgrey", zorder=0)
left.set(title="cost of a window pass, v", xlabel="window (tokens)", ylabel="plain passes", ylim=(0, None))
for alpha, colour in ((0.9, "#1b7f5c"), (0.7, "#5b5ea6"), (0.4, "#d9a441"), (0.1, "#b3402a")):
    tau = (1 - alpha ** (depth + 1)) / (1 - alpha)
    right.plot(depth, tau / cost, "o-", markersize=4, color=colour, label=f"α = {alpha}")
    right.plot(depth, tau, ":", color=colour)
right.axhline(1, color="lightgrey", zorder=0)
right.set(title="predicted gain (dotted: if v were 1)", xlabel="depth γ", ylim=(0, 5))
right.legend()
plt.show()

# %% [markdown]
# The window is not free here, so a deeper draft is not always a better one: at small α each further place costs more
# than it brings, and below the grey line plain decoding is faster. (These are one machine's times, with a model that
# is small enough for everything beside the weights to count.)
#
# ## Where prompt lookup helps, and where it does not
#
# It can only copy. That is a lot where the answer repeats the prompt, and nothing where it does not:

# %%
PROMPTS = {
    "correct a text": PROMPT,
    "times table": "Write the multiplication table of 3, from 3 x 1 = 3 to 3 x 10 = 30.",
    "chat": "Why is the sky blue?",
}
rows = []
for name, text in PROMPTS.items():
    slow = mtpjax.generate(lm, text, chat=True, max_new_tokens=NEW_TOKENS).stats
    s = mtpjax.generate(lm, text, chat=True, max_new_tokens=NEW_TOKENS, drafter="ngram", depth=4).stats
    rows.append((
        name, f"{s.acceptance_length:.2f}", f"{s.acceptance_rate:.2f}", f"{slow.decode_tok_s:.1f}",
        f"{s.decode_tok_s:.1f}", f"{s.decode_tok_s / slow.decode_tok_s:.2f}×",
    ))  # fmt: skip
table(("prompt", "tokens a pass", "accepted / drafted", "plain (tok/s)", "depth 4 (tok/s)", "gain"), rows)

# %% [markdown]
# For the chat prompt nearly every draft is wrong: a step pays for a window of five and gets one token, so plain
# decoding is the better choice as soon as v is more than τ. `experiments/ngram_depth.py` studies this over depth 0 to
# 8 and three kinds of prompt. Where there is nothing to copy, it takes a drafter that has learnt to predict the
# target, such as a multi-token prediction head.
#
# ## Going on alone in Flax
#
# Nothing is hidden behind `lm`: `lm.params` is a nested dict of arrays, `lm.model` a Flax module. So you can leave
# the library here and go on with your own code: the logits of a whole text, for instance, and from them its loss.

# %%
sequence = jnp.asarray([ids[0] + plain.ids[0]])
logits = jax.jit(lm.model.apply)({"params": lm.params}, sequence).logits[0]

log_p = jax.nn.log_softmax(logits)
answer = jnp.arange(len(ids[0]), sequence.shape[1])  # where the model's own answer stands
nll = -log_p[answer - 1, sequence[0, answer]].mean()
print(f"loss of the answer: {nll:.3f} nats a token")
print("layer 0:", jax.tree.map(jnp.shape, lm.params["layers_0"]["attn"]))

# %% [markdown]
# ## FP8
#
# Speculation makes fewer passes; fewer bytes make each pass cheaper where reading them is the limit.
# `precision="fp8"` keeps every large weight as 8-bit floats with one scale for each block of 128 × 128. How much
# smaller is it, and how often does it still choose the same next token?

# %%
lm8 = mtpjax.load(precision="fp8")

log_q = jax.nn.log_softmax(jax.jit(lm8.model.apply)({"params": lm8.params}, sequence).logits[0])
kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1).mean()
same = (log_p.argmax(-1) == log_q.argmax(-1)).mean()

table(
    ("precision", "weights", "same choice as f32", "KL to f32 (nats a token)"),
    [("f32", f"{lm.n_bytes / 1e6:.0f} MB", "", ""), ("fp8", f"{lm8.n_bytes / 1e6:.0f} MB", f"{same:.1%}", f"{kl:.4f}")],
)

# %% [markdown]
# FP8 is not lossless: this is the price in quality, on one short text. On a CPU it is not fast yet either: XLA
# unpacks each weight before it multiplies. `make demo` shows both in figures. All of the above works in FP8
# unchanged.
