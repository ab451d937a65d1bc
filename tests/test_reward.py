"""reward.py: find the answer, decide equivalence."""

import pytest

from reward import extract_answer, integer_verdict, is_equivalent


def answer_tags(text):
    return f"<reason>x</reason><answer>{text}</answer>"


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{2} text after", "2"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed 5", "5"),
        (r"\boxed 42$.", "42"),
        (r"\boxed\frac12", r"\frac12"),
        (r"\fbox{5}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        (r"\boxed{3} \boxed{5", "3"),
        (r"\boxed{\boxed{5}", "5"),
        (r"\boxedtext 5", None),
        (r"5", None),
    ],
)
def test_box_inside_the_answer(text, expected):
    assert extract_answer(answer_tags(text)) == expected


def test_integers():
    assert integer_verdict("1,234", "1234") is True
    assert integer_verdict("\u22127", "-7") is True
    assert integer_verdict("8", "7") is False
    assert integer_verdict("x", "7") is None
    assert is_equivalent("007", "7") and not is_equivalent("", "")
