r"""Reward: find the final answer in what the model wrote, decide whether it is the label.

The paper's reward (section 2.2) is 1 if the final answer is equivalent to the label, else 0:

    extract_answer    where is it?      the last box in the last <answer>...</answer>
    integer_verdict   two integers?     decided on their digits, in the trainer, without sympy
    is_equivalent     the same thing?   everything else, in a sandbox child with a time limit

Model text is never evaluated: the parser reads LaTeX and plain text alike and builds sympy nodes
itself, so a model cannot print its own verdict. Towers, huge factorials, deep nests are refused.

    answer  := item (("," | ";" | "or" | "and") item)*                a bare list has no order
    item    := union (("=" | "<" | "≤" | ">" | "≥" | "≠" | "∈") union)*
    union   := sum (("∪" | "∖") sum)*
    sum     := term (("+" | "-" | "±" | "∓") term)*
    term    := factor (("*" | "/" | ":" | nothing) factor)* [unit]    2x, 3(a+b), 5 cm
    factor  := ("+" | "-" | "±" | "∓")* power
    power   := postfix ["^" exponent]
    postfix := atom ("!" | "%" | "°" | "_" base)*
    atom    := number | name | function | \frac | \sqrt | \binom | matrix | word | fence answer fence

A sympy expression or matrix stands for itself; a Node holds what sympy would merge too eagerly.
What has several readings is multiplied by a *mark*, a symbol: 28% is 28 * "#%". RULES are the
reasons for which an answer is the label: one has to accept. Two values are the same if their
difference is 0 to 300 digits, with symbols: at rational points of both signs. Unlike math-verify,
which the release asks, decimals are exact: 0.3333333333 is not 1/3. A label that cannot be read is
compared as text. Not done: sums, integrals, limits, cases.
"""

from __future__ import annotations

import itertools
import operator
import re
import zlib
from dataclasses import dataclass
from fractions import Fraction

sympy = None  # imported by is_equivalent: who only needs integers does not pay half a second

# ---- find the final answer ----

TOOL_RESPONSE = re.compile(r"<tool_response>.*?(?:</tool_response>|\Z)", re.DOTALL)
BOX = r"\\(?:boxed|fbox)(?![a-zA-Z])\s*"
BOX_OR_BRACE = re.compile(BOX + r"(\{|[^\s{}$]*)|\\.|[{}]", re.DOTALL)


def extract_answer(text: str) -> str | None:
    r"""The last box in the last closed <answer> of what the model wrote; tool output never counts.

    "<answer>so \boxed{\frac{1}{2}}.</answer>" -> "\frac{1}{2}"; \boxed 5. -> "5"; \boxed{5 -> None
    """
    text = TOOL_RESPONSE.sub("", text)
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    text = text[start : text.index("</answer>", start)] if start >= 0 else ""
    found, opened = None, []  # where the content of each open brace starts, None if it is no box's
    for match in BOX_OR_BRACE.finditer(text):
        if match[1] == "{" or match[0] == "{":
            opened.append(match.end() if match[1] else None)
        elif match[1]:
            found = match[1].rstrip(".,;:")
        elif match[0] == "}" and opened and (start := opened.pop()) is not None:
            content = text[start : match.start()].strip()
            found = found if re.match(BOX, content) else content  # \boxed{\boxed{5}}
    return found


# ---- integers, without the sandbox ----

SEPARATOR = r"(?:,|\{,\}|,?\\!\s?|\\[,;: ]|[ ~'_\u00a0\u2009\u202f])"
INTEGER = rf"\s*\$?\s*([-+−]?)\s*(?:\\\$)?\s*(\d{{1,3}}(?:{SEPARATOR}\d{{3}})+|\d+)(?:\.0*)?\s*\$?\.?\s*"
INTEGER = re.compile(INTEGER, re.ASCII)


def integer_verdict(answer: str, gold: str) -> bool | None:
    """Equal or not if both are plain integers, else None: ask is_equivalent in the sandbox."""
    a, g = integer(answer), integer(gold)
    return None if a is None or g is None else a == g


def integer(text: str) -> str | None:
    """Canonical digits, "+1,234." -> "1234", "-007" -> "-7". Text, as int() stops at 4,300."""
    if (match := INTEGER.fullmatch(text)) is None:
        return None
    digits = re.sub(r"\D", "", match[2]).lstrip("0")
    return "-" * (match[1] in ("-", "−")) + digits if digits else "0"


