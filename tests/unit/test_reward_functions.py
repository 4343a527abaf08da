"""Each reward function on hand-made answers, right and wrong."""

from fractions import Fraction

import pytest

from megarl.reward import registry
from megarl.reward.functions.extract import last_boxed, last_tagged
from megarl.reward.functions.multiple_choice import chosen
from megarl.reward.functions.numeric import last_number
from megarl.reward.registry import PromptView, Term


def score(name, response, label=None, view=None, **options):
    return registry.bind(Term(name, options=options))(response, label, view or PromptView())


@pytest.mark.parametrize("response, label, expected", [
    ("1 2 3", "1 2 3", 1.0), (" 1 2 3\n", "1 2 3", 1.0), ("1 2 3 4", "1 2 3", 0.0), ("", "1 2 3", 0.0), ("", "", 1.0),
    ("caf\u00e9", "cafe\u0301", 1.0), ("cafe", "caf\u00e9", 0.0), ("\u7b54\u6848", "\u7b54\u6848", 1.0),
    ("5", 5, 1.0), ("b", ["a", "b"], 1.0), ("c", ["a", "b"], 0.0), ("Yes", "yes", 0.0)])
def test_exact(response, label, expected):
    assert score("exact", response, label) == expected


def test_exact_options_and_missing_label():
    assert score("exact", "STRASSE", "stra\u00dfe", ignore_case=True) == 1.0
    for label in (None, []):
        with pytest.raises(ValueError, match="no label"):
            score("exact", "a", label)


@pytest.mark.parametrize("text, number", [
    ("it is 42.", "42"), ("-7", "-7"), ("\u22127", "-7"), ("3-5", "5"), ("x=-5", "-5"), ("$1,234,567.50", "1234567.5"),
    ("1, 2, 3", "3"), ("1,2", "2"), ("1e3", "1000"), ("2.5E-2 m", "1/40"), ("3/4", "3/4"), ("-1 / 8", "-1/8"),
    (r"\frac{1}{3}", "1/3"), (r"\dfrac{-2}{5}", "-2/5"), ("10kg", "10"), ("5 m2", "5"), (".5", "1/2"), ("-.5", "-1/2"),
    ("#### 72", "72"), (r"1{,}234", "1234"), ("\u0663", "3"), ("version 1.2.3", "1.2"), ("4 then 1/0", "4")])
def test_last_number(text, number):
    assert last_number(text) == Fraction(number)


@pytest.mark.parametrize("text", ["", "no digits", "m2", "9" * 5000, "\u00bd"])
def test_no_number(text):
    assert last_number(text) is None


@pytest.mark.parametrize("response, label, options, expected", [
    (r"2 + 2 is \boxed{4}, not 5", "4", {}, 1.0), (r"2 + 2 is \boxed{4}, not 5", "4", {"extract": "last"}, 0.0),
    ("so 4", "4", {"extract": "boxed"}, 0.0), (r"\boxed{} 4", 4, {}, 0.0), ("", 4, {}, 0.0), ("0.333", "1/3", {}, 0.0),
    ("0.333", "1/3", {"absolute": 1e-3}, 1.0), ("101", 100, {"relative": 0.01}, 1.0),
    ("101.1", 100, {"relative": 0.01}, 0.0), ("3.0", 3, {}, 1.0), ("0.1", 0.1, {}, 1.0), ("inf", 3, {}, 0.0),
    ("12345678901234567890", "12345678901234567891", {}, 0.0), ("5", "blah #### 5", {}, 1.0)])
def test_numeric(response, label, options, expected):
    assert score("numeric", response, label, **options) == expected


@pytest.mark.parametrize("label", ["none here", None, True, float("nan")])
def test_numeric_refuses_its_label(label):
    with pytest.raises(ValueError, match="holds no number"):
        score("numeric", "1", label)


@pytest.mark.parametrize("response, label, options, expected", [
    ("abc 12", None, {"pattern": r"\d+"}, 1.0), ("abc 12", None, {"pattern": r"\d+", "mode": "full"}, 0.0),
    ("12", None, {"pattern": r"\d+", "mode": "full"}, 1.0), ("", None, {"pattern": "x"}, 0.0),
    ("Answer: 7 Answer: 8 ", "8", {"pattern": r"Answer:\s*(\d+)", "group": 1}, 1.0),
    ("Answer: 7 Answer: 8", "7", {"pattern": r"Answer:\s*(\d+)", "group": 1}, 0.0),
    ("a=\u03c0", "\u03c0", {"pattern": r"a=(?P<x>\w)", "group": "x"}, 1.0),
    ("ac", "b", {"pattern": "a(b)?c", "group": 1}, 0.0)])
def test_regex(response, label, options, expected):
    assert score("regex", response, label, **options) == expected


@pytest.mark.parametrize("response, letter", [
    (r"I think \boxed{C}", "C"), (r"\boxed{\text{B}}", "B"), (r"\boxed{(D)}", "D"), (r"Answer: A \boxed{}", None),
    ("The answer is B.", "B"), ("answer is (C)", "C"), ("**Answer:** D", "D"), ("Final answer: option A", "A"),
    ("The answer is A? No, the answer is B", "B"), ("B", "B"), (" (C). ", "C"), ("Because of x\nB. Paris", "B"),
    ("A cat sat", None), ("A. one\nB. two\nnot sure", None), ("", None), ("E", None), ("The answer is Berlin", None),
    ("the answer is A's brother", None), ("\u7b54\u6848 answer: \u300cB\u300d", "B")])
