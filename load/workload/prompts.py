"""Contents for a trace's prompts: equal hash ids give equal contents, and prompts part where their ids part.

A trace has lengths and sharing but no words. :class:`Planner` scales an arrival to what the served model can take and
notes how much of it earlier arrivals had already; :func:`token_ids` and :func:`text` fill a plan. All of it is a pure
function of (trace so far, scaling, seed): SHAKE-128 is the only source of chance, so a replay is the same on every
machine and version.

Block ``i`` of a prompt covers tokens ``[round(i * b), round((i + 1) * b))`` with ``b = block_tokens * length_scale``;
the last one ends where the scaled prompt ends, one token long at least. Its first tokens spell the id's number among
the ids that follow the same parent, so two prompts differ at the first token after what they share as long as there
are no more siblings than vocabulary, and else at the second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from load.workload.traces import Arrival

_LINES = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea
body information back parent face level office door health person art war history party result change morning
reason research girl guy moment air teacher force education foot boy age policy process music market sense
nation plan college interest death experience effect use class control field development role effort rate
heart drug show leader light voice wife police mind price report decision son view relationship town road arm
difference value building action model season society tax director position player record paper space ground
form event official matter center couple site project activity star table need court oil situation cost
industry figure street image phone data picture practice piece land product doctor wall patient worker news
test movie north love support technology step baby computer type attention film tree source organization hair
look window culture chance brother energy period course summer plant opportunity term letter condition choice
rule daughter south husband floor campaign material population call economy hospital church risk fire future
bank
"""

#: Everyday words, each one token (with the space before it) in common byte-pair vocabularies.
WORDS: tuple[str, ...] = tuple(_LINES.split())


@dataclass(frozen=True, slots=True)
class Scaling:
    """How lengths of the trace become lengths for the served model."""

    length_scale: float = 1.0
    """Prompt tokens sent for each prompt token of the trace."""
    max_input: int | None = None
    """Longer prompts are cut at the end, so what they share at the front stays shared."""
    output_scale: float = 1.0
    max_output: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a prompt that one hash id stands for: tokens ``[start, start + length)``."""

    hash_id: int
    sibling: int
    """Number of this id among those with the same parent, in order of first use."""
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One request, scaled, without contents yet."""

    arrival: Arrival
    pieces: tuple[Piece, ...]
    output_tokens: int
    shared_tokens: int
    """Leading prompt tokens that an earlier plan had too: what an endless cache would not compute again."""

    @property
    def input_tokens(self) -> int:
        """Prompt length."""
        last = self.pieces[-1]
        return last.start + last.length


@dataclass
class Planner:
    """Plans arrivals in the order given; it must be the trace's order for plans to be the same in every run."""

    block_tokens: int
    scaling: Scaling
    #: {parent id, None for first blocks: {hash id: its number among them}}
    _siblings: dict[int | None, dict[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.block_tokens * self.scaling.length_scale < 1:
            raise ValueError(f"length scale {self.scaling.length_scale:g} leaves less than one token of each "
                             f"{self.block_tokens}-token block; use at least {1 / self.block_tokens:.4g}")

    def plan(self, arrival: Arrival) -> Plan:
        """Scales ``arrival`` and remembers its ids."""
        scaled_block = self.block_tokens * self.scaling.length_scale
        limit = self.scaling.max_input
        pieces: list[Piece] = []
        shared_tokens, shares = 0, True
        parent: int | None = None
        last = len(arrival.hash_ids) - 1
        for block, hash_id in enumerate(arrival.hash_ids):
            start = round(block * scaled_block)
            end = round((block + 1) * scaled_block)
            if block == last:
                end = max(round(arrival.input_tokens * self.scaling.length_scale), start + 1)
            if limit is not None:
                end = min(end, limit)
            if start >= end:
                break
            family = self._siblings.setdefault(parent, {})
            shares = shares and hash_id in family
            if shares:
                shared_tokens = end
            pieces.append(Piece(hash_id, family.setdefault(hash_id, len(family)), start, end - start))
            parent = hash_id
        output_tokens = max(1, round(arrival.output_tokens * self.scaling.output_scale))
        if self.scaling.max_output is not None:
            output_tokens = min(output_tokens, self.scaling.max_output)
        return Plan(arrival, tuple(pieces), output_tokens, shared_tokens)


def token_ids(plan: Plan, *, vocabulary: range, seed: int) -> list[int]:
    """``plan.input_tokens`` token ids out of ``vocabulary``."""
    ids: list[int] = []
    for piece in plan.pieces:
        choices = _choices(piece, piece.length, size=len(vocabulary), seed=seed)
        ids.extend((choices + vocabulary.start).tolist())
    return ids


def text(plan: Plan, *, words_per_token: float, seed: int) -> str:
    """Words that make about ``plan.input_tokens`` tokens; never fewer than one a piece."""
    words: list[str] = []
    for piece in plan.pieces:
        first, end = round(piece.start * words_per_token), round((piece.start + piece.length) * words_per_token)
        choices = _choices(piece, max(1, end - first), size=len(WORDS), seed=seed)
        words.extend(WORDS[choice] for choice in choices)
    return " ".join(words)


def probe_text(num_words: int) -> str:
    """``num_words`` words for measuring how many tokens the served model makes of one."""
    return " ".join(WORDS[(7 * i + 3) % len(WORDS)] for i in range(num_words))


def words_per_token(samples: Sequence[tuple[int, int]]) -> float:
    """Slope from two (words, tokens) measurements: what the template adds to every prompt cancels out."""
    (few_words, few_tokens), (many_words, many_tokens) = samples
    if many_tokens <= few_tokens:
        raise ValueError(f"{many_words} words made {many_tokens} tokens and {few_words} words made {few_tokens}")
    return (many_words - few_words) / (many_tokens - few_tokens)


def _choices(piece: Piece, count: int, *, size: int, seed: int) -> npt.NDArray[np.int64]:
    """``count`` numbers below ``size`` set by (seed, hash id), the sibling number spelled by the first ones.

    The spelling is shifted by a number that all siblings share, so that no seed makes the prompts of another.
    """
    choices = _noise(f"block {seed} {piece.hash_id}", count) % size
    shift = int(_noise(f"place {seed} {piece.start}", 1)[0])
    choices[0] = (piece.sibling + shift) % size
    if count > 1:
        choices[1] = (piece.sibling // size + shift) % size
    return choices


def _noise(name: str, count: int) -> npt.NDArray[np.int64]:
    """``count`` numbers in [0, 2^32) that ``name`` sets."""
    digest = hashlib.shake_128(f"moonbus-load/1 {name}".encode()).digest(4 * count)
    return np.frombuffer(digest, dtype="<u4").astype(np.int64)