# ---- spelling: the many ways to write a thing become one ----

# first the spelling that is kept, then LaTeX commands and characters that mean the same
ALIASES = [
    r"* cdot times ast × · ⋅", r"/ div ÷ ⁄", r"± pm", r"∓ mp", r"≤ le leq leqslant ⩽", r"< lt",
    r"≥ ge geq geqslant ⩾", r"> gt", r"≠ ne neq", r"∈ in", r"∪ cup", r"∖ setminus backslash",
    r"| vert lvert rvert mid", r": colon", r"≈ approx", r"° degree º", r"⦃ { lbrace", r"⦄ } rbrace",
    r"⟨ langle", r"⟩ rangle", r"⌊ lfloor", r"⌋ rfloor", r"⌈ lceil", r"⌉ rceil", r"% % ％", r"- − –",
    r"( （", r") ）", r", ，", r"\frac dfrac tfrac cfrac", r"\binom dbinom tbinom", r"\sqrt √",
    r"\text mbox hbox textbf textit textrm textsf mathrm mathsf operatorname", r"\pi π", r"\R ℝ",
    r"\emptyset varnothing ∅", r"\infty ∞", r"\theta θ", r"\frac12 ½", r"\frac14 ¼", r"\frac34 ¾",
]  # fmt: skip
ALIASES = {alias: group.split()[0] for group in ALIASES for alias in group.split()[1:]}
ALIASES |= dict.fromkeys([" ", ",", ";", ":", "!", "quad", "qquad", "~"], " ")
DROPPED = "mathbf mathit mathcal boldsymbol vec hat overline displaystyle limits angle triangle boxed"
DROPPED += " fbox left right big Big bigg Bigg bigl bigr Bigl Bigr $ ( ) [ ]"
ALIASES |= dict.fromkeys(DROPPED.split(), "")
CHARACTERS = {c: f"{a} " if a[0] == "\\" else a for c, a in ALIASES.items() if not c.isascii()}
CHARACTERS |= {chr(0xFF10 + d): str(d) for d in range(10)} | {"€": "", "£": "", "~": " "}
CHARACTERS |= {c: f"^{{{d}}}" for d, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
FUNCTIONS = {f: f for f in "sin cos tan cot sec csc sinh cosh tanh log exp lg floor".split()}
FUNCTIONS |= {f"{a}{f}": f"a{f}" for f in "sin cos tan cot sec csc".split() for a in ("a", "arc")}
FUNCTIONS |= {"ln": "log", "abs": "Abs", "ceil": "ceiling", "sqrt": "sqrt"}
CONSTANTS = {"pi": "pi", "e": "E", "i": "I"} | dict.fromkeys("infty infinity inf oo".split(), "oo")
UNITS = "cm centimeter,mm millimeter,km kilometer,m meter,ft foot feet,in inch inche,kg kilogram,g gram"
UNITS += ",lb pound,hr hour,min minute,sec s second,mph mile,dollar,cent,day,week,year"
UNITS = {name: unit.split()[-1] for unit in UNITS.split(",") for name in unit.split()}
WORDS = {"yes", "no", "odd", "all", *UNITS} - {"m", "g", "s"}


def worded(match: re.Match) -> str:
    r"""A run of letters -> \text{run}, if it is a word and not names side by side, as ab or sinx."""
    run = match.group()
    known = run[0] == "\\" or run in CONSTANTS or run in FUNCTIONS or run[:-1] in FUNCTIONS
    return run if known or len(run) < 4 and run.lower() not in WORDS else rf"\text{{{run}}}"


SPELLINGS = [
    (r"(?<!\\)\$|\\(?:left|right)\s*\.", ""),
    (r"(?<=\d)(?:,?\\!|\{,\}|\\[,;: ]|~)\s*(?=\d{3}(?!\d))", ""),  # 10,\!080
    (r"(\.\d*)\s*\\(?:overline|bar|dot)\s*\{?(\d+)\}?", r"\1(\2)"),  # 0.1\overline{6} -> 0.1(6)
    (r"\\mathbb\s*\{?R\}?", r"\\R "),
    (r"\\(\\|[a-zA-Z]+|.)", lambda match: ALIASES.get(match[1], match[0])),
    (r"\*\*", "^"), (r"<=", "≤"), (r">=", "≥"), (r"!=", "≠"), (r"==", "="), (r"\+/-", "±"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\bdegrees?\b", "°"),
    (r"\bpercent\b", "%"),
    (r"(?<=\d)(?:st|nd|rd|th)\b", ""),
    (r"(?<=[)\]⦄])\s*(?:U|\\text\s*\{\s*U\s*\})\s*(?=[(\[⦃])", "∪"),
    (r"^\s*[a-zA-Z]\s*\([a-z](?:,\s*[a-z])*\)\s*=", ""),  # f(x) =
    (r"(?<=\S)\s*≈.*", ""),  # 5\pi \approx 15.7 claims 5\pi
    (r"\\text\s*\{\s*(and|or|e|i|[^a-zA-Z{}][^{}]*|%s)\s*\}" % "|".join(FUNCTIONS), r" \1 "),
    (r"\\(?:text|begin|end)\s*\{[^{}]*\}|\\?[a-zA-Z]+", worded),
    (r"(\\text\{[^{}]*)\}\s*\\text\{", r"\1 "),
    (r"(?:\\\\|[\s.,;:])+$", ""),
]  # fmt: skip
SPELLINGS = [(re.compile(pattern), becomes) for pattern, becomes in SPELLINGS]


def normalise(text: str) -> str:
    text = text.translate(str.maketrans(CHARACTERS))
    for pattern, becomes in SPELLINGS:
        text = pattern.sub(becomes, text)
    return text.strip()


# ---- the parser: a method for each line of the grammar ----

GREEK = "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma"
GREEK += " tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell"
MAX_LENGTH, MAX_NESTING = 2000, 20
THOUSANDS = r"\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+|(?:['_]\d{3})+)(?!\d|,\d)(?:\.\d+)?"
NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3}(?![\d.a-zA-Z]))?"
NAME = "|".join([*sorted([*FUNCTIONS, *CONSTANTS], key=len, reverse=True), "[a-zA-Z]"])
FUNCTION = r"\\?(?:%s)(?![a-zA-Z])" % "|".join(FUNCTIONS)
WORD = r"\\text\s*\{[^{}]*\}"
ATOM = r"(?!(?:and|or)\b)[a-zA-Z({⦃⟨⌊⌈]|\\(?!\\|end|text)"
CLOSING = {"(": r"[)\]]", "[": r"[)\]]", "{": r"\}", "⦃": "⦄", "⟨": "⟩", "⌊": "⌋", "⌈": "⌉", "|": r"\|"}


