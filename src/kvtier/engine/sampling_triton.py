"""Sample tokens on CUDA without sorting, and write the next token and position into the rows on the device.

One program samples one row of logits. It reads the logits several times in one kernel, so they stay in the L2 cache.
The score of a token is its logit. The weight of a token is proportional to its probability. top-k and top-p keep the
tokens whose scores reach a threshold, which is searched among all float32 numbers. Each pass over the row compares all
scores with three numbers and leaves a quarter of the range, so 16 passes are enough for 2^32 numbers. Of tokens with
equal scores, those with the lowest ids are kept first. The sampled token is found in the running sum of the kept
weights, in order of token id. The order of all additions depends only on the size of the vocabulary, so results are
reproducible. Weights are added in float32 inside a chunk of the vocabulary, and in float64 otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.engine.forward import ForwardBatch
from kvtier.engine.rows import DeviceRows
from kvtier.engine.sampling import COLUMNS, IN_PROMPT, SLOT, Resident
from kvtier.state import State

_CHUNK, _WARPS = 8192, 16  # tokens per iteration, warps: fastest of 6 pairs (H200, measured on 2026-11-19)
# Columns of a head. A head is the state of one row on the device, see sampling.COLUMNS.
_POSITION, _KEY, _TEMPERATURE, _MIN_P, _TOP_P = (tl.constexpr(each) for each in range(1, 6))
_TOP_K, _REPETITION, _PRESENCE, _FREQUENCY = (tl.constexpr(each) for each in range(6, SLOT))
_SLOT, _ON_HOST, _COLUMNS = tl.constexpr(SLOT), tl.constexpr(SLOT + 1), tl.constexpr(COLUMNS)
_IN_PROMPT, _LARGEST = tl.constexpr(IN_PROMPT), tl.constexpr(3.4028234663852886e38)


@triton.jit
def _number(head, column: tl.constexpr):
    """Return the float64 number whose bits are in a column of a head."""
    return tl.load(head + column).to(tl.float64, bitcast=True)


@triton.jit
def _uniform(key, position):
    """Return the number in [0, 1) that `sampling.uniforms` computes for a key and a position."""
    state = (key + (position + 1) * (-7046029254386353131)).to(tl.uint64)
    state = (state ^ (state >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return ((state ^ (state >> 31)) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _penalize(logits, counts, head, vocab, CHUNK: tl.constexpr):
    """Apply the penalties to a row of logits, in place. Finite logits stay finite."""
    repetition, presence = _number(head, _REPETITION).to(tl.float32), _number(head, _PRESENCE).to(tl.float32)
    frequency = _number(head, _FREQUENCY).to(tl.float32)
    for first in range(0, vocab, CHUNK):
        at = first + tl.arange(0, CHUNK)
        count = tl.load(counts + at, mask=at < vocab, other=0)
        score = tl.load(logits + at, mask=at < vocab, other=0.0)
        times = (count & (_IN_PROMPT - 1)).to(tl.float32)
        changed = tl.where(score > 0, score / repetition, score * repetition)
        changed = tl.where(times > 0, changed - (presence + frequency * times), changed)
        changed = tl.minimum(tl.maximum(changed, -_LARGEST), _LARGEST)
        is_finite = (score >= -_LARGEST) & (score <= _LARGEST)
        tl.store(logits + at, changed, mask=(at < vocab) & (count != 0) & is_finite)
    tl.debug_barrier()  # the next loop may read a number that another thread has written


@triton.jit
def _highest(logits, vocab, CHUNK: tl.constexpr):
    """Return the highest score, the first token with this score, and True if the score is infinite or any is NaN."""
    best, best_at = tl.full((CHUNK,), -float("inf"), tl.float32), tl.zeros((CHUNK,), tl.int32)
    wrong = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, vocab, CHUNK):
        at = first + tl.arange(0, CHUNK)
        score = tl.load(logits + at, mask=at < vocab, other=-float("inf"))
        wrong = wrong | (score != score).to(tl.int32)
        best_at, best = tl.where(score > best, at, best_at), tl.maximum(best, score)
    highest = tl.max(best, 0)
    is_wrong = (tl.max(wrong, 0) > 0) | (highest > _LARGEST) | (highest < -_LARGEST)
    return highest, tl.min(tl.where(best == highest, best_at, vocab), 0).to(tl.int64), is_wrong


@triton.jit
def _key(score):
    """Map a score to an integer. The integers have the same order as the scores."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # + 0.0 changes -0.0 to 0.0, because the two are equal
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _score(key):
    """Return the score that `_key` maps to `key`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(logits, at, vocab, highest, scale, WEIGHTED: tl.constexpr):
    """Return the scores and weights of the tokens `at`. Without WEIGHTED, the weight of each token is 1."""
    score = tl.load(logits + at, mask=at < vocab, other=-float("inf"))
    return score, tl.exp2((score - highest) * scale) if WEIGHTED else (at < vocab).to(tl.float32)


@triton.jit
def _above(logits, vocab, highest, scale, cut, WEIGHTED: tl.constexpr, CHUNK: tl.constexpr):
    """Return the weight of scores above `cut`, the weight of one token at `cut`, and the number of tokens at `cut`."""
    above, equal, count = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.int32)
    for first in range(0, vocab, CHUNK):
        at = first + tl.arange(0, CHUNK)
        score, weight = _weigh(logits, at, vocab, highest, scale, WEIGHTED)
        above += tl.where(score > cut, weight, 0.0)
        equal = tl.maximum(equal, tl.where(score == cut, weight, 0.0))
        count += ((score == cut) & (at < vocab)).to(tl.int32)
    return tl.sum(above.to(tl.float64), 0), tl.max(equal, 0).to(tl.float64), tl.sum(count, 0)


@triton.jit
def _threshold(logits, vocab, highest, scale, lowest, goal, WEIGHTED: tl.constexpr, CHUNK: tl.constexpr):
    """Return the highest threshold >= `lowest` for which all scores >= the threshold together weigh at least `goal`."""
    low, high = _key(lowest), _key(highest)
    while low < high:
        step = (high - low + 3) // 4
        one, two, three = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        score1, score2, score3 = _score(one), _score(two), _score(three)
        sum1, sum2 = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
        sum3 = tl.zeros((CHUNK,), tl.float32)
        for first in range(0, vocab, CHUNK):
            score, weight = _weigh(logits, first + tl.arange(0, CHUNK), vocab, highest, scale, WEIGHTED)
            sum1 += tl.where(score >= score1, weight, 0.0)
            sum2 += tl.where(score >= score2, weight, 0.0)
            sum3 += tl.where(score >= score3, weight, 0.0)
        reaches1 = tl.sum(sum1.to(tl.float64), 0) >= goal
        reaches2 = tl.sum(sum2.to(tl.float64), 0) >= goal
        reaches3 = tl.sum(sum3.to(tl.float64), 0) >= goal
        new_low = tl.where(reaches3, three, tl.where(reaches2, two, tl.where(reaches1, one, low)))
        new_high = tl.where(reaches3, high, tl.where(reaches2, three - 1, tl.where(reaches1, two - 1, one - 1)))
        low, high = new_low, tl.maximum(new_high, new_low)
    return _score(low)


@triton.jit
def _last_tie(logits, vocab, cut, ties, CHUNK: tl.constexpr):
    """Return the id of the last token to keep if the first `ties` tokens with the score `cut` are kept."""
    last, seen = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for first in range(0, vocab, CHUNK):
        at = first + tl.arange(0, CHUNK)
        equal = (tl.load(logits + at, mask=at < vocab, other=float("nan")) == cut).to(tl.int32)
        is_kept = (equal > 0) & (tl.cumsum(equal, 0) + seen <= ties)
        last, seen = tl.maximum(last, tl.max(tl.where(is_kept, at, 0), 0)), seen + tl.sum(equal, 0)
    return last


@triton.jit
def _kept(logits, at, vocab, highest, scale, min_p, cut, last):
    """Return the weights, with 0 for tokens that are not kept. Tokens with the score `cut` are kept up to id `last`."""
    score, weight = _weigh(logits, at, vocab, highest, scale, True)
    return tl.where(((score > cut) | ((score == cut) & (at <= last))) & (weight >= min_p), weight, 0.0)


@triton.jit
def _pick(logits, vocab, highest, scale, min_p, cut, last, uniform, CHUNK: tl.constexpr, MOST: tl.constexpr):
    """Return the token at which the running sum of weights exceeds `uniform` * total. There are at most MOST chunks."""
    lanes, chunks = tl.arange(0, CHUNK), tl.arange(0, MOST)
    sums = tl.zeros((MOST,), tl.float64)
    for first in range(0, vocab, CHUNK):
        inside = tl.sum(_kept(logits, first + lanes, vocab, highest, scale, min_p, cut, last), 0)
        sums += tl.where(chunks == first // CHUNK, inside, 0.0).to(tl.float64)
    running = tl.cumsum(sums, 0)
    target = uniform * tl.max(running, 0)
    # The first chunk whose running sum exceeds the target. If rounding prevents this, the last chunk with a kept token.
    place = tl.min(tl.where(running > target, chunks, MOST), 0)
    place = tl.minimum(place, tl.max(tl.where(sums > 0, chunks, 0), 0))
    before, at = tl.sum(tl.where(chunks < place, sums, 0.0), 0), place * CHUNK + lanes
    weight = _kept(logits, at, vocab, highest, scale, min_p, cut, last)
    exceeds = (tl.cumsum(weight.to(tl.float64), 0) + before > target) & (weight > 0)
    found = tl.min(tl.where(exceeds, at, vocab), 0)
    final = tl.max(tl.where(weight > 0, at, 0), 0)  # used if no sum exceeds the target
    return tl.where(found < vocab, found, final).to(tl.int64)


@triton.jit
def _sample_rows(
    logits_ptr, heads_ptr, other_heads, control_ptr, positions_ptr, counts_ptr, tokens_ptr, vocab,
    IN_GRAPH: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Sample one row. If IN_GRAPH, also write the next token and position to the head, and count the token.

    A CUDA graph skips rows whose logits the host changes (_ON_HOST). `control_ptr` has the index of the front tensor of
    the heads as element 0, and the number of rows as element 2. `other_heads` is the distance from tensor 0 to 1.
    """
    row = tl.program_id(0).to(tl.int64)
    head, logits = heads_ptr + row * _COLUMNS, logits_ptr + row * vocab
    is_mine = row >= 0
    if IN_GRAPH:
        head += tl.load(control_ptr).to(tl.int64) * other_heads
        is_mine = (row < tl.load(control_ptr + 2)) & (tl.load(head + _ON_HOST) == 0)
    if is_mine:
        slot, temperature = tl.load(head + _SLOT), _number(head, _TEMPERATURE).to(tl.float32)
        counts = counts_ptr + tl.maximum(slot, 0) * vocab
        if (slot >= 0) & (tl.load(head + _ON_HOST) == 0):  # the host penalizes rows with _ON_HOST
            _penalize(logits, counts, head, vocab, CHUNK)
        highest, token, is_wrong = _highest(logits, vocab, CHUNK)
        position = tl.load(head + _POSITION) + 1
        if not IN_GRAPH:
            position = tl.load(positions_ptr + row)
        if (temperature > 0) & (is_wrong == 0):
            top_k, top_p = tl.load(head + _TOP_K), _number(head, _TOP_P)
            scale = 1.4426950408889634 / tl.maximum(temperature, 1e-30)  # for exp2; finite, as inf * 0 is NaN
            cut, ties = highest * 0 - float("inf"), tl.full((), vocab, tl.float64)
            one, count = tl.zeros((), tl.float64), tl.zeros((), tl.int32)
            if (top_k > 0) & (top_k < vocab):
                cut = _threshold(logits, vocab, highest, scale, cut, top_k, False, CHUNK)
                above, one, count = _above(logits, vocab, highest, scale, cut, False, CHUNK)
                ties = top_k - above
            if top_p < 1.0:
                above, one, count = _above(logits, vocab, highest, scale, cut, True, CHUNK)
                total = above + tl.minimum(ties, count) * one
                mass = top_p * total
                # All tokens below this score together weigh less than half of the weight that top-p may drop.
                low = highest + tl.log2(((total - mass) / (2 * vocab)).to(tl.float32)) / scale
                low = _threshold(logits, vocab, highest, scale, tl.maximum(low, cut), mass, True, CHUNK)
                above, one, count = _above(logits, vocab, highest, scale, low, True, CHUNK)
                # To reach `mass`, this many tokens with the score `low` are needed besides all tokens above `low`.
                needed = tl.maximum(tl.ceil((mass - above) / tl.maximum(one, 1e-300)), 1.0)
                ties = tl.where(low == cut, tl.minimum(needed, ties), needed)
                cut = low
            last = tl.full((), vocab, tl.int32)
            if ties < count:
                last = _last_tie(logits, vocab, cut, ties, CHUNK)
            uniform, min_p = _uniform(tl.load(head + _KEY), position), _number(head, _MIN_P).to(tl.float32)
            token = _pick(logits, vocab, highest, scale, min_p, cut, last, uniform, CHUNK, MOST)
        token = tl.where(is_wrong, -1, token)
        tl.store(tokens_ptr + row, token)
        if IN_GRAPH:
            tl.store(head, token)
            tl.store(head + _POSITION, position)
            count = counts + tl.maximum(token, 0)
            tl.store(count, tl.load(count) + 1, mask=(slot >= 0) & (token >= 0))


