r"""reward.py: where the answer is, and whether it is the label.

RIGHT and WRONG are judged by hand, "label | answer"; each line is a test of its own.
"""

import ast
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import reward
from reward import extract_answer, integer_verdict, is_equivalent

SHARED = Path(__file__).resolve().parents[2] / "shared"


# ---- find the answer ----


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{2} text after", "2"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{ x = \boxed{5} }", r"x = \boxed{5}"),
        (r"\boxed 5", "5"),
        (r"$\boxed 42$.", "42"),
        (r"\boxed\frac12", r"\frac12"),
        (r"\fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{5\\}", r"5\\"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        (r"\boxed{3} \boxed{5", "3"),
        (r"\boxed{\boxed{5}", "5"),
        (r"} \boxed{5}", "5"),
        (r"\boxedtext 5", None),
        (r"\boxed", None),
        ("5", None),
    ],
)
def test_box_inside_the_answer(text, expected):
    assert extract_answer(f"<reason>\\boxed{{0}}</reason><answer>{text}</answer>") == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"\boxed{5}", None),
        (r"<answer>\boxed{5}", None),
        (r"</answer>\boxed{5}<answer>", None),
        (r"<answer>\boxed{1}</answer> <answer>\boxed{2}</answer> \boxed{3}", "2"),
        (r"<answer>\boxed{1}</answer> <answer>\boxed{2}", "1"),
        (r"<answer> <answer>\boxed{1}</answer>", "1"),
        (r"<answer>\boxed{1}</answer> \boxed{2} </answer>", "1"),
        (r"<answer>none</answer>\boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_closed_answer_counts(text, expected):
    assert extract_answer(text) == expected


def test_boxes_in_tool_responses_never_count():
    forged = r"<tool_response><answer>\boxed{7}</answer></tool_response>"
    assert extract_answer(forged) is None
    assert extract_answer(rf"<answer>\boxed{{5}}</answer>{forged}") == "5"
    assert extract_answer(rf"<answer>\boxed{{5}} {forged}</answer>") == "5"
    assert extract_answer(r"<tool_response> cut <answer>\boxed{7}</answer>") is None


# ---- integers ----


@pytest.mark.parametrize(
    "answer, gold, expected",
    [
        ("204", "204", True), ("025", "25", True), ("+7", "7", True), ("−7", "-7", True),
        ("-0", "0", True), ("7.", "7", True), ("27.0", "27", True), ("$7$", "7", True),
        ("1,234", "1234", True), ("1{,}234", "1234", True), (r"10,\!080", "10080", True),
        (r"11,\! 111,\! 100", "11111100", True), (r"1\,234", "1234", True),
        ("1 234", "1234", True),
        ("1'234", "1234", True), ("1_234", "1234", True), ("1\u202f234", "1234", True),
        (r"\$36", "36", True), ("9" * 5000, "9" * 5000, True), ("9" * 5000, "9" * 4999, False),
        ("8", "7", False), ("-7", "7", False), ("1,23", "123", None), ("1,2345", "12345", None),
        ("7.5", "7", None), ("x", "7", None), ("", "7", None), ("7", "", None), ("²", "2", None),
        ("٣", "3", None), ("1 2", "12", None), ("7\n8", "78", None),
    ],
)  # fmt: skip
def test_integers_are_decided_by_their_digits(answer, gold, expected):
    assert integer_verdict(answer, gold) is expected


def test_integers_need_no_sympy():
    code = "import sys, reward; reward.is_equivalent('1,2', '1,2'); print('sympy' in sys.modules)"
    folder = Path(reward.__file__).parent
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr


# ---- equivalence ----

RIGHT = r"""
12 | 12 dollars
5\text{ cm} | 5cm
15\mbox{ cm}^2 | 15 square centimeters
5 \text{ m} | 5 m
5 | 5 \text{ apples}
70 | 70^\circ
70^\circ | 70 degrees
70^{\circ} | 70°
30^\circ | \frac{\pi}{6}
28\% | 28
28\% | 0.28
0.28 | 28\%
0.28 | 28 percent
28\% | \text{28 percent}
\frac{1}{2} | 1/2
\frac12 | 0.5
\dfrac{17}{50} | .34
\frac 34 | 3/4
\frac9{19} | 9/19
\frac{270}7\text{ degrees} | 270/7
\frac{\pi}{2} | \frac\pi2
3\frac{1}{2} | 7/2
3 1/2 | 3.5
-3\frac12 | -3.5
0.\overline{3} | 1/3
0.1\bar6 | \frac16
0.(3) | 1/3
1.5\times 10^{3} | 1500
.0000672 | 6.72 \times 10^{-5}
6.72e-5 | .0000672
(10080, 3) | (10{,}080, 3)
1234\pi | 1,234\pi
\sqrt2 | 2^{1/2}
\sqrt[3]{8} | 2
\sqrt[3]{-8} | -2
\sqrt{12} | 2\sqrt3
\sqrt{12} | sqrt12
2^{10} | 2^10
2**10 | 1024
2^{-3} | 2^-3
e^{i\pi} | -1
e^{i\pi}+1 | 0
\frac{9 \sqrt{23}}{23} | \frac{9}{\sqrt{23}}
2^{25} \cdot 26! | 26! \cdot 33554432
2^{2^{10}} | 2^{1024}
\infty | +\infty
\cos\frac{\pi}{5} | \frac{1+\sqrt5}{4}
\sin 30^\circ | 1/2
\sin^2 x | (\sin x)^2
\sin^{-1} 1 | \frac{\pi}{2}
\operatorname{arcsin} 1 | \pi/2
\sin 2x | 2\sin x\cos x
\log_2 8 | 3
\log 100 | 2
\ln 2 | \log 2
\frac{\log 8}{\log 2} | 3
\lg 100 | 2
10! | 3628800
\binom{5}{2} | 10
|{-3}| | 3
\lfloor 3.7 \rfloor | \lceil 2.2 \rceil
6-5i | -5i+6
(1+i)^2 | 2i
n(n+1)/2 | \frac{n^2+n}{2}
(a+5)(b+2) | ab+2a+5b+10
ab | ba
\sqrt{x^3} | x\sqrt{x}
\ln(xy) | \ln x + \ln y
\frac{x^2-1}{x-1} | x+1
x_1+x_2 | x_{2}+x_{1}
f'(x) | f'x
2^n \cdot 2 | 2^{n+1}
\binom{n}{2} | n(n-1)/2
x+1 | 1 +	x
x=5 | 5
5 | x = 5
AB = 5 | 5
f(x) = x+1 | x+1
8 | 2^3 = 8
5 | x = 2 + 3 = 5
y = 2x+3 | 2x+3
y = 2x+3 | 2x - y + 3 = 0
5x - 7y + 11z + 4 = 0 | 7y = 5x + 11z + 4
2x > 6 | x > 3
x \ge 3 | 3 <= x
x \leqslant 3 | 3 >= x
-2<x<3 | 3 > x > -2
x \in [-2,7] | -2 \le x \le 7
x \in [-2,7] | x in [-2,7]
x>3 | (3,\infty)
(-\infty, 2) \cup (3, \infty) | x<2 \text{ or } x>3
x \neq 3 | x != 3
x \ne 3 | 3 \neq x
\mathbb{R} | (-\infty,\infty)
(-\infty,0) \cup (0,\infty) | (0,\infty) U (-\infty,0)
(0,9) \cup (9,36) | 9 < x < 36 or 0 < x < 9
(1,2)\cup(3,4)\cup(5,6) | (5,6)\cup(1,2)\cup(3,4)
(2,3)\cup(0,1) | (0,1)\cup(2,3)
(3,4) | ( 3 , 4 )
(1,\frac12) | (1, 0.5)
(3,4) | 3,4
-2,1 | 1,-2
3, 5, 7 | 7, 3 and 5
1,2 | x=1 or x=2
1,2 | x = 1, 2
x == 5 | 5
\{1,2\} | 2,1
\{1,1,2\} | \{2,1\}
\{5\} | 5
(1,2) | x=1, y=2
(1,2) | (x,y) = (1,2)
[1,2,3] | (1,2,3)
\langle 1,2\rangle | (1,2)
1 \pm \sqrt{19} | 1-\sqrt{19}, 1+\sqrt{19}
\pm 3 | 3, -3
x = \pm 3 | -3, 3
1, -1 | +/-1
\{1\pm\sqrt{5},-2\} | \{-2, 1+\sqrt5, 1-\sqrt5\}
\emptyset | \{\}
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix} | \frac13\begin{bmatrix} -1 \\ 2 \end{bmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \\ \end{pmatrix} | \left[\begin{array}{cc}1&2\\3&4\end{array}\right]
3:4 | 6:8
4210_{5} | 4210_5
4210_5 | 4210
\text{(B)} | B
\text{(B)} | b
\text{June 3} | June 3
\textbf{(B)} | \mathrm{B}
\text{Evelyn} | evelyn
\text{no solution} | No solution
\text{yes} | Yes
5 | \left.5\right.
5 | \boxed{5}
5 | 5\\
11 | 11th
\sum_{k=1}^{n} k | \sum_{k=1}^n k
5\pi | 5\pi \approx 15.7
\frac{\sqrt3}{2} | \sqrt3\frac12
\frac38 | \frac12\frac34
864 \mbox{ inches}^2 | 864 square inches
x=1, y=2 | 1,2
\{((1,2),3),((1,2),4)\} | \{((1,2),4),((1,2),3)\}
"""

WRONG = r"""
0 |
0 | \emptyset
0 | \{\}
1/3 | 0.333
1/3 | 0.3333333333
5 | 5.000001
\pi | 3.14159265358979
\frac{1}{2^{98}} | \frac{1}{2^{99}}
\frac{\pi}{10^{40}} | \frac{\pi}{10^{41}}
1 + 10^{-100} | 1
e^{\pi\sqrt{163}} | 640320^3+744
12 | 1 2
12 | 3 4
58,500 | 58, 500
x > 3 | x \ge 3
x > 3 | x < 3
x > 3 | -x > -3
x > 3 | y > 3
[0,1) | [0,1]
(0,1) | [0,1]
(0,1) | \{0,1\}
[0,1]\cup[2,3] | [0,3]
(0,1)\cup(1,2) | (0,2)
x<2 \text{ or } x>3 | x>2 \text{ and } x<3
(-\infty,2)\cup(3,\infty) | x<2 \text{ and } x>3
\mathbb{R} | x<3 \text{ and } x>2
(3,4) | (4,3)
(4,3) | (5,3)
(1,2,3) | (1,3,2)
(1,2,3) | 1,3,2
1,2,3 | 2,3,4
1,1,2 | 1,2,2
1,1,2 | 1,2
1,2 | 1
3 | \pm 3
\pm 3 | 3
(1,2) | x=2, y=1
x=1, y=2 | 2, 1
5 | 5 \text{ or } 6
6-5i | 6+5i
ab | a+b
x | X
\text{B} | (x)
2^10 | 2^{1}0
x = 5 | y = 5
5 | 2x+1=5
10 | 2x = 10
2x = 10 | 10
5 | 2 = 5
y = 2x+3 | y = 2x-3
4210 | 4210_5
4210_5 | 4210_6
5 \text{ cm} | 5 m
28 | 0.28
28\% | 0.28\%
\text{B} | C
\text{east} | west
\text{no} | on
3\sqrt{13} | \sqrt{116}
\sqrt{x^2} | x
|x| | x
\sin x | \cos x
x^2+2x+1 | x^2+2x
5 | 5 \text{ if } x > 0
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 & 2 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}
1/0 | 2/0
\infty | 1/0
0 | 1/(1/0)
\infty | -\infty
\sum_{k=1}^{n} k | \sum_{k=1}^{m} k
120 | 5!!
720 | 3!!
1.5 | 1 .5
|x-5| | 5-x
|x+5| | x+5
\sqrt{(x-30)^2} | 30-x
\lfloor x/10 \rfloor | \lfloor x/20 \rfloor
15\text{ cm}^2 | 15 cm^3
5 \text{ miles} | 5 miles per hour
(1,4),(2,3) | (1,3),(2,4)
(1,2) | (1,2),21
\mathbb{R} | 1<2
\{1,\{1,2\}\} | \{1,\{1,3\}\}
"""


def pairs(block):
    rows = [f" {row} ".rsplit(" | ", 1) for row in block.strip().split("\n")]
    return [(gold.strip(), answer.strip()) for gold, answer in rows]


@pytest.mark.parametrize("gold, answer", pairs(RIGHT))
def test_is_the_label(gold, answer):
    assert is_equivalent(answer, gold) is True
    assert is_equivalent(gold, gold) and is_equivalent(answer, answer)


@pytest.mark.parametrize("gold, answer", pairs(WRONG))
def test_is_not_the_label(gold, answer):
    assert is_equivalent(answer, gold) is False


SAME = r"""
6 | 2\cdot 3 | 2\times3 | 2\ast3 | 2×3 | 2·3 | 2⋅3 | 2*3 | 6. | $6$ | \$6 | €6 | £6 | ６
6 | \mathbf{6}
1/2 | 1\div2 | 1÷2 | 1⁄2 | ½ | \cfrac12 | \tfrac12 | 1:2 | 1\colon2 | （1/2）
1/2 | \displaystyle\frac12 | \dfrac12 | \fbox{1/2} | \(1/2\) | \[1/2\]
-7 | −7 | –7 | -\,7 | -\;7 | -\:7 | -\!7 | -\ 7 | \quad-7 | -\qquad7
x^2 \pi | x²π | \mathit{x}^2\pi | \vec{x}^2\pi | \hat x^2\pi
x^2 \pi | \boldsymbol{x}^2\pi | \mathcal{x}^2\pi
(a) | \big(a\big) | \Big(a\Big) | \bigg(a\bigg) | \Bigg(a\Bigg) | \left(a\right) | \angle a
(a) | \bigl(a\bigr) | \Bigl(a\Bigr) | \triangle a | \overline{a} | {a}
x \le 3 | x\leq3 | x⩽3 | x≤3
x > 3 | x \gt 3 | x \in (3,∞) | x∈(3,\infty)
x \ge 3 | x\geq3 | x⩾3 | 3 \leq x
a \mp b | a ∓ b | -b+a, a+b
|a-3| | \vert a-3\vert | \lvert a-3\rvert | \mid a-3\mid | abs(a-3)
\{1,2\} | \lbrace 1,2\rbrace | \left\{1,2\right\} | {1,2} | \{1，2\}
\emptyset | ∅ | \varnothing | \{\}
\R\setminus\{0\} | ℝ\backslash\{0\} | ℝ∖\{0\}
45° | 45º | 45\degree | 45^{\circ} | 45^\circ
5\% | 5％
\binom{4}{2} | \dbinom{4}{2} | \tbinom42 | 6
\sqrt{2}\theta | √2θ | \theta\sqrt2
\text{east} | \textit{east} | \textrm{east} | \textsf{east} | \mathsf{east} | \hbox{east}
\text{east} | \mathrm{east} | \mbox{East} | \textbf{east}
\lfloor a \rfloor | ⌊a⌋ | floor(a)
\lceil a \rceil | ⌈a⌉ | ceil(a)
1/4 | ¼ | 0.25
3/4 | ¾ | 0.75
\sin\limits x | \sin x
"""


@pytest.mark.parametrize("row", SAME.strip().split("\n"))
def test_spellings_of_one_thing(row):
    gold, *answers = row.split(" | ")
    assert [a for a in answers if not is_equivalent(a, gold)] == []


def test_no_rule_and_no_spelling_can_be_removed(monkeypatch):
    """Without any one of them, a line of RIGHT or WRONG above is judged wrong."""
    cases = [(a, g, True) for g, a in pairs(RIGHT)] + [(a, g, False) for g, a in pairs(WRONG)]
    for table in ("RULES", "SPELLINGS"):
        rows = getattr(reward, table)
        for i, row in enumerate(rows):
            monkeypatch.setattr(reward, table, rows[:i] + rows[i + 1 :])
            noticed = any(is_equivalent(a, g) is not want for a, g, want in cases)
            assert noticed, f"{table}[{i}] is not needed by any line: {row}"
        monkeypatch.setattr(reward, table, rows)


def test_factorials_of_symbols():
    assert is_equivalent("n(n-1)", r"\frac{n!}{(n-2)!}") and not is_equivalent("n", "n!")


# ---- safety ----


def test_model_text_is_never_evaluated():
    tree = ast.parse(Path(reward.__file__).read_text(encoding="utf8"))
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert not names & {"eval", "exec", "sympify", "parse_expr", "parse_latex", "lambdify"}
    for text in ("__import__('os').abort()", "(lambda: 5)()", "x.__class__", "S(5)", "Integer(5)"):
        assert is_equivalent(text, "5") is False


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^{9}}}", "9^{9^9}", "2^{100000000}", "(10^9)!", "((5!)!)!", r"\binom{10^9}{10^8}",
        "1e99999999", "(" * 500 + "1" + ")" * 500, "{" * 30 + "1" + "}" * 30,
        "((((2^{999})^{999})^{999})^{999})", r"(1+10^{-900})^{9999}", r"\sin(10^{10^3})",
        "x^{x^{x^{x^{x^{x}}}}}+10^{10^{10^{x}}}", "e^{e^{e^{10}}}", "3:" * 400 + "1",
        r"\sqrt" * 300 + "2", r"\sin" * 300 + "1", r"\frac" * 300 + "12", "x^" * 300 + "2",
        "-" * 1500 + "1",
        r"\begin{pmatrix}1&2\\3\end{pmatrix}", "(1,2)+3", r"\{1\}\cdot 2", "(0,1)^2", "1/0",
    ],
)  # fmt: skip
def test_too_large_too_deep_or_without_value_is_refused(text):
    with pytest.raises((reward.Unreadable, RecursionError)):
        is_equivalent("x", "x + 1")  # loads sympy
        reward.read(reward.normalise(text))
    assert is_equivalent(text, "x") is False