class Unreadable(Exception):
    """This text is no answer that the grammar knows, or one too large to build."""


@dataclass(frozen=True)
class Node:
    """kind: the signs of a relation, = or ≠ or a chain of < ≤ (3 > x is x < 3); or the fences of a
    list: "" bare, "{}" set, "()" tuple or open interval, "[)" "(]" "[]"; or ∪ and ∖ of two sets."""

    kind: str
    items: tuple
    is_Rational = is_Matrix = is_Symbol = False

    def no_number(self, other=None):
        raise Unreadable(f"{self} in arithmetic")

    __neg__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = no_number

    @property
    def free_symbols(self) -> set:
        return set().union(*(item.free_symbols for item in self.items))

    def xreplace(self, values: dict) -> Node:
        return Node(self.kind, tuple(item.xreplace(values) for item in self.items))


class Parser:
    """Reads one normalised text; every method moves pos past what it read."""

    def __init__(self, text: str):
        self.text, self.pos, self.nesting, self.fenced, self.bars = text, 0, 0, 0, 0

    def sees(self, pattern: str) -> re.Match | None:
        return re.compile(rf"\s*({pattern})", re.ASCII).match(self.text, self.pos)

    def take(self, pattern: str) -> str | None:
        match = self.sees(pattern)
        self.pos = match.end() if match else self.pos
        return match and match[1]

    def need(self, pattern: str) -> str:
        if (found := self.take(pattern)) is None:
            raise Unreadable(f"expected {pattern} at {self.pos} of {self.text!r}")
        return found

    def answer(self) -> list:
        items = [self.item()]
        while separator := self.take(r"[,;]?\s*\b(?:and|or)\b|[,;]"):
            items.append(self.item())
            if "and" in separator and is_relation(items[-1]) and items[-1].kind != "=":
                raise Unreadable("inequalities joined by 'and'")
        return items

    def item(self):
        terms, signs = [self.union()], ""
        while sign := self.take("[=<≤>≥≠∈]"):
            signs, terms = signs + sign, [*terms, self.union()]
        if set(signs) & set(">≥"):
            signs, terms = signs[::-1].translate(str.maketrans(">≥<≤", "<≤>≥")), terms[::-1]
        if signs == "∈" and is_name(terms[0]) or not signs:
            return terms[-1]
        if not set(signs) <= set("=<≤") and signs != "≠":
            raise Unreadable(f"relation {signs}")
        return Node("=", (terms[0], terms[-1])) if set(signs) == {"="} else Node(signs, tuple(terms))

    def union(self):
        node = self.sum()
        while sign := self.take("[∪∖]"):
            node = Node(sign, (node, self.sum()))
        return node

    def sum(self):
        total = self.term()
        while sign := self.take("[-+±∓]"):
            total = total + signed(sign, self.term())
        return total

    def term(self):
        value = self.factor()
        while True:
            if self.take(r"\*"):
                value = value * self.factor()
            elif self.take("/|:(?!.*:)"):
                value = value * power(self.factor(), sympy.S.NegativeOne)
            elif self.at_atom():
                value = value * self.power()
            elif words := self.take(WORD):
                return self.with_unit(value, words[6:-1].split())
            else:
                return value

    def at_atom(self):
        """Whether a factor follows without a sign: no digit, no word, not the bar that closes."""
        return self.sees(ATOM if self.bars else ATOM + r"|\|")

    def with_unit(self, value, words: list):
        if {"if", "when", "where", "for"}.intersection(words):
            raise Unreadable("an answer with a condition")
        self.take(r"\^\s*\{?\s*\d\s*\}?")
        names = [word if word in UNITS else word.rstrip("s") for word in words]
        unit = next((UNITS[name] for name in names if name in UNITS), None)
        return value * mark("unit " + unit) if unit and is_number(value) else value

    def factor(self):
        sign = self.take("[-+±∓]")
        return signed(sign, self.factor()) if sign else self.power()

    def power(self):
        base = self.postfix()
        return power(base, self.exponent()) if self.take(r"\^") else base

    def exponent(self):
        """All digits that follow, as in plain text: x^10 is x^{10}."""
        sign, digits = self.take("[-+]"), self.take(r"\d+(?:\.\d+)?")
        value = rational(Fraction(digits)) if digits else self.postfix()
        return signed(sign, power(value, self.exponent()) if self.take(r"\^") else value)

    def postfix(self):
        value = self.atom()
        while sign := self.take(r"!|%|°|_\s*\{?\s*\d+\s*\}?"):
            factorial = sign == "!"
            value = call("factorial", value) if factorial else value * mark(re.sub(r"[\s{}]", "", sign))
        return value

    def atom(self):
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise Unreadable("nested too deeply")
        method = self.numeral if self.sees(r"\.?\d") else self.group if self.sees(r"[(\[{⦃⟨⌊⌈|]") else self.name
        value = method()
        self.nesting -= 1
        return value

    def numeral(self):
        thousands = None if self.fenced else self.take(THOUSANDS)
        text = re.sub(r"[,'_ ]", "", thousands or self.need(NUMBER))
        value, (_, point, decimals) = Fraction(text), text.partition(".")
        if point and (period := self.take(r"\(\d+\)")):  # 0.1(6) = 0.1 + 6 / 90
            value += Fraction(int(period[1:-1]), (10 ** (len(period) - 2) - 1) * 10 ** len(decimals))
        if text.isdigit() and (part := self.take(r"(?<=\s)\d+/[1-9]\d*(?![\d.])")):  # 3 1/2
            value += Fraction(part)
        value = rational(value)
        if not text.isdigit() or not self.sees(r"\\frac"):
            return value
        part = self.atom()  # 3\frac12
        return value + part if part.is_Rational and 0 < part < 1 else value * part

    def group(self):
        """Fences and what is between them. One item is itself, but a set of one stays a set."""
        outside, opening = self.bars, self.need(r"[(\[{⦃⟨⌊⌈|]")
        self.bars = int(opening == "|")
        self.fenced += opening != "{"
        items = [] if opening != "{" and self.sees(CLOSING[opening]) else self.answer()
        fences = opening + self.need(CLOSING[opening])
        self.fenced -= opening != "{"
        self.bars = outside
        if fences in ("||", "⌊⌋", "⌈⌉"):
            return call({"|": "Abs", "⌊": "floor", "⌈": "ceiling"}[opening], *items)
        if len(items) == 1 and fences in ("()", "[]", "{}"):
            return items[0]
        if fences in ("{}", "⦃⦄"):
            return listed("{}", items)
        if fences in ("[)", "(]") and len(items) != 2:
            raise Unreadable("an interval has two ends")
        return Node(fences if len(items) == 2 and fences != "⟨⟩" else "()", tuple(items))

    def name(self):
        if words := self.take(WORD):
            words = " ".join(words[6:-1].split())
            return sympy.Symbol(words if len(words) == 1 else words.casefold())
        command = self.take(r"\\[a-zA-Z]+")
        name = command[1:] if command else self.need(NAME)
        if name == "frac":
            return self.argument() * power(self.argument(), sympy.S.NegativeOne)
        if name == "binom":
            return call("binomial", self.argument(), self.argument())
        if name == "begin":
            return self.matrix()
        if name in FUNCTIONS:
            return self.root() if name == "sqrt" else self.function(name)
        if name in CONSTANTS:
            return getattr(sympy, CONSTANTS[name])
        if command in (r"\R", r"\emptyset"):
            return Node("()", (-sympy.oo, sympy.oo)) if command == r"\R" else Node("{}", ())
        if command and name not in GREEK.split():
            raise Unreadable(f"unknown command {command}")
        subscript = self.take(r"_\s*(?:\{[^{}]*\}|\w)") or ""
        return sympy.Symbol(name + re.sub(r"[\s{}]", "", subscript) + (self.take("'+") or ""))

    def argument(self, digits: str = r"\d"):
        r"""TeX's: a group, or one digit, letter or command, so \frac12 is 1/2."""
        number = self.take(digits)
        return sympy.Integer(int(number)) if number else self.atom()

    def root(self):
        degree = self.group() if self.sees(r"\[") else sympy.Integer(2)
        value, inverse = self.argument(r"\d+"), power(degree, sympy.S.NegativeOne)
        odd = degree.is_Integer and degree % 2 == 1 and is_number(value)  # real, not principal root
        return -power(-value, inverse) if odd and value.is_negative else power(value, inverse)

    def function(self, name: str):
        base = self.argument(r"\d+") if name == "log" and self.take("_") else None
        exponent = self.exponent() if self.take(r"\^") else sympy.S.One
        if exponent == -1 and "a" + name in FUNCTIONS:  # \sin^{-1}
            name, exponent = "a" + name, sympy.S.One
        if self.sees(r"[({]"):
            value = self.group()
        else:  # \sin 2x \cos y: what is multiplied without a sign, up to the next function
            value = signed(self.take("-"), self.power())
            while self.at_atom() and not self.sees(FUNCTION):
                value = value * self.power()
        scale = sympy.S.One
        if name in ("log", "lg"):  # without a base, log has two readings: natural and decimal
            base = sympy.Integer(10) if name == "lg" else base
            scale = mark("log") if base is None else call("log", base)
        value = call("log" if name == "lg" else FUNCTIONS[name], value) * power(scale, sympy.S.NegativeOne)
        return power(value, exponent)

    def matrix(self):
        kind = self.need(r"\{(?:[pb]|small)?matrix\}|\{array\}")
        self.take(r"\{[lcr| ]*\}")
        rows = [[self.sum()]]
        while not self.take(r"(?:\\\\)?\s*\\end\s*" + re.escape(kind)):
            new_row = self.need(r"&|\\\\(?:\[[^\]]*\])?") != "&"
            rows = [*rows, [self.sum()]] if new_row else [*rows[:-1], [*rows[-1], self.sum()]]
        if len({len(row) for row in rows}) > 1 or not all(map(is_number, sum(rows, []))):
            raise Unreadable("not a matrix of numbers")
        return sympy.ImmutableMatrix(rows)