@triton.jit
def _load_rows(
    heads_ptr, other_heads, tables_ptr, other_tables, table_stride, control_ptr, ids_ptr, positions_ptr, slots_ptr,
    contexts_ptr, out_ptr, out_stride, BLOCK_TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the model inputs of one row. `other_*` is the distance between the two tensors of a State."""
    row = tl.program_id(0).to(tl.int64)
    is_row = row < tl.load(control_ptr + 2)
    head = heads_ptr + tl.load(control_ptr).to(tl.int64) * other_heads + row * _COLUMNS
    table = tables_ptr + tl.load(control_ptr + 1).to(tl.int64) * other_tables + row * table_stride
    token = tl.maximum(tl.load(head, mask=is_row, other=0), 0)  # the token of a failed row is -1
    position = tl.load(head + _POSITION, mask=is_row, other=0)
    slot = tl.load(table + position // BLOCK_TOKENS, mask=is_row, other=0).to(tl.int64) * BLOCK_TOKENS
    tl.store(ids_ptr + row, token)
    tl.store(positions_ptr + row, position)
    tl.store(slots_ptr + row, tl.where(is_row, slot + position % BLOCK_TOKENS, -1))
    tl.store(contexts_ptr + row, (position + 1).to(tl.int32))
    num_blocks = position // BLOCK_TOKENS + 1
    for first in range(0, num_blocks, WIDTH):
        at = first + tl.arange(0, WIDTH)
        blocks = tl.load(table + at, mask=(at < num_blocks) & is_row, other=0)
        tl.store(out_ptr + row * out_stride + at, blocks, mask=at < num_blocks)


def load_rows(rows: DeviceRows, control: torch.Tensor, inputs: ForwardBatch) -> None:
    """Write the tokens, positions, slots and block tables of the rows to the inputs of the model."""
    heads, tables = rows.heads, rows.tables
    _load_rows[(len(inputs.input_ids),)](
        *(heads.front, _distance(heads), tables.front, _distance(tables), tables.front.stride(0), control),
        *(inputs.input_ids, inputs.positions, inputs.slots, inputs.context_lens),
        *(inputs.block_tables, inputs.block_tables.stride(0)),
        BLOCK_TOKENS=rows.block_tokens,
        WIDTH=256,
    )


def sample_captured(logits: torch.Tensor, rows: DeviceRows, control: torch.Tensor, tokens: torch.Tensor) -> None:
    """Sample the rows whose logits the host does not change. Write the tokens to `tokens` and to the rows' heads."""
    heads = rows.heads
    _sample_rows[(len(logits),)](
        *(logits, heads.front, _distance(heads), control, tokens, rows.counts, tokens, logits.shape[1]),
        IN_GRAPH=True,
        CHUNK=_CHUNK,
        MOST=triton.next_power_of_2(triton.cdiv(logits.shape[1], _CHUNK)),
        num_warps=_WARPS,
    )


def sample_rows(logits: torch.Tensor, resident: Resident) -> torch.Tensor:
    """Sample one token for each row of logits. If _ON_HOST is set, the host has already applied penalties."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _sample_rows[(len(logits),)](
        *(logits.contiguous(), resident.heads, 0, tokens, resident.positions, resident.counts, tokens, logits.shape[1]),
        IN_GRAPH=False,
        CHUNK=_CHUNK,
        MOST=triton.next_power_of_2(triton.cdiv(logits.shape[1], _CHUNK)),
        num_warps=_WARPS,
    )
    return tokens


def _distance(state: State) -> int:
    """Return the number of elements from the front tensor to the back tensor of a State."""
    return (state.back.data_ptr() - state.front.data_ptr()) // state.front.element_size()