@pytest.mark.parametrize("part", [" ", ".", "$", "9", "\\", "<", r"\!", "{", "1,", "≈", "x ", "ab"])
def test_long_texts_take_no_longer_than_their_length(part):
    """A pattern that backtracks would need hours for these."""
    for text in (part * 50_000, f"${part * 50_000}x", f"1{part * 900}x", f"-{part * 900}"):
        assert integer_verdict(text, "7y") is None and not is_equivalent(text, "7y")
        assert extract_answer(f"<answer>{text}\\boxed{{5}}</answer>") in ("5", None)


def mutate(rng, text, texts):
    for _ in range(rng.randint(1, 4)):
        i, other = rng.randint(0, len(text)), rng.choice(texts)
        j, k = min(len(text), i + rng.randint(0, 4)), rng.randint(0, len(other))
        bits = ["", text[i:j] * 2, other[k : k + 5], rng.choice("^{}()[]!%|,0-/e\\&=<°\x00\ud800²")]
        text = text[:i] + rng.choice(bits) + text[rng.choice([i, j]) :]
    return text


def fuzz(num_mutations, seed):
    texts = [text for pair in pairs(RIGHT) + pairs(WRONG) for text in pair]
    rng = random.Random(seed)
    for _ in range(num_mutations):
        gold = rng.choice(texts)
        answer = mutate(rng, gold, texts)
        assert type(is_equivalent(answer, gold)) is bool, (answer, gold)


def test_any_text_in_a_bool_out():
    fuzz(2_000, seed=0)
    for text in ("", "\x00", "\ud800", "}{", "\\", "\\\\", "\U0001f600", "\n", "#%", "#unit"):
        assert is_equivalent(text, "5") is False and is_equivalent("x", text) is False


@pytest.mark.slow
def test_any_text_in_a_bool_out_for_long():
    fuzz(40_000, seed=1)


def test_vectors_judged_by_hand():
    path = SHARED / "vectors/answers.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}")
    rows = [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]
    assert [r for r in rows if is_equivalent(r["answer"], r["gold"]) is not r["equal"]] == []