def read(text: str):
    """A normalised text -> expression, matrix or Node."""
    if len(text) > MAX_LENGTH:
        raise Unreadable("too long")
    parser = Parser(text)
    node = listed("", parser.answer())
    parser.need(r"\Z")
    return node


def listed(fences: str, items: list):
    """A list or set: an item with ± is two, x = 1, x = 2 is 1, 2. A bare list of one is its item."""
    sign, one = mark("±"), sympy.S.One
    items = [[x.xreplace({sign: one}), x.xreplace({sign: -one})] if sign in x.free_symbols else [x] for x in items]
    items = sum(items, [])
    names = {x.items[0] for x in items if is_relation(x) and x.kind == "=" and is_name(x.items[0])}
    if len(names) == 1 and len(items) > 1:
        items = [x.items[1] if is_relation(x) and x.items[0] in names else x for x in items]
    return items[0] if fences == "" and len(items) == 1 else Node(fences, tuple(items))


# ---- building: nothing larger than this ----

MAX_BITS, MAX_EXPONENT, MAX_ARGUMENT, MAX_FACTORIAL = 50_000, 10_000, 10**6, 1000


def mark(reading: str):
    return sympy.Symbol("#" + reading)


def rational(value: Fraction):
    return sympy.Rational(value.numerator, value.denominator)


