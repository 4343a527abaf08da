"""What is found out about rewards before a run starts."""

import subprocess
import sys

import pytest
import reward_cases

from megarl.errors import UserMistake
from megarl.reward import registry
from megarl.reward.registry import PromptView, Term


def mistake(name, **options):
    with pytest.raises(UserMistake) as caught:
        registry.bind(Term(name, options=options), "reward.terms.0")
    return str(caught.value)


def test_names():
    assert registry.names() == ["exact", "length", "maths", "multiple_choice", "numeric", "reasoning_gym", "regex",
                                "tags"]
    assert registry.lookup("exact").function("a", "a", PromptView()) == 1.0
    assert registry.lookup("reward_cases:behave").function is reward_cases.behave
    assert registry.lookup("megarl.reward.functions.regex:regex").check is not None


def test_unknown_names_tell_the_nearest():
    assert "unknown reward function 'numerc'" in (text := mistake("numerc")) and "did you mean numeric?" in text
    assert "known are exact, length" in mistake("zzz")
    assert "did you mean behave?" in mistake("reward_cases:behav")
    assert "cannot import 'no_such_module': ModuleNotFoundError" in mistake("no_such_module:f")


def test_options_are_checked():
    assert "did you mean absolute?" in mistake("numeric", absolut=1)
    assert "it takes no options" in mistake("reward_cases:later", a=1)
    assert "missing a required argument: 'pattern'" in mistake("regex")
    assert "has no option 'label'" in mistake("regex", pattern="a", label="b")
    assert "reward.terms.0.options.absolute: 'much' does not fit float" in mistake("numeric", absolute="much")
    assert "does not fit typing.Literal['tokens'" in mistake("length", soft=1, hard=2, unit="pages")
    assert "must satisfy 0 <= soft < hard" in mistake("length", soft=2, hard=2)
    assert "is not a regular expression" in mistake("regex", pattern="(")
    assert "has no group 2" in mistake("regex", pattern="(a)", group=2)
    assert "is not the name of a tag" in mistake("tags", names=["<a>"])
    assert "cannot be called" in mistake("reward_cases:too_few")
    assert registry.bind(Term("numeric", options={"absolute": "0.5"}))("1.4", 1, PromptView()) == 1.0


def test_a_missing_package_names_the_install_line(monkeypatch):
    entry = registry.Entry(reward_cases.behave, {"no_such_package": "no-such-package>=2"})
    monkeypatch.setitem(registry._registry, "lacking", entry)
    assert "needs the package no_such_package\n  remedy: pip install no-such-package>=2" in mistake("lacking")


def test_names_are_registered_once():
    with pytest.raises(ValueError, match="registered twice"):
        registry.reward("exact")(reward_cases.behave)


def test_sources():
    terms = [Term("exact", source="a"), Term("tags", source="b")]
    registry.check_terms(terms, ["a", "b"])
    with pytest.raises(UserMistake, match="no reward term applies to the data source 'c'"):
        registry.check_terms(terms, ["a", "b", "c"])
    with pytest.raises(UserMistake, match=r"terms.1.source: there is no data source 'b'"):
        registry.check_terms(terms, ["a"])


def test_term_keys():
    assert registry.term_keys([Term("a"), Term("b"), Term("a"), Term("a")]) == ["a", "b", "a#2", "a#3"]


def test_the_registry_is_light():
    code = "import sys, megarl.reward.worker as w; w.registry.names(); " \
           "print([m for m in ('torch', 'megatron', 'numpy', 'sympy', 'reasoning_gym') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
