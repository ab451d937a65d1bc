r"""Reward: find the final answer in what the model wrote, decide whether it is the label.

The paper's reward (section 2.2) is 1 if the final answer is equivalent to the label, else 0.
`extract_answer` finds it, `integer_verdict` compares two integers by their digits in the trainer,
`is_equivalent` decides the rest in a sandbox child with a time limit. Model text is never evaluated
(a model could print its own verdict): a parser of LaTeX and plain text builds sympy nodes, and
refuses towers of powers, huge factorials and deep nests before they are built.

    answer  := item (("," | ";" | "or" | "and") item)*             a bare list has no order
    item    := union (("=" | "<" | "≤" | ">" | "≥" | "≠" | "∈") union)*
    union   := sum (("∪" | "∖") sum)*
    sum     := term (("+" | "-" | "±" | "∓") term)*
    term    := factor (("*" | "/" | ":" | nothing) factor)* [unit] 2x, 3(a+b), 5 cm
    factor  := ("+" | "-" | "±" | "∓")* power
    power   := postfix ["^" exponent]
    postfix := atom ("!" | "%" | "°" | "_" base)*
    atom    := number | fence answer fence | name | word | function | \frac | \sqrt | matrix

A sympy expression or matrix stands for itself; a Node holds what sympy would merge too eagerly.
What has several readings is multiplied by a *mark*, a symbol: 28% is 28 * "#%". RULES are the
reasons for which an answer is the label: one has to accept. Values are equal if they differ by 0 to
300 digits; with symbols, at points of both signs. Unlike in math-verify, which the release asks,
decimals are exact. A label that cannot be read (sums, integrals, cases) is compared as text.
"""

from __future__ import annotations

import itertools
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

GROUPS = r"\d{1,3}(?:(?:,|\{,\}|,?\\!\s?|\\[,;: ]|[ ~'_\u00a0\u2009\u202f])\d{3})+"
INTEGER = rf"[\s$]*(?:([-+−])\s*)?(?:\\\$\s*)?({GROUPS}|\d+)(?:\.0*)?[\s$.]*"
INTEGER = re.compile(INTEGER, re.ASCII)


def integer_verdict(answer: str, gold: str) -> bool | None:
    """Equal or not if both are plain integers, else None: ask is_equivalent in the sandbox."""
    a, g = integer(answer), integer(gold)
    return None if a is None or g is None else a == g