def signed(sign: str | None, x):
    x = x * mark("±") if sign in ("±", "∓") else x
    return -x if sign in ("-", "∓") else x


def power(base, exponent):
    if not is_scalar(base) or not is_scalar(exponent) or base == 0 and not exponent.is_positive:
        raise Unreadable(f"({base})^({exponent})")
    coefficient = base.as_coeff_Mul()[0]
    bits = coefficient.p.bit_length() + coefficient.q.bit_length() if coefficient.is_Rational else 1
    return base ** bounded(exponent, min(MAX_EXPONENT, MAX_BITS / bits))


def call(name: str, *args):
    if not all(map(is_scalar, args)) or len(args) != 1 + (name == "binomial"):
        raise Unreadable(f"{name} of {args}")
    if name == "exp":
        return power(sympy.E, *args)
    if name not in ("Abs", "log", "floor", "ceiling"):
        limit = MAX_FACTORIAL if name in ("factorial", "binomial") else MAX_ARGUMENT
        args = [bounded(x.xreplace({mark("°"): sympy.pi / 180}), limit) for x in args]
    value = getattr(sympy, name)(*args)
    if value.has(sympy.zoo, sympy.nan):
        raise Unreadable(f"{name} has no value there")
    return value


def bounded(x, limit):
    """x, if it is no larger than limit at any sample point."""
    for k in range(NUM_SAMPLES if x.free_symbols else 1):
        parts = (x, sympy.S.Zero) if x.is_Rational else numeric(x, k)
        if parts is None or not all(abs(part) <= limit for part in parts):
            raise Unreadable(f"larger than {limit}")
    return x


