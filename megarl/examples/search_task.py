"""A task of two searches: "anna's number?" wants anna's town looked up, and then the town's number.

The environment searches a small corpus. A right search earns something of its own, so this is also the example of
credit by turns. torch is not needed here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from megarl.examples.dialogues import Dialogue, calls, says, tool, user
from megarl.rollout.environments.protocol import Action, Step, Task

NAME = "search"
TOOL = {"type": "function", "function": {
    "name": "search", "description": "Find the document of a small corpus that fits some words best.", "parameters": {
        "type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}
PEOPLE = [f"{first}{last}" for first in ("an", "be", "ca", "do", "el", "fi") for last in ("na", "ro", "mi", "lu", "sa")]
TOWNS = [f"{first}{last}" for first in ("oss", "pra", "rom", "tur", "vil") for last in ("burg", "by", "ton", "stad")]
HELD_OUT = PEOPLE[::5]  # the run's prompts do not ask after them; they are in its corpus
K1, B = 1.2, 0.75


class Search:
    """Reward 1 for a last reply that is the right number, and `per_find` for each search that brings a new document on
    the way to it.

    Args:
        per_find: reward of a right search.
        corpus_seed: which person lives where, and which number a town has.
    """

    tools = [TOOL]

    def __init__(self, *, per_find: float = 0.0, corpus_seed: int = 0) -> None:
        self._per_find, self._index = per_find, index(corpus_seed)
        self._right, self._way = "", set()

    async def reset(self, task: Task) -> None:
        """The prompt is the task's own: a person's name and a question mark."""
        self._right = str(task.label)
        person = str(task.text).rstrip("?").strip()
        self._way = {person, town_of(person, self._index.documents)}

    async def step(self, action: Action) -> Step:
        """Search; a reply without a call is the answer."""
        if not action.calls:
            return Step("", float(action.content.strip() == self._right), True) if not action.errors \
                else Step("error")
        found = [self._index.best(str(call.arguments.get("query", ""))) for call in action.calls]
        earned = 0.0
        for document in found:
            subject = document.partition(" ")[0]
            earned += self._per_find * (subject in self._way)
            self._way.discard(subject)
        return Step([tool(document) for document in found], earned)


class Index:
    """BM25 over short documents (Robertson and Zaragoza 2009, eq. 3.15)."""

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents = list(documents)
        self._words = [Counter(document.split()) for document in documents]
        self._average = sum(words.total() for words in self._words) / len(documents)
        self._holding = Counter(word for words in self._words for word in words)

    def best(self, query: str) -> str:
        """The document that fits best; "nothing" if none has a word of the query."""
        scores = [sum(self._weight(word, words) for word in query.split()) for words in self._words]
        best = max(range(len(scores)), key=scores.__getitem__)
        return self.documents[best] if scores[best] > 0 else "nothing"

    def _weight(self, word: str, words: Counter[str]) -> float:
        holding, count = self._holding[word], words[word]
        rarity = math.log(1 + (len(self.documents) - holding + 0.5) / (holding + 0.5))
        return rarity * count * (K1 + 1) / (count + K1 * (1 - B + B * words.total() / self._average))


@cache
def index(seed: int) -> Index:
    """The corpus: where each person lives, what number each town has. `anna lives in ossburg`, `ossburg has 47`.

    Documents of people name their town, so a search for a town alone finds the town's: it is shorter.
    """
    rng = np.random.default_rng([seed, 4])
    people = [f"{person} lives in {TOWNS[int(rng.integers(len(TOWNS)))]}" for person in PEOPLE]
    towns = [f"{town} has {number}" for town, number in zip(TOWNS, rng.permutation(90)[:len(TOWNS)] + 10, strict=True)]
    return Index([*people, *towns])


def town_of(person: str, documents: Sequence[str]) -> str:
    """Where the person lives."""
    return next((document.split()[-1] for document in documents if document.startswith(f"{person} lives")), "")


def questions(rng: np.random.Generator, *, held_out: bool) -> Iterator[str]:
    """Endless questions after people of one side of the split."""
    people = [person for person in PEOPLE if (person in HELD_OUT) == held_out]
    while True:
        yield f"{people[int(rng.integers(len(people)))]}?"


def warm_questions(rng: np.random.Generator) -> Iterator[str]:
    """Those of the warm start: after everybody, since a word that was never seen cannot be repeated. Its corpora are
    others than the run's, so it learns no answer."""
    while True:
        yield f"{PEOPLE[int(rng.integers(len(PEOPLE)))]}?"


def label(question: str, corpus_seed: int = 0) -> str:
    """The right answer."""
    found = index(corpus_seed)
    return found.best(town_of(question.rstrip("?"), found.documents)).split()[-1]


def dialogue(question: str, rng: np.random.Generator, right: float) -> Dialogue:
    """The right procedure with probability `right`, else one of three wrong ones, in a corpus of its own.

    Wrong are: to give up; to search for the person and answer with their town; to search for the person twice and
    answer with their town. A corpus for each dialogue, so that the model learns to read instead of learning it by
    heart.
    """
    found, person = index(int(rng.integers(1, 2000))), question.rstrip("?")
    first = found.best(person)
    town = first.split()[-1]
    kind = 3 if rng.random() < right else int(rng.integers(3))
    if kind == 0:
        return [user(question), says("nothing")]
    asked = [user(question), calls("search", query=person), tool(first)]
    if kind == 1:
        return [*asked, says(town)]
    again = person if kind == 2 else town
    second = found.best(again)
    return [*asked, calls("search", query=again), tool(second), says(second.split()[-1])]