def integer(text: str) -> str | None:
    """Canonical digits, "+1,234." -> "1234", "-007" -> "-7". Text, as int() stops at 4,300."""
    if text.isascii() and text.isdigit() and text[0] != "0":  # nearly all, and 5 times as fast
        return text
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
    r"⟨ langle", r"⟩ rangle", r"\floor( lfloor ⌊", r"\ceil( lceil ⌈", r") rfloor rceil ⌋ ⌉ ）",
    r"( （", r", ，", r"- − –", r"% % ％", r"\frac dfrac tfrac cfrac", r"\binom dbinom tbinom",
    r"\text mbox hbox textbf textit textrm textsf mathrm mathsf operatorname", r"\pi π", r"\sqrt √",
    r"⦃⦄ emptyset varnothing ∅", r"\infty ∞", r"\theta θ", r"\frac12 ½", r"\frac14 ¼", r"\frac34 ¾",
]  # fmt: skip
ALIASES = {alias: group.split()[0] for group in ALIASES for alias in group.split()[1:]}
DROPPED = "mathbf mathit mathcal boldsymbol vec hat overline displaystyle limits angle triangle"
DROPPED += " boxed fbox left right big Big bigg Bigg bigl bigr Bigl Bigr $ ( ) [ ] € £"
ALIASES |= dict.fromkeys(DROPPED.split(), "")
ALIASES |= dict.fromkeys([" ", ",", ";", ":", "!", "quad", "qquad"], " ")
CHARACTERS = {c: f"{a} " if a[:1] == "\\" else a for c, a in ALIASES.items() if not c.isascii()}
CHARACTERS |= {c: f"^{{{d}}}" for d, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
CHARACTERS = str.maketrans(CHARACTERS | {chr(0xFF10 + d): str(d) for d in range(10)})
FUNCTIONS = {f: f for f in "sin cos tan cot sec csc sinh cosh tanh log exp floor sqrt".split()}
FUNCTIONS |= {a + f: f"a{f}" for f in "sin cos tan cot sec csc".split() for a in ("a", "arc")}
FUNCTIONS |= {"ln": "log", "abs": "Abs", "ceil": "ceiling"}
CONSTANTS = {"pi": "pi", "e": "E", "i": "I", "infty": "oo", "infinity": "oo", "oo": "oo"}
UNITS = "centimeter cm,millimeter mm,kilometer km,meter m,foot ft feet,inch in inche,kilogram kg,"
UNITS += "gram g,pound lb,hour hr,minute min,second sec s,mile mph,dollar,cent"
UNITS = {name: unit.split()[0] for unit in UNITS.split(",") for name in unit.split()}
WORDS = {"yes", "no", "odd", "all", *UNITS} - {"m", "g", "s"}


def worded(match: re.Match) -> str:
    r"""A run of letters -> \text{run}, if it is a word, not names side by side as ab or sinx."""
    run = match.group()
    known = run[0] == "\\" or run in CONSTANTS or run in FUNCTIONS or run[:-1] in FUNCTIONS
    return run if known or len(run) < 4 and run.lower() not in WORDS else rf"\text{{{run}}}"


NAMES = "|".join(sorted([*FUNCTIONS, *CONSTANTS], key=len, reverse=True))
SPELLINGS = [
    (r"\s+", " "),
    (r"(?<!\\)\$|\\(?:left|right)\s*\.", ""),
    (r"(?<=\d)(?:,?\\!|\{,\}|\\[,;: ]|~)\s*(?=\d{3}(?!\d))", ""),  # 10,\!080
    (r"(\d*)\.(\d*) ?(?:\\(?:overline|bar|dot) ?\{?|\()(\d+)[)}]?",  # 0.1\overline{6} = 0.1 + 6/90
     lambda m: f"({m[1]}.{m[2]}0+{m[3]}/{'9' * len(m[3])}{'0' * len(m[2])})"),
    (r"\\mathbb ?\{?R\}?|\\R(?![a-zA-Z])|ℝ", r"(-\\infty,\\infty)"),
    (r"\\(\\|[a-zA-Z]+|.)", lambda m: ALIASES.get(m[1], m[0])),
    (r"\|([^|]+)\|", r"\\abs(\1)"),
    (r"\*\*", "^"), (r"<=", "≤"), (r">=", "≥"), (r"!=", "≠"), (r"==", "="), (r"\+/-", "±"),
    (r"\^ ?(?:\{ ?\\circ ?\}|\\circ)|\bdegrees?\b", "°"),
    (r"\bpercent\b", "%"),
    (r"\\?\blg\b", r"\\log_{10}"),
    (r"\\(sin|cos|tan|cot|sec|csc) ?\^ ?\{ ?-1 ?\}", r"\\arc\1 "),
    (r"(?<=\d)(?:st|nd|rd|th)\b", ""),
    (r"^[^(\[⦃⟨]*$", lambda m: THOUSANDS.sub(lambda n: re.sub(r"[,'_ ]", "", n[0]), m[0])),
    (r"(?<![\d.^_])(\d+)(?: ?(\\frac ?(?:\d|\{\d+\}) ?(?:\d|\{\d+\}))| (\d+/\d+)(?!\d))",
     r"(\1+\2\3)"),  # 3\frac12, 3 1/2
    (r"\bin (?=[(\[⦃])", "∈"),
    (r"(?<=[)\]⦄]) ?(?:U|\\text ?\{ ?U ?\}) ?(?=[(\[⦃])", "∪"),
    (r"^ ?[a-zA-Z] ?\([a-z](?:, ?[a-z])*\) ?=", ""),  # f(x) =
    (r"(?<=\S) ?≈.*", ""),  # 5\pi \approx 15.7 claims 5\pi
    (rf"\\text ?\{{ ?(and|or|[^a-zA-Z{{}}][^{{}}]*|{NAMES}) ?\}}", r" \1 "),
    (r"\\(?:text|begin|end) ?\{[^{}]*\}|\\?[a-zA-Z]+", worded),
    (r"(\\text\{[^{}]*)\} ?\\text\{", r"\1 "),
    (r"(?<=[<>≤≥≠])(.*)\band\b", r"\1&"),  # "or" is a union, "and" is not: unreadable
    (r"(?:\\\\|[\s.,;:])+$", ""),
]  # fmt: skip
SPELLINGS = [(re.compile(pattern), becomes) for pattern, becomes in SPELLINGS]
THOUSANDS = r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+|(?:['_]\d{3})+)(?!\d|,\d)"
THOUSANDS = re.compile(THOUSANDS, re.ASCII)


def normalise(text: str) -> str:
    text = text.translate(CHARACTERS)
    for pattern, becomes in SPELLINGS:
        text = pattern.sub(becomes, text)
    return text.strip()


# ---- the parser: a method for each line of the grammar ----

GREEK = "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho "
GREEK += "sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell"
NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3}(?![\d.a-zA-Z]))?"
WORD = r"\\text ?\{ ?(?!(?:if|when|where|for)\b)[a-zA-Z][^{}]*\}"
ATOM = r"(?!(?:and|or)\b)[a-zA-Z({⦃⟨]|\\(?!\\|end|text)"
CLOSING = {"(": r"[)\]]", "[": r"[)\]]", "{": r"\}", "⦃": "⦄", "⟨": "⟩"}


class Unreadable(Exception):
    """This text is no answer that the grammar knows, or one too large to build."""


@dataclass(frozen=True)
class Node:
    """kind: the signs of a relation, = or ≠ or a chain of < ≤ (3 > x is x < 3); or the fences of a
    list: "" bare, "{}" set, "()" tuple or open interval, "[)" "(]" "[]"; or ∪ and ∖ of two sets."""

    kind: str
    items: tuple
    is_scalar = is_Matrix = is_Symbol = is_Rational = False

    def no_number(self, other=None):
        raise Unreadable(f"{self} in arithmetic")

    __neg__ = __add__ = __sub__ = __mul__ = _sympy_ = no_number  # _sympy_: what sympify() asks for

    @property
    def is_Relational(self) -> bool:
        return self.kind[:1] in ("=", "≠", "<", "≤")

    def leaves(self) -> list:
        return [y for x in self.items for y in (x.leaves() if isinstance(x, Node) else [x])]

    @property
    def free_symbols(self) -> set:
        return {symbol for x in self.items for symbol in x.free_symbols}

    def xreplace(self, values: dict) -> Node:
        return Node(self.kind, tuple(x.xreplace(values) for x in self.items))


class Parser:
    """Reads one normalised text; every method moves pos past what it read."""

    def __init__(self, text: str):
        self.text, self.pos = text, 0

    def sees(self, pattern: str) -> re.Match | None:
        return re.compile(rf" *({pattern})", re.ASCII).match(self.text, self.pos)

    def take(self, pattern: str) -> str | None:
        if match := self.sees(pattern):
            self.pos = match.end()
            return match[1]

    def need(self, pattern: str) -> str:
        if (found := self.take(pattern)) is None:
            raise Unreadable(f"expected {pattern} at {self.pos} of {self.text!r}")
        return found

    def answer(self) -> list:
        items = [self.item()]
        while self.take(r"[,;]? *\b(?:and|or)\b|[,;]"):
            items.append(self.item())
        return items

    def item(self):
        terms, signs = [self.union()], ""
        while sign := self.take("[=<≤>≥≠∈]"):
            signs, terms = signs + sign, [*terms, self.union()]
        if ">" in signs or "≥" in signs:
            signs, terms = signs[::-1].translate(str.maketrans(">≥<≤", "<≤>≥")), terms[::-1]
        if not signs or signs == "∈" and is_name(terms[0]):
            return terms[-1]
        if not set(signs) <= set("=<≤") and signs != "≠":
            raise Unreadable(f"relation {signs}")
        chain = set(signs) == {"="}  # x = 2 + 3 = 5
        return Node("=", (terms[0], terms[-1])) if chain else Node(signs, tuple(terms))

    def union(self):
        node = self.sum()
        while sign := self.take("[∪∖]"):
            flat = sign == "∪" and isinstance(node, Node) and node.kind == "∪"
            node = Node(sign, (*(node.items if flat else [node]), self.sum()))
        return node

    def sum(self):
        total = self.term()
        while sign := self.take("[-+±∓]"):
            term = signed(sign, self.term())
            if total.is_Matrix != term.is_Matrix:
                raise Unreadable("a matrix plus a number")
            total = total + term
        return total

    def term(self):
        value = self.factor()
        while True:
            if self.take(r"\*"):
                value = value * self.factor()
            elif self.take("/|:(?!.*:)"):
                value = value * inverse(self.factor())
            elif self.sees(ATOM):
                value = value * self.power()
            else:
                words = self.take(WORD + r"(?: *\^ *(?:\d|\{ *\d *\}))?")
                return value * self.unit(words) if words else value

    def unit(self, words: str):
        """Its mark, or 1 for words that are no unit we know: 12 apples is 12."""
        words = re.findall("[a-z]+", words[5:])
        units = [UNITS.get(word) or UNITS.get(word.rstrip("s")) for word in words]
        return next((sympy.Symbol("#unit " + unit) for unit in units if unit), sympy.S.One)

    def factor(self):
        sign = self.take("[-+±∓]")
        return signed(sign, self.factor()) if sign else self.power()

    def power(self):
        base = self.postfix()
        return power(base, self.exponent()) if self.take(r"\^") else base

    def exponent(self):  # all digits that follow, as in plain text: x^10 is x^{10}
        return signed(self.take("[-+]"), self.argument(r"\d+(?:\.\d+)?"))

    def postfix(self):
        value = self.atom()
        while sign := self.take(r"!|%|°|_ *(?:\d+|\{ *\d+ *\})"):
            mark = sympy.Symbol("#" + re.sub(r"[ {}]", "", sign))
            value = call("factorial", value) if sign == "!" else value * mark
        return value

    def atom(self):
        if number := self.take(NUMBER):
            return sympy.Rational(Fraction(number))
        return self.group() if self.sees(r"[(\[{⦃⟨]") else self.name()

    def group(self):
        """Fences and what is between them. One item is itself, but a set of one stays a set."""
        opening = self.need(r"[(\[{⦃⟨]")
        items = [] if opening != "{" and self.sees(CLOSING[opening]) else self.answer()
        fences = opening + self.need(CLOSING[opening])
        if len(items) == 1 and fences in ("()", "[]", "{}"):
            return items[0]
        if fences in ("{}", "⦃⦄"):
            return listed("{}", items)
        fences = "()" if fences == "⟨⟩" or fences == "[]" and len(items) != 2 else fences
        return Node(fences, tuple(items))

    def name(self):
        if words := self.take(WORD):
            words = " ".join(words[6:-1].split())
            return sympy.Symbol(words if len(words) == 1 else words.casefold())
        command = self.take(r"\\[a-zA-Z]+")
        name = command[1:] if command else self.need(NAMES + "|[a-zA-Z]")
        if name == "frac":
            return self.argument() * inverse(self.argument())
        if name == "binom":
            return call("binomial", self.argument(), self.argument())
        if name == "begin":
            return self.matrix()
        if name in FUNCTIONS:
            return self.root() if name == "sqrt" else self.function(name)
        if name in CONSTANTS:
            return getattr(sympy, CONSTANTS[name])
        if command and name not in GREEK.split():
            raise Unreadable(f"unknown command {command}")
        subscript = self.take(r"_ *(?:\{[^{}]*\}|\w)") or ""
        return sympy.Symbol(name + re.sub(r"[ {}]", "", subscript) + (self.take("'+") or ""))

    def argument(self, digits: str = r"\d"):
        r"""TeX's: a group, or one digit, letter or command, so \frac12 is 1/2."""
        number = self.take(digits)
        return sympy.Rational(Fraction(number)) if number else self.atom()

    def root(self):
        degree = self.group() if self.sees(r"\[") else sympy.Integer(2)
        value, odd = self.argument(r"\d+"), degree.is_Rational and degree % 2 == 1
        sign = -1 if odd and value.is_scalar and value.is_negative else 1  # the real root of -8
        return power(value * sign, inverse(degree)) * sign

    def function(self, name: str):
        base = self.argument(r"\d+") if name == "log" and self.take("_") else None
        exponent = self.exponent() if self.take(r"\^") else sympy.S.One
        if self.sees(r"[({]"):
            value = self.group()
        else:  # \sin 2x \cos y: what is multiplied without a sign, up to the next function
            value = signed(self.take("-"), self.power())
            while self.sees(ATOM) and not self.sees(rf"\\?(?:{'|'.join(FUNCTIONS)})(?![a-zA-Z])"):
                value = value * self.power()
        value = call(FUNCTIONS[name], value)
        if name == "log":  # without a base it has two readings, natural and decimal
            value = value * inverse(call("log", base) if base else sympy.Symbol("#log"))
        return power(value, exponent)

    def matrix(self):
        body = self.need(r"\{((?:[pb]|small)?matrix|array)\}.*?\\end ?\{\2\}")
        body = re.sub(r"^\{\w+\} ?(?:\{[lcr| ]*\})?|(?:\\\\)? ?\\end.*", "", body)
        rows = [row.split("&") for row in re.split(r"\\\\(?:\[[^\]]*\])?", body)]
        rows = [[read(cell) for cell in row] for row in rows]
        if len({len(row) for row in rows}) > 1 or not all(x.is_scalar for x in sum(rows, [])):
            raise Unreadable("not a matrix of numbers")
        return sympy.ImmutableMatrix(rows)


def read(text: str):
    """A normalised text -> expression, matrix or Node."""
    depth = itertools.accumulate((c in "([{⦃⟨") - (c in ")]}⦄⟩") for c in text)
    if max(depth, default=0) > MAX_NESTING:
        raise Unreadable("nested too deeply")
    parser = Parser(text)
    node = listed("", parser.answer())
    parser.need(r"\Z")
    return node


def listed(kind: str, items: list):
    """A list or set: an item with ± is two; x = 1, x = 2 is 1, 2; a bare list of one is it."""
    sign, both = sympy.Symbol("#±"), (sympy.S.One, sympy.S.NegativeOne)
    items = [x.xreplace({sign: s}) for x in items for s in both[: 1 + (sign in x.free_symbols)]]
    names = {x.items[0] if x.kind == "=" else None for x in items if x.is_Relational}
    if len(items) > 1 and len(names) == 1 and None not in names and all(map(is_name, names)):
        items = [x.items[1] if x.is_Relational else x for x in items]
    return items[0] if kind == "" and len(items) == 1 else Node(kind, tuple(items))


# ---- values: nothing is built that is larger than this ----

MAX_BITS, MAX_EXPONENT, MAX_ARGUMENT, MAX_FACTORIAL = 50_000, 10_000, 10**9, 1000
MAX_LENGTH, MAX_NESTING, NUM_SAMPLES, MAX_DIGITS, MAX_ENDS = 2000, 20, 4, 300, 40


def signed(sign: str | None, x):
    x = x * sympy.Symbol("#±") if sign in ("±", "∓") else x
    return -x if sign in ("-", "∓") else x


def inverse(x):
    return power(x, sympy.S.NegativeOne)


def power(base, exponent):
    if not (base.is_scalar and exponent.is_scalar) or base == 0 and not exponent.is_positive:
        raise Unreadable(f"({base})^({exponent})")
    number = base.as_coeff_Mul()[0]
    bits = number.p.bit_length() + number.q.bit_length() if number.is_Rational else 1
    bits *= 1 if exponent.is_Integer else 50  # sympy looks for factors of what is under a root
    return base ** bounded(exponent, min(MAX_EXPONENT, MAX_BITS / bits))


def call(name: str, *args):
    if not all(x.is_scalar for x in args) or len(args) != 1 + (name == "binomial"):
        raise Unreadable(f"{name} of {args}")
    if name == "exp":
        return power(sympy.E, *args)
    if name not in ("Abs", "log"):
        limit = MAX_FACTORIAL if name in ("factorial", "binomial") else MAX_ARGUMENT
        args = [bounded(x.xreplace({sympy.Symbol("#°"): sympy.pi / 180}), limit) for x in args]
    value = getattr(sympy, name)(*args)
    if value.has(sympy.zoo, sympy.nan):
        raise Unreadable(f"{name} has no value there")
    return value


def bounded(x, limit):
    """x, if it is no larger than limit at any sample point."""
    values = [numeric(x, k) for k in range(NUM_SAMPLES if x.free_symbols else 1)]
    if not all(value and max(map(abs, value)) <= limit for value in values):
        raise Unreadable(f"larger than {limit}")
    return x


def numeric(x, k: int = 0) -> tuple | None:
    """(real, imaginary) part of x, or None if it has no value, where each symbol has a value in
    ±[1/2, 2) that depends on its name: samples 0 and 1 are positive, 2 and 3 have opposite signs.
    sympy keeps count of its digits: a Float with none left is 0 as far as MAX_DIGITS show."""
    hashes = {s: zlib.crc32(s.name.encode("utf8", "replace")) for s in x.free_symbols}
    sizes = {s: sympy.Rational(50_000 + h * (k + 1) % 149_993, 100_000) for s, h in hashes.items()}
    point = {s: size * (-1) ** (k // 2 * (hashes[s] + k)) for s, size in sizes.items()}
    parts = x.evalf(50, subs=point, maxn=MAX_DIGITS).as_real_imag()
    if not all(part.is_Number and part is not sympy.nan for part in parts):
        return None
    return tuple(x if x.is_comparable or not x.is_Float else sympy.S.Zero for x in parts)


def same(a, b) -> bool:
    """Whether two expressions or matrices have one value; where both are real, if anywhere."""
    if a.is_Matrix or b.is_Matrix:
        return a.is_Matrix and b.is_Matrix and a.shape == b.shape and all(map(same, a, b))
    gap = a - b
    if a == b or gap.is_Rational:
        return a == b and a is not sympy.nan
    samples = range(NUM_SAMPLES if gap.free_symbols else 1)
    values = [v for v in ([numeric(x, k) for x in (a, b, gap)] for k in samples) if v[0] and v[1]]
    judged = [v for v in values if not v[0][1] and not v[1][1]]
    judged = judged or [v for v in values if v[0][1] and v[1][1]]
    return bool(judged) and all(v[2] == (0, 0) for v in judged)


# ---- the rules: each is one reason for which the answer a is the label g ----


def same_value(a, g) -> bool:
    r"""3\sqrt{13} is \sqrt{117}, 2(k+1) is 2k+2, matrices entry by entry. A mark that only one side
    has may take any of its meanings: 28% is 28 and 0.28, 70° is 70 and 7pi/18, 5 cm is 5, \log is
    \ln or \log_{10}. A base may be left out but not added, and 5 cm is not 5 m."""
    if isinstance(a, Node) or isinstance(g, Node):
        return False
    if a.is_Symbol and g.is_Symbol and g.name in "ABCDE":  # choices
        return a.name.upper() == g.name
    mine, its = ({s.name for s in x.free_symbols if s.name[0] == "#"} for x in (a, g))
    mine, its = mine - its, its - mine
    units = [{m[6:] for m in marks if m.startswith("#unit")} for marks in (mine, its)]
    if all(units) or any(m[1] == "_" for m in mine):
        return False
    one, percent = sympy.S.One, sympy.Rational(1, 100)
    other = {"#%": percent, "#°": sympy.pi / 180, "#log": sympy.log(10)}
    letters = {s: one for s in a.free_symbols if UNITS.get(s.name) in units[1]}  # 5 m, 5\text{ m}
    meanings = [[(sympy.Symbol(m), x) for x in {one, other.get(m, one)}] for m in mine | its]
    choices = [dict(choice) for choice in itertools.product(*meanings)]
    return any(same(a.xreplace(choice | letters), g.xreplace(choice)) for choice in choices)


def assigned(a, g) -> bool:
    """x = 5 is 5, (x, y) = (1, 2) is (1, 2), 2^3 = 8 is 8; 2x = 10 is not 10."""
    relation, other = (a, g) if a.is_Relational else (g, a)
    if not relation.is_Relational or relation.kind != "=" or other.is_Relational:
        return False
    left, right = relation.items
    matches = equal(right, g) if relation is a else equal(a, right)
    return matches and (is_name(left) or equal(left, right))


def is_name(node) -> bool:
    """x, x_1, AB (a length), or a tuple of such; not 2x."""
    if isinstance(node, Node):
        return all(map(is_name, node.items))
    factors = sympy.Mul.make_args(node)
    return all(s.is_Symbol and (s is node or s.name.isupper()) for s in factors)


def same_relation(a, g) -> bool:
    """y = 2x + 3 is 2x - y + 3 = 0, x > 3 is 2x > 6: what is compared differs by a factor."""
    if not (a.is_Relational and g.is_Relational and a.kind == g.kind):
        return False
    if not all(x.is_scalar for x in a.items + g.items):
        return all(map(equal, a.items, g.items))
    gaps = zip(a.items, a.items[1:], g.items, g.items[1:], a.kind)
    return all(proportional(a0 - a1, g0 - g1, sign in "<≤") for a0, a1, g0, g1, sign in gaps)


def proportional(a, b, positive: bool) -> bool:
    pairs = [(numeric(a, k), numeric(b, k)) for k in range(NUM_SAMPLES)]
    pairs = [(va[0], vb[0]) for va, vb in pairs if va and vb and va[1] == vb[1] == 0]
    pairs = [(x, y) for x, y in pairs if x.is_finite and y.is_finite]
    if not pairs or 0 in pairs[0] or positive and pairs[0][0] * pairs[0][1] < 0:
        return False
    a0, b0 = pairs[0]
    return all(abs(x * b0 - y * a0) * 10**40 <= abs(x * b0) for x, y in pairs)


def ordered(a, g) -> bool:
    """(1, 1/2) is (1, 0.5), item by item; a bare list in the label's order is a tuple."""
    if not (isinstance(a, Node) and isinstance(g, Node)) or len(a.items) != len(g.items):
        return False
    alike = a.kind == g.kind or {a.kind, g.kind} == {"", "()"}
    return alike and all(map(equal, a.items, g.items))


def unordered(a, g) -> bool:
    """-2, 1 is 1, -2 with its repetitions; a set has none, and a set of one is its item."""
    ones = [x.is_Relational or not isinstance(x, Node) for x in (a, g)]
    kinds = {"one" if one else x.kind for one, x in zip(ones, (a, g))}
    if not kinds <= {"", "{}", "one"} or all(ones):
        return False
    a, g = ((x,) if one else x.items for one, x in zip(ones, (a, g)))
    if "{}" not in kinds and len(a) != len(g):
        return False
    alike = [[x.is_Relational == y.is_Relational and equal(x, y) for y in g] for x in a]
    if "{}" in kinds:
        return all(map(any, alike)) and all(map(any, zip(*alike))) and bool(a) == bool(g)
    return all(alike.count(row) == sum(row) for row in alike)


def same_reals(a, g) -> bool:
    """[0,1] ∪ [1,2] is [0,2], x > 3 is (3, oo), x ≠ 0 is (-oo,0) ∪ (0,oo): both contain the same of
    all ends and what lies between them."""
    if not (isinstance(a, Node) and isinstance(g, Node)):
        return False
    leaves = {*a.leaves(), *g.leaves()}
    names = {x for x in leaves if x.is_Symbol}
    ends = [x for x in leaves - names if x not in (sympy.oo, -sympy.oo)]
    if len(names) > 1 or len(ends) > MAX_ENDS or None in map(real, ends):
        return False
    far = sum(map(abs, ends), sympy.S.One)
    ends = [-far, *sorted(ends, key=real), far]
    points = ends + [(x + y) / 2 for x, y in zip(ends, ends[1:])]
    within = [(contains(a, x), contains(g, x)) for x in points]
    return any(x for x, _ in within) and all(x == y for x, y in within)


def contains(node: Node, x) -> bool:
    kind, items = node.kind, node.items
    if kind in ("∪", "∖", ""):
        found = [isinstance(item, Node) and contains(item, x) for item in items]
        return found[0] and not found[1] if kind == "∖" else any(found)
    if kind == "{}":
        return any(same(x, item) for item in items)
    terms = [x if item.is_Symbol else item for item in items]
    if not node.is_Relational:
        if len(items) != 2 or terms != [*items]:  # an end that is a symbol
            return False
        kind, terms = "<≤"[kind[0] == "["] + "<≤"[kind[1] == "]"], [items[0], x, items[1]]
    return all(map(holds, terms, kind, terms[1:]))


def holds(a, sign: str, b) -> bool:
    return sign in "=≤" if same(a, b) else sign == "≠" or sign in "<≤" and real(a) < real(b)


def real(x):
    value = None if x.is_Matrix or x.free_symbols else numeric(x)
    return value[0] if value and value[1] == 0 else None


RULES = [same_value, assigned, same_relation, ordered, unordered, same_reals]


def equal(a, g) -> bool:
    return any(rule(a, g) for rule in RULES)


def is_equivalent(answer: str, gold: str) -> bool:
    """Whether the answer is the label. Any text in, a bool out; slow texts need a time limit."""
    global sympy
    if (verdict := integer_verdict(answer, gold)) is not None:
        return verdict
    if len(answer) > MAX_LENGTH or len(gold) > MAX_LENGTH:
        return answer == gold
    answer, gold = normalise(answer), normalise(gold)
    texts = [re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text) for text in (answer, gold)]
    ignored = r"(?<![\d,])\s+|\s+(?!\d)|(?<!\\)\{(\w)\}(?!\w)"  # x^{2} is x^2, but 1 2 is not 12
    texts = [re.sub(ignored, r"\1", text) for text in texts]
    if not all(texts) or texts[0] == texts[1]:
        return all(texts)
    import sympy

    try:
        return equal(read(answer), read(gold))
    except (Unreadable, RecursionError, ArithmeticError, sympy.ShapeError):
        return False