# ---- the same value ----

NUM_SAMPLES, MAX_DIGITS = 4, 300


def sample(name: str, k: int):
    """A rational in ±[1/2, 2) that depends on the name alone: 0, 1 positive, 2 and 3 opposite."""
    seed = zlib.crc32(name.encode("utf8", "replace"), k)
    size = sympy.Rational(50_000 + seed % 150_000, 100_000)
    return size if k < 2 else size * (-1) ** (len(name) + ord(name[0]) + k)


def numeric(x, k: int) -> tuple | None:
    """(real, imaginary) part of x at sample point k; None if it has no value there."""
    point = {s: sample(s.name, k) for s in x.free_symbols}
    parts = x.evalf(50, subs=point, maxn=MAX_DIGITS).as_real_imag()
    return parts if all(part.is_Number and part is not sympy.nan for part in parts) else None


def is_zero(part) -> bool:
    """sympy keeps count of its digits: a Float with none left is 0 as far as MAX_DIGITS show."""
    return part == 0 or part.is_Float and not part.is_comparable


def same(a, b) -> bool:
    """Whether two expressions or matrices have the same value wherever both are real, or neither."""
    if a.is_Matrix or b.is_Matrix:
        return a.is_Matrix and b.is_Matrix and a.shape == b.shape and all(map(same, a, b))
    difference, num_judged = a - b, 0
    if difference.is_Rational or a == b:
        return a == b and a is not sympy.nan
    for k in range(NUM_SAMPLES if difference.free_symbols else 1):
        va, vb, vd = (numeric(x, k) for x in (a, b, difference))
        if va is None or vb is None or is_zero(va[1]) != is_zero(vb[1]):
            continue
        if vd is None or not all(map(is_zero, vd)):
            return False
        num_judged += 1
    return num_judged > 0