def test_choice(response, letter):
    assert chosen(response) == letter


@pytest.mark.parametrize("label, options, expected", [
    ("B", {}, 1.0), ("b", {}, 1.0), ("(B)", {}, 1.0), (1, {}, 1.0), ("C", {}, 0.0), (0, {}, 0.0),
    ("E", {"choices": "ABCDE"}, 0.0)])
def test_multiple_choice(label, options, expected):
    assert score("multiple_choice", "The answer is B", label, **options) == expected


@pytest.mark.parametrize("label", ["E", "", None, 4, -1, True, "AB"])
def test_multiple_choice_refuses_its_label(label):
    with pytest.raises(ValueError, match="is none of ABCD"):
        score("multiple_choice", "A", label)


@pytest.mark.parametrize("response, label, expected", [
    (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0), ("the answer is 0.5", r"$\frac{1}{2}$", 1.0),
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", 0.0), (r"\boxed{2x + 2}", "2(x+1)", 1.0),
    (r"\boxed{2x + 1}", "2(x+1)", 0.0), (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0), (r"\boxed{(1, 2)}", "(2, 1)", 0.0),
    (r"$x = 5$", "5", 1.0), ("no idea", "5", 0.0), ("", "5", 0.0), (r"\boxed{\sqrt{}", "5", 0.0),
    (r"\boxed{42}", 42, 1.0)])
def test_maths(response, label, expected):
    assert score("maths", response, label) == expected


def test_maths_runs_in_threads_and_refuses_its_label():
    import threading

    results = []
    thread = threading.Thread(target=lambda: results.append(score("maths", r"\boxed{4}", "4")))
    thread.start()
    thread.join()
    assert results == [1.0]  # math-verify's own SIGALRM limits would raise here
    with pytest.raises(ValueError, match="no mathematical expression"):
        score("maths", "1", "")


def test_reasoning_gym():
    import json

    import reasoning_gym

    entries = list(reasoning_gym.create_dataset("chain_sum", size=2, seed=1))
    for entry in entries:
        stored = json.loads(json.dumps(entry))
        for extra in ({"task": "chain_sum", "entry": stored}, {"task": "chain_sum", "entry": json.dumps(entry)}):
            view = PromptView(extra=extra)
            right = entry["answer"]
            assert score("reasoning_gym", f" {right}\n", view=view) == 1.0
            assert score("reasoning_gym", f"<answer>1</answer> <answer>{right}</answer>", view=view) == 1.0
            assert score("reasoning_gym", str(int(right) + 1), view=view) < 0.5
            assert score("reasoning_gym", "", view=view) < 0.5
    assert score("reasoning_gym", entries[0]["answer"], view=PromptView(extra={"entry": entries[0]}),
                 task="chain_sum") == 1.0
    for extra in ({}, {"entry": entries[0]}, {"task": "chain_sum"}, {"task": "chain_som", "entry": entries[0]}):
        with pytest.raises(ValueError):
            score("reasoning_gym", "1", view=PromptView(extra=extra))


@pytest.mark.parametrize("response, expected", [
    ("<think>a</think><answer>b</answer>", 1.0), ("\n<think>\na\n</think>\n<answer></answer>\n", 1.0),
    ("<think>a</think> so <answer>b</answer>", 0.0), ("<answer>b</answer><think>a</think>", 0.0),
    ("<think>a</think>", 0.0), ("", 0.0), ("<think>a<answer>b</answer></think>", 0.0),
    ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0), ("<think>a</think><answer>b", 0.0),
    ("<think>\u00e4 < \u00f6 <b></think><answer>\u7b54</answer>", 1.0)])
def test_tags(response, expected):
    assert score("tags", response) == expected


def test_tags_of_own_names():
    assert score("tags", "<plan>x</plan>", names=["plan"]) == 1.0
    assert score("tags", "<think>a</think><answer>b</answer>", names=["plan"]) == 0.0


@pytest.mark.parametrize("tokens, expected", [(0, 1.0), (100, 1.0), (125, 0.75), (200, 0.0), (900, 0.0)])
def test_length(tokens, expected):
    assert score("length", "", view=PromptView(response_tokens=tokens), soft=100, hard=200) == expected


def test_length_of_text():
    assert score("length", "one two three", soft=2, hard=4, unit="words") == 0.5
    assert score("length", "\u7b54\u6848\u662f", soft=2, hard=4, unit="characters") == 0.5


def test_extraction():
    assert last_boxed(r"\boxed{1} \boxed{\frac{a}{b}} end") == r"\frac{a}{b}"
    assert last_boxed(r"\boxed{1} \boxed{2") == "1"
    assert last_boxed("nothing") is None
    assert last_tagged("<a>1</a> <a> 2 </a> <a>3", "a") == "2"
    assert last_tagged("1</a>", "a") is None
