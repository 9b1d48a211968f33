"""What users ask for: nouns found in a story, and the requests made from them.

The model learns to follow a request only if the request says something true of the story, so a request is
built from nouns that occur in it. It is drawn afresh each epoch: a story met under many requests cannot be
memorised from one of them. Which words are nouns is read off the text itself (a word that follows "a" or
"the" and is followed by no further content word), so that the same code works on another corpus.

One noun pair in sixteen is reserved by hash and never asked for in training; requests for reserved pairs
measure whether the model follows requests that it has not seen.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections import Counter
from dataclasses import dataclass

RESERVED_ONE_IN = 16
MIN_DOCUMENTS = 8
COMMON_FRACTION = 0.2
"""A noun in more than this share of the stories (day, time) says nothing about any of them."""

PHRASINGS = (
    "Tell me a story about {}.",
    "Can you tell me a story about {}?",
    "Please write a story about {}.",
    "Write a short story about {}.",
    "Make up a story about {}.",
    "I want to hear a story about {}.",
    "Tell me a short story with {}.",
    "Please tell me a bedtime story about {}.",
    "I would like a story with {} in it.",
    "Write a story for my kids about {}.",
    "A story about {}, please.",
    "Do you know a story about {}?",
)
_ABSTRACT_WORDS = """
lot bit while moment minute hour day week month year time way thing things one ones end idea fun
kind part rest top bottom side middle few couple story moral lesson name word words place whole
first second last same other next little good best mom mommy dad daddy mum grandma grandpa boy
girl man woman kid child friend sudden start turn try look smile laugh voice sound noise well
break spot sight hurry pass fair stand person twist life taste pain power distance group number
line chance pair point piece problem mistake face mouth nose neck land light print drop
"""
ABSTRACT = frozenset(_ABSTRACT_WORDS.split())
"""Words that tell no story apart, or that many stories have without being about them."""

_DETERMINER = re.compile(r"\b(a|an|the|his|her|my|your|their)\s+([a-z]{3,})\b(?=(\s+[a-z']+)?)")
_WORD = re.compile(r"[A-Za-z]+")
_CHARACTER = re.compile(r"\ban? (?:[a-z]+ ){1,3}named [A-Z][a-z]+")
_CLOSED_CLASS_WORDS = """
a an and are as at away back because but by came could did down every for from had has have he her
his how in inside into is it its like named near of off on or out outside over said saw she so
that the their then there they to too under until up was went were what when where who will with
would
"""
_CLOSED_CLASS = frozenset(_CLOSED_CLASS_WORDS.split())


@dataclass(frozen=True)
class Noun:
    """A noun of the corpus: how it is asked for and how many stories have it."""

    word: str
    article: str
    documents: int

    @property
    def phrase(self) -> str:
        return f"{self.article} {self.word}"


Lexicon = dict[str, Noun]


def plurals(word: str) -> list[str]:
    """The spellings that a regular plural of `word` can take."""
    forms = [word + "s", word + "es"]
    if word.endswith("y"):
        forms.append(word[:-1] + "ies")
    if word.endswith("f"):
        forms.append(word[:-1] + "ves")
    return forms


def words_of(text: str) -> Counter[str]:
    """Lower-case words of a text with their counts."""
    return Counter(word.lower() for word in _WORD.findall(text))


def mentions(text: str, noun: str) -> bool:
    """Whether a text has the noun as a word of its own, singular or regular plural."""
    words = words_of(text)
    return any(form in words for form in (noun, *plurals(noun)))


def first_mention(text: str, noun: str) -> tuple[int, int] | None:
    """Where a text first has the noun, singular or regular plural."""
    forms = "|".join((noun, *plurals(noun)))
    found = re.search(rf"\b(?:{forms})\b", text, re.IGNORECASE)
    return found.span() if found else None


def build_lexicon(stories: list[str]) -> Lexicon:
    """The nouns of the stories, found by their place behind an article and before no content word."""
    behind: Counter[str] = Counter()
    indefinite: Counter[str] = Counter()
    total: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    for story in stories:
        words = Counter(word for word in _WORD.findall(story) if word.islower())
        total.update(words)
        documents.update(words.keys())
        for determiner, word, after in _DETERMINER.findall(story):
            if not after or after.strip() in _CLOSED_CLASS:
                behind[word] += 1
                indefinite[word] += determiner in ("a", "an")
    common = max(MIN_DOCUMENTS, COMMON_FRACTION * len(stories))
    lexicon: Lexicon = {}
    for word, count in behind.items():
        if word in ABSTRACT or word in _CLOSED_CLASS or not MIN_DOCUMENTS <= documents[word] <= common:
            continue
        if count < 0.13 * total[word] or indefinite[word] < 0.02 * count:
            continue
        lexicon[word] = Noun(word, "an" if word[0] in "aeiou" else "a", documents[word])
    singular = {form: word for word in lexicon for form in plurals(word)}
    return {word: noun for word, noun in lexicon.items() if word not in singular}


def is_reserved(first: str, second: str) -> bool:
    """Whether a pair of nouns is kept for evaluation."""
    pair = " ".join(sorted((first, second)))
    digest = hashlib.blake2b(pair.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % RESERVED_ONE_IN == 0


@dataclass
class StoryFacts:
    """What can be asked about one story: its nouns with their weights, and a named character."""

    nouns: list[Noun]
    weights: list[float]
    character: str | None


def facts_of(story: str, lexicon: Lexicon, story_count: int) -> StoryFacts:
    """The nouns of a story, weighted towards those that it repeats and that few other stories have."""
    words = words_of(story)
    nouns, weights = [], []
    for word in set(words):
        noun = lexicon.get(word)
        if noun is None:
            continue
        mentioned = words[word] + sum(words[form] for form in plurals(word))
        nouns.append(noun)
        weights.append(math.sqrt(mentioned) * math.log(1 + story_count / noun.documents))
    order = sorted(range(len(nouns)), key=lambda i: nouns[i].word)
    named = _CHARACTER.search(story)
    return StoryFacts([nouns[i] for i in order], [weights[i] for i in order], named.group() if named else None)


def draw_nouns(facts: StoryFacts, count: int, rng: random.Random) -> list[Noun]:
    """Up to `count` distinct nouns of the story, no two of them a reserved pair."""
    chosen: list[Noun] = []
    pool, weights = list(facts.nouns), list(facts.weights)
    while pool and len(chosen) < count:
        index = rng.choices(range(len(pool)), weights)[0]
        noun = pool.pop(index)
        weights.pop(index)
        if not any(is_reserved(noun.word, other.word) for other in chosen):
            chosen.append(noun)
    return chosen


def join_phrases(phrases: list[str]) -> str:
    """ "a dog", "a dog and a boat", "a dog, a boat and a key"."""
    return phrases[0] if len(phrases) == 1 else ", ".join(phrases[:-1]) + " and " + phrases[-1]


@dataclass(frozen=True)
class Request:
    """What is asked, and the nouns in it that the answer has to have."""

    text: str
    nouns: list[Noun]


def draw_request(facts: StoryFacts, rng: random.Random) -> Request | None:
    """A request that the story answers, or None if nothing in it can be asked for."""
    count = rng.choices((1, 2, 3), (0.2, 0.65, 0.15))[0]
    named = facts.character is not None and rng.random() < 0.2
    nouns = draw_nouns(facts, count - named, rng)
    phrases = [noun.phrase for noun in nouns]
    if named and facts.character is not None:
        phrases.insert(rng.randrange(len(phrases) + 1), facts.character)
    return Request(rng.choice(PHRASINGS).format(join_phrases(phrases)), nouns) if phrases else None


def draw_pairs(
    lexicon: Lexicon, count: int, rng: random.Random, reserved: bool, min_documents: int = 40
) -> list[tuple[Noun, Noun]]:
    """Distinct random pairs of nouns, each in `min_documents` stories or more: all reserved or none.

    Rarer nouns are left out because the model has met them too seldom to know them at all.
    """
    nouns = sorted((n for n in lexicon.values() if n.documents >= min_documents), key=lambda n: n.word)
    pairs: dict[frozenset[str], tuple[Noun, Noun]] = {}
    for _ in range(1000 * count if len(nouns) > 1 else 0):
        first, second = rng.sample(nouns, 2)
        if is_reserved(first.word, second.word) == reserved:
            pairs.setdefault(frozenset((first.word, second.word)), (first, second))
        if len(pairs) == count:
            break
    return list(pairs.values())