def proportional(a, b, positive: bool) -> bool:
    """Whether a = c * b for one number c, positive if wanted: 2x > 6 is x > 3."""
    pairs = [(numeric(a, k), numeric(b, k)) for k in range(NUM_SAMPLES)]
    pairs = [(va[0], vb[0]) for va, vb in pairs if va and vb and is_zero(va[1]) and is_zero(vb[1])]
    if not pairs or any(map(is_zero, pairs[0])) or positive and pairs[0][0] * pairs[0][1] < 0:
        return False
    (a0, b0), tolerance = pairs[0], sympy.Float("1e-40", 50)
    return all(abs(x * b0 - y * a0) <= tolerance * abs(x * b0) for x, y in pairs)


# ---- the rules: each is one reason for which the answer a is the label g ----


def is_number(node) -> bool:
    return not isinstance(node, Node)


def is_scalar(node) -> bool:
    return is_number(node) and not node.is_Matrix


def is_relation(node) -> bool:
    return not is_number(node) and node.kind[:1] in set("=≠<≤")


def is_name(node) -> bool:
    """x, x_1, AB (a length), or a tuple of such; not 2x."""
    if not is_number(node):
        return all(map(is_name, node.items))
    return all(s.is_Symbol and (s is node or s.name.isupper()) for s in sympy.Mul.make_args(node))


def same_value(a, g) -> bool:
    r"""3\sqrt{13} is \sqrt{117}, 2(k+1) is 2k+2; matrices entry by entry."""
    return is_number(a) and is_number(g) and same(a, g)


def marked(a, g) -> bool:
    r"""What only one side is marked with may have any of its meanings: 28% is 28 and 0.28, 70° is 70
    and 7pi/18, 5 cm is 5, \log is \ln or \lg. A base may be left out, not added; 5 cm is not 5 m."""
    if not (is_scalar(a) and is_scalar(g)):
        return False
    mine, its = ({s.name for s in x.free_symbols if s.name[0] == "#"} for x in (a, g))
    mine, its = mine - its, its - mine
    units = [{m[6:] for m in marks if m.startswith("#unit")} for marks in (mine, its)]
    if not mine | its or all(units) or any(m[1] == "_" for m in mine):
        return False
    other = {"#%": sympy.Rational(1, 100), "#°": sympy.pi / 180, "#log": sympy.log(10)}
    readings = [[(sympy.Symbol(m), x) for x in {sympy.S.One, other.get(m, sympy.S.One)}] for m in mine | its]
    letters = {s: sympy.S.One for s in a.free_symbols if UNITS.get(s.name) in units[1]}  # 5 m, 5\text{ m}
    return any(same(a.xreplace(dict(c) | letters), g.xreplace(dict(c))) for c in itertools.product(*readings))


def assigned(a, g) -> bool:
    """x = 5 is 5, (x, y) = (1, 2) is (1, 2), 2^3 = 8 is 8; 2x = 10 is not 10."""
    values = [assigned_value(a), assigned_value(g)]
    return values.count(None) == 1 and equal(*(n if v is None else v for v, n in zip(values, (a, g))))


def assigned_value(node):
    if not is_relation(node) or node.kind != "=":
        return None
    return node.items[1] if is_name(node.items[0]) or equal(*node.items) else None


def same_relation(a, g) -> bool:
    """y = 2x + 3 is 2x - y + 3 = 0, x > 3 is 2x > 6."""
    if not (is_relation(a) and is_relation(g) and a.kind == g.kind):
        return False
    if not all(map(is_scalar, a.items + g.items)):
        return all(map(equal, a.items, g.items))
    gaps = zip(a.items, a.items[1:], g.items, g.items[1:], a.kind)
    return all(proportional(a0 - a1, g0 - g1, sign in "<≤") for a0, a1, g0, g1, sign in gaps)


def ordered(a, g) -> bool:
    """(1, 1/2) is (1, 0.5), item by item; a bare list in the label's order is a tuple."""
    if is_number(a) or is_number(g) or a.kind != g.kind and {a.kind, g.kind} != {"", "()"}:
        return False
    return len(a.items) == len(g.items) and all(map(equal, a.items, g.items))


def unordered(a, g) -> bool:
    """-2, 1 is 1, -2 with its repetitions; a set has none, and a set of one is its item."""
    kinds = {"one" if is_number(x) or is_relation(x) else x.kind for x in (a, g)}
    if not kinds <= {"", "{}", "one"} or kinds <= {"one"}:
        return False
    a, g = ([x] if is_number(x) or is_relation(x) else list(x.items) for x in (a, g))
    if "{}" in kinds:
        return all(any(equal(x, y) for y in g) for x in a) and all(any(equal(x, y) for x in a) for y in g)
    counts = ([sum(is_relation(x) == is_relation(y) and equal(x, y) for y in ys) for x in a] for ys in (a, g))
    return len(a) == len(g) and operator.eq(*counts)


def same_reals(a, g) -> bool:
    """[0,1] ∪ [1,2] is [0,2], x > 3 is (3, oo), x ≠ 0 is (-oo,0) ∪ (0,oo)."""
    if is_number(a) or is_number(g) or a.free_symbols and g.free_symbols and a.free_symbols != g.free_symbols:
        return False
    ends = [-sympy.oo, sympy.oo, *leaves(a), *leaves(g)]
    values = [numeric(x, 0) if is_scalar(x) else None for x in ends]
    if not all(value and is_zero(value[1]) for value in values):
        return False
    rank = lambda x: sum(bool(v < numeric(x, 0)[0]) and not same(x, e) for e, (v, _) in zip(ends, values))
    covered = cells(a, rank), cells(g, rank)
    return None not in covered and covered[0] == covered[1]


def leaves(node) -> list:
    return [node] if is_number(node) else sum(map(leaves, node.items), [])


def cells(node, rank) -> set | None:
    """What node covers of the line: 2r is the end of rank r, 2r + 1 the gap above it; None if it is
    no set of real numbers or has an interval that is empty."""
    if is_number(node):
        return None
    kind, items, line = node.kind, node.items, set(range(1, 2 * rank(sympy.oo)))
    if kind == "{}":
        return {2 * rank(x) for x in items} if all(map(is_number, items)) else None
    if kind in ("∪", "∖") or kind == "" and all(map(is_relation, items)):
        parts = [cells(x, rank) for x in items]
        return None if None in parts else parts[0] - parts[1] if kind == "∖" else set().union(*parts)
    if is_relation(node):
        lone = [i for i, x in enumerate(items) if x.is_Symbol]
        if len(lone) != 1 or "=" in kind:
            return None
        i, signs = lone[0], f"<{kind}<"
        if kind == "≠":
            return line - {2 * rank(items[1 - i])}
        items = (-sympy.oo, *items, sympy.oo)[i : i + 3 : 2]
        kind = "(["[signs[i] == "≤"] + ")]"[signs[i + 1] == "≤"]
    if len(kind) != 2 or len(items) != 2 or not all(map(is_number, items)):
        return None
    low, high = map(rank, items)
    return line & set(range(2 * low + (kind[0] == "("), 2 * high + (kind[1] == "]"))) or None


RULES = [same_value, marked, assigned, same_relation, ordered, unordered, same_reals]


def equal(a, g) -> bool:
    return any(rule(a, g) for rule in RULES)


# ---- the verdict ----


def is_equivalent(answer: str, gold: str) -> bool:
    """Whether the answer is the label. Any text in, a bool out; slow texts need a time limit."""
    global sympy
    verdict = integer_verdict(answer, gold)
    if verdict is not None:
        return verdict
    answer, gold = normalise(answer), normalise(gold)
    if same_text(answer, gold):
        return True
    import sympy

    try:
        return equal(read(answer), read(gold))
    except Unreadable:
        return False


def same_text(answer: str, gold: str) -> bool:
    """Equal but for spaces and braces round one character; nothing is not an answer."""
    spaces, braces = r"(?<![\d,])\s+|\s+(?!\d)", r"(?<!\\)\{(\w)\}"
    answer, gold = (re.sub(braces, r"\1", re.sub(spaces, "", t)) for t in (answer, gold))
    return bool(answer) and answer == gold
