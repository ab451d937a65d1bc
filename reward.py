r"""Reward: find the final answer in what the model wrote, decide whether it is the label.

The paper's reward (section 2.2) is 1 if the final answer is equivalent to the label, else 0.
Integers are compared by their digits in the trainer, the rest by `is_equivalent` in a sandbox child
with a time limit. Model text is never evaluated (a model could print its own verdict): a parser of
LaTeX and plain text builds sympy nodes, and refuses huge powers and factorials before it does.

    answer  := item (("," | ";" | "or" | "and") item)*             a bare list has no order
    item    := sum (("=" | "<" | "≤" | ">" | "≥" | "≠" | "∈") sum)*
    sum     := term (("+" | "-" | "±" | "∓" | "∪" | "∖") term)*
    term    := factor (("*" | "/" | ":" | nothing) factor)* [unit] 2x, 3(a+b), 5 cm
    factor  := ("+" | "-" | "±" | "∓")* power
    power   := atom ("!" | "%" | "°" | "_" base)* ["^" exponent]
    atom    := number | fence answer fence | name | word | function | \frac | \sqrt | matrix

A Node holds what sympy would merge too eagerly. What has several readings is multiplied by a
*mark*, a symbol: 28% is 28 * "#%". RULES are the reasons to accept an answer, one is enough. Values
are the same if they differ by 0 to 300 digits, at points of both signs; unlike in math-verify (the
release's), decimals are exact. A label that cannot be read (sums) is compared as text.
"""

import itertools
import re
import zlib
from dataclasses import dataclass

sympy = None  # imported by is_equivalent: who only needs integers does not pay half a second

# ---- find the final answer; integers need no sandbox ----

BOX = r"\\(?:boxed|fbox)(?![a-zA-Z])\s*"
BOX_OR_BRACE = re.compile(BOX + r"(\{|[^\s{}$]*)|\\.|[{}]", re.DOTALL)
GROUPS = r"\d{1,3}(?:(?:,|\{,\}|,?\\!\s?|\\[,;: ]|[ ~'_\u00a0\u2009\u202f])\d{3})+"
INTEGER = re.compile(rf"(?a)[\s$]*(?:([-+−])\s*)?(?:\\\$\s*)?({GROUPS}|\d+)(?:\.0*)?[\s$.]*")


def extract_answer(text: str) -> str | None:
    r"""The last box in the last closed <answer> of what the model wrote; tool output never counts.
    "<answer>so \boxed{\frac{1}{2}}.</answer>" -> "\frac{1}{2}"; \boxed 5. -> 5; \boxed{5 -> None"""
    text = re.sub(r"(?s)<tool_response>.*?(?:</tool_response>|\Z)", "", text)
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


def integer_verdict(answer: str, gold: str) -> bool | None:
    """Equal or not if both are plain integers, else None: ask is_equivalent in the sandbox."""
    a, g = integer(answer), integer(gold)
    return None if a is None or g is None else a == g


def integer(text: str) -> str | None:
    """Canonical digits, "+1,234." -> "1234", "-007" -> "-7". Text, as int() stops at 4,300."""
    if match := INTEGER.fullmatch(text):
        digits = re.sub(r"\D", "", match[2]).lstrip("0")
        return "-" * (match[1] in ("-", "−")) + digits if digits else "0"


# ---- spelling: first the one that is kept, then commands and characters that mean the same ----

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
ALIASES |= dict.fromkeys(DROPPED.split(), "") | dict.fromkeys([*" ,;:!", "quad", "qquad"], " ")
CHARACTERS = {c: f"{a} " if a[:1] == "\\" else a for c, a in ALIASES.items() if not c.isascii()}
CHARACTERS |= {c: f"^{{{d}}}" for d, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
CHARACTERS = str.maketrans(CHARACTERS | {chr(0xFF10 + d): str(d) for d in range(10)})
FUNCTIONS = {f: f for f in "sin cos tan cot sec csc sinh cosh tanh log exp floor sqrt".split()}
FUNCTIONS |= {a + f: f"a{f}" for f in "sin cos tan cot sec csc".split() for a in ("a", "arc")}
FUNCTIONS |= {"ln": "log", "abs": "Abs", "ceil": "ceiling"}
CONSTANTS = {"pi": "pi", "e": "E", "i": "I", "infty": "oo", "infinity": "oo", "oo": "oo"}
NAMES = "|".join(sorted([*FUNCTIONS, *CONSTANTS], key=len, reverse=True))
UNITS = "centimeter cm,millimeter mm,kilometer km,meter m,foot ft feet,inch in inche,kilogram kg,"
UNITS += "gram g,pound lb,hour hr,minute min,second sec s,mile mph,dollar,cent,2 square sq,3 cubic"
UNITS = {name: unit.split()[0] for unit in UNITS.split(",") for name in unit.split()}
WORDS = "|".join({"yes", "no", "odd", "all", *UNITS} - {"m", "g", "s", "2", "3"})
THOUSANDS = r"(?a)(?<![\d.,])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+|(?:['_]\d{3})+)(?!\d|,\d)"
KNOWN = rf"\\(?:text|begin|end) ?\{{[^{{}}]*\}}|\\[a-zA-Z]+|(?:{NAMES})[a-zA-Z]?(?![a-zA-Z])"
SPELLINGS = [
    (r"\s+", " "), (r"(?<!\\)\$|\\(?:left|right)\s*\.|(?<=\d)(?:st|nd|rd|th)\b", ""),  # 11th
    (r"(?<=\d)(?:,?\\!|\{,\}|\\[,;: ]|~)\s*(?=\d{3}(?!\d))", ""),  # 10,\!080
    (r"(\d*)\.(\d*) ?(?:\\(?:overline|bar|dot) ?\{?|\()(\d+)[)}]?",  # 0.1\overline{6} = 0.1 + 6/90
     lambda m: f"({m[1]}.{m[2]}0+{m[3]}/{'9' * len(m[3])}{'0' * len(m[2])})"),
    (r"\\mathbb ?\{?R\}?|\\R(?![a-zA-Z])|ℝ", r"(-\\infty,\\infty)"),
    (r"\\(\\|[a-zA-Z]+|.)", lambda m: ALIASES.get(m[1], m[0])), (r"\|([^|]+)\|", r"\\abs(\1)"),
    (r"\*\*", "^"), (r"<=", "≤"), (r">=", "≥"), (r"!=", "≠"), (r"==", "="), (r"\+/-", "±"),
    (r"\^ ?(?:\{ ?\\circ ?\}|\\circ)|\bdegrees?\b", "°"), (r"\bpercent\b", "%"),
    (r"\\(sin|cos|tan|cot|sec|csc) ?\^ ?\{ ?-1 ?\}", r"\\arc\1 "), (r"\\?\blg\b", r"\\log_{10}"),
    (r"^[^(\[⦃⟨]*$", lambda m: re.sub(THOUSANDS, lambda n: re.sub(r"[,'_ ]", "", n[0]), m[0])),
    (r"(?<![\d.^_a-zA-Z])(?<!sqrt )(\d+)(?: ?(\\frac ?(?:\d|\{\d+\}) ?(?:\d|\{\d+\}))"
     r"| (\d+/\d+)(?!\d))", r"(\1+\2\3)"),  # 3\frac12, 3 1/2
    (r"\bin (?=[(\[⦃])", "∈"), (r"(?<=[)\]⦄]) ?(?:U|\\text ?\{ ?U ?\}) ?(?=[(\[⦃])", "∪"),
    (r"^ ?[a-zA-Z] ?\([a-z](?:, ?[a-z])*\) ?=", ""), (r"(?<=\S) ?≈.*", ""),  # f(x) =, 5\pi ≈ 15.7
    (rf"\\text ?\{{ ?(and|or|[^a-zA-Z{{}}][^{{}}]*|{NAMES}) ?\}}", r" \1 "),
    (rf"((?<![\\a-zA-Z])(?i:{WORDS})(?![a-zA-Z]))|{KNOWN}|([a-zA-Z]{{4,}})",  # not ab, not sinx
     lambda m: rf"\text{{{m[1] or m[2]}}}" if m[1] or m[2] else m[0]),
    (r"(\\text\{[^{}]*)\} ?\\text\{", r"\1 "), (r"(?:\\\\|[\s.,;:])+$", ""),
    (r"(?<=[<>≤≥≠])(.*)\band\b", r"\1&"),  # "or" is a union, "and" is not: unreadable
]  # fmt: skip


def normalise(text: str) -> str:
    text = text.translate(CHARACTERS)
    for pattern, becomes in SPELLINGS:
        text = re.sub(pattern, becomes, text)
    return text.strip()


# ---- the parser: a method for each line of the grammar; nothing is built that is too large ----

GREEK = "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho "
GREEK += "sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell"
NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3}(?![\d.a-zA-Z]))?"
WORD = r"\\text ?\{ ?(?!(?:if|when|where|for)\b)[a-zA-Z][^{}]*\}"
ATOM = r"(?!(?:and|or)\b)[a-zA-Z({⦃⟨]|\\(?!\\|end|text)"
CLOSING = {"(": r"[)\]]", "[": r"[)\]]", "{": r"\}", "⦃": "⦄", "⟨": "⟩"}
MAX_BITS, MAX_EXPONENT, MAX_ARGUMENT, MAX_FACTORIAL = 50_000, 10_000, 10**9, 1000
MAX_LENGTH, MAX_NESTING, NUM_SAMPLES, MAX_DIGITS = 2000, 20, 4, 300


class Unreadable(Exception):
    """This text is no answer that the grammar knows, or one too large to build."""


@dataclass(frozen=True)
class Node:
    """kind: the signs of a relation, = or ≠ or a chain of < ≤ (3 > x is x < 3); or the fences of a
    list: "" bare, "{}" set, "()" tuple or open interval, "[)" "(]" "[]"; or ∪ and ∖ of two sets."""

    kind: str
    items: tuple
    is_scalar = is_Matrix = is_Symbol = is_Rational = False
    is_Relational = property(lambda self: self.kind[:1] in ("=", "≠", "<", "≤"))
    free_symbols = property(lambda self: {s for x in self.items for s in x.free_symbols})

    def refuse(self, other=None):
        raise Unreadable(f"{self} in arithmetic")

    __neg__ = __add__ = __sub__ = __mul__ = _sympy_ = refuse  # _sympy_: what sympify() asks for

    def xreplace(self, values: dict) -> "Node":
        return Node(self.kind, tuple(x.xreplace(values) for x in self.items))


class Parser:
    def __init__(self, text: str):
        self.text, self.pos = text, 0  # a normalised text; every method moves past what it read

    def sees(self, pattern: str) -> re.Match | None:
        return re.compile(rf" *({pattern})", re.ASCII).match(self.text, self.pos)

    def take(self, pattern: str, needed: bool = False) -> str | None:
        match = self.sees(pattern)
        if needed and match is None:
            raise Unreadable(f"expected {pattern} at {self.pos} of {self.text!r}")
        self.pos = match.end() if match else self.pos
        return match and match[1]

    def answer(self) -> list:
        items = [self.item()]
        while self.take(r"[,;]? *\b(?:and|or)\b|[,;]"):
            items.append(self.item())
        return items

    def item(self):
        terms, signs = [self.sum()], ""
        while sign := self.take("[=<≤>≥≠∈]"):
            signs, terms = signs + sign, [*terms, self.sum()]
        if ">" in signs or "≥" in signs:
            signs, terms = signs[::-1].translate(str.maketrans(">≥<≤", "<≤>≥")), terms[::-1]
        if not signs or signs == "∈" and is_name(terms[0]):
            return terms[-1]
        chain = set(signs) == {"="}  # x = 2 + 3 = 5
        return Node("=", (terms[0], terms[-1])) if chain else Node(signs, tuple(terms))

    def sum(self):
        total = self.term()
        while sign := self.take("[-+±∓∪∖]"):
            term = signed(sign, self.term())
            if total.is_Matrix != term.is_Matrix:
                raise Unreadable("a matrix plus a number")
            sets = total.items if isinstance(total, Node) and total.kind == "∪" else (total,)
            total = Node(sign, (*sets, term)) if sign in "∪∖" else total + term
        return total

    def term(self):
        value = self.factor()
        while sign := self.take(r"[*/]|:(?!.*:)") or self.sees(ATOM):
            if sign in ("*", "/", ":"):
                value = value * (self.factor() if sign == "*" else power(self.factor()))
            else:
                value = value * self.power()
        words = self.take(WORD + r"(?: *\^ *(?:\d|\{ *\d *\}))?") or ""
        words = [UNITS.get(w, UNITS.get(w.rstrip("s"))) for w in re.findall("[a-z]+|[23]", words)]
        unit = " ".join(sorted(filter(None, words)))  # none that we know in 12 apples, which is 12
        return value * sympy.Symbol("#unit " + unit) if unit.strip("2 3") else value

    def factor(self):
        sign = self.take("[-+±∓]")
        return signed(sign, self.factor()) if sign else self.power()

    def power(self):
        value = self.atom()
        while sign := self.take(r"!(?!!)|%|°|_ *(?:\d+|\{ *\d+ *\})"):  # 5!! is not (5!)!
            mark = sympy.Symbol("#" + re.sub(r"[ {}]", "", sign))
            value = call("factorial", value) if sign == "!" else value * mark
        return power(value, self.exponent()) if self.take(r"\^") else value

    def exponent(self):  # all digits that follow, as in plain text: x^10 is x^{10}
        return signed(self.take("[-+]"), self.atom(r"\d+(?:\.\d+)?"))

    def atom(self, number: str = NUMBER):
        r"""TeX's argument with r"\d" as number: \frac12 is 1/2."""
        if digits := self.take(number):
            return sympy.Rational(digits)
        return self.group() if self.sees(r"[(\[{⦃⟨]") else self.name()

    def group(self):
        """Fences and what is between them. One item is itself, but a set of one stays a set."""
        opening = self.take(r"[(\[{⦃⟨]", needed=True)
        items = [] if opening != "{" and self.sees(CLOSING[opening]) else self.answer()
        fences = opening + self.take(CLOSING[opening], needed=True)
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
        name = command[1:] if command else self.take(NAMES + "|[a-zA-Z]", needed=True)
        if name in ("frac", "binom"):
            above, below = self.atom(r"\d"), self.atom(r"\d")
            return above * power(below) if name == "frac" else call("binomial", above, below)
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

    def root(self):
        degree = self.group() if self.sees(r"\[") else sympy.Integer(2)
        value, odd = self.atom(r"\d+"), degree.is_Rational and degree % 2 == 1
        sign = -1 if odd and value.is_scalar and value.is_negative else 1  # the real root of -8
        return power(value * sign, power(degree)) * sign

    def function(self, name: str):
        base = self.atom(r"\d+") if name == "log" and self.take("_") else None
        exponent = self.exponent() if self.take(r"\^") else sympy.S.One
        if self.sees(r"[({]"):
            value = self.group()
        else:  # \sin 2x \cos y: what is multiplied without a sign, up to the next function
            value = signed(self.take("-"), self.power())
            while self.sees(ATOM) and not self.sees(rf"\\?(?:{'|'.join(FUNCTIONS)})(?![a-zA-Z])"):
                value = value * self.power()
        value = call(FUNCTIONS[name], value)
        if name == "log":  # without a base it has two readings, natural and decimal
            value = value * power(call("log", base) if base else sympy.Symbol("#log"))
        return power(value, exponent)

    def matrix(self):
        body = self.take(r"\{((?:[pb]|small)?matrix|array)\}.*?\\end ?\{\2\}", needed=True)
        body = re.sub(r"^\{\w+\} ?(?:\{[lcr| ]*\})?|(?:\\\\)? ?\\end.*", "", body)
        rows = re.split(r"\\\\(?:\[[^\]]*\])?", body)
        rows = [[read(cell) for cell in row.split("&")] for row in rows]
        if len({len(row) for row in rows}) > 1 or not all(x.is_scalar for x in sum(rows, [])):
            raise Unreadable("not a matrix of numbers")
        return sympy.ImmutableMatrix(rows)


def read(text: str):
    """A normalised text -> expression, matrix or Node."""
    depth = itertools.accumulate((c in "([{⦃⟨") - (c in ")]}⦄⟩") for c in text)
    if max(depth, default=0) > MAX_NESTING or re.search(r"(?:\\[a-zA-Z]+ ?){21}", text):
        raise Unreadable("nested too deeply")
    parser = Parser(text)
    node = listed("", parser.answer())
    parser.take(r"\Z", needed=True)
    return node


def listed(kind: str, items: list):
    """A list or set: an item with ± is two; x = 1, x = 2 is 1, 2; a bare list of one is it."""
    sign, both = sympy.Symbol("#±"), (sympy.S.One, sympy.S.NegativeOne)
    items = [x.xreplace({sign: s}) for x in items for s in both[: 1 + (sign in x.free_symbols)]]
    names = {x.items[0] if x.kind == "=" else None for x in items if x.is_Relational}
    if len(items) > 1 and len(names) == 1 and None not in names and all(map(is_name, names)):
        items = [x.items[1] if x.is_Relational else x for x in items]
    return items[0] if kind == "" and len(items) == 1 else Node(kind, tuple(items))


def signed(sign: str | None, x):
    x = x * sympy.Symbol("#±") if sign in ("±", "∓") else x
    return -x if sign in ("-", "∓") else x


def power(base, exponent=None):
    exponent = sympy.S.NegativeOne if exponent is None else exponent
    if not (base.is_scalar and exponent.is_scalar) or base == 0 and not exponent.is_positive:
        raise Unreadable(f"({base})^({exponent})")
    number = base.as_coeff_Mul()[0]
    bits = number.p.bit_length() + number.q.bit_length() if number.is_Rational else 1
    bits *= 1 if exponent.is_Integer else 50  # sympy looks for factors of what is under a root
    return base ** bounded(exponent, min(MAX_EXPONENT, MAX_BITS / bits))


def call(name: str, *args):
    if not all(x.is_scalar for x in args) or len(args) != 1 + (name == "binomial"):
        raise Unreadable(f"{name} of {args}")
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
    ±[1/2, 2) that depends on its name: samples 0 and 1 are positive, 2 and 3 have opposite signs,
    4 to 7 are a thousand times as far out. A Float with no digits left is 0 as far as we look."""
    far, k = 1000 ** (k // NUM_SAMPLES), k % NUM_SAMPLES
    hashes = {s: zlib.crc32(s.name.encode("utf8", "replace")) for s in x.free_symbols}
    sizes = {s: sympy.Rational(50_000 + h * (k + 1) % 149_993, 100_000) for s, h in hashes.items()}
    point = {s: far * size * (-1) ** (k // 2 * (hashes[s] + k)) for s, size in sizes.items()}
    parts = x.evalf(50, subs=point, maxn=MAX_DIGITS).as_real_imag()
    if all(part.is_Number and part is not sympy.nan for part in parts):
        return tuple(x if x.is_comparable or not x.is_Float else sympy.S.Zero for x in parts)


def same(a, b) -> bool:
    """Whether two expressions or matrices have one value; where both are real, if anywhere."""
    if a.is_Matrix or b.is_Matrix:
        return a.is_Matrix and b.is_Matrix and a.shape == b.shape and all(map(same, a, b))
    gap = a - b
    if a == b or gap.is_Rational:
        return a == b and a is not sympy.nan
    parts = a.atoms(sympy.Pow, sympy.Function) | b.atoms(sympy.Pow, sympy.Function)
    steps = (sympy.Abs, sympy.floor, sympy.ceiling)  # |x - 5| is 5 - x near 0: look further out
    far = all(x.func in steps or x.is_Pow and x.exp.is_number for x in parts if x.free_symbols)
    samples = range(NUM_SAMPLES * (1 + far) if gap.free_symbols else 1)
    values = [v for v in ([numeric(x, k) for x in (a, b, gap)] for k in samples) if v[0] and v[1]]
    judged = [v for v in values if not v[0][1] and not v[1][1]]
    judged = judged or [v for v in values if v[0][1] and v[1][1]]
    return bool(judged) and all(v[2] == (0, 0) for v in judged)


# ---- the rules: each is one reason for which the answer a is the label g ----


def same_value(a, g) -> bool:
    r"""3\sqrt{13} is \sqrt{117}, 2(k+1) is 2k+2, matrices entry by entry. A mark that only one side
    has may take any of its meanings: 28% is 28 and 0.28, 70° is 70 and 7pi/18, 5 cm is 5, \log is
    \ln or \log_{10}. A base may be left out but not added, and 5 cm is not 5 m nor 5 cm^2."""
    if isinstance(a, Node) or isinstance(g, Node):
        return False
    if a.is_Symbol and g.is_Symbol and g.name in "ABCDE":  # choices
        return a.name.upper() == g.name
    mine, its = ({s.name for s in x.free_symbols if s.name[0] == "#"} for x in (a, g))
    mine, its = mine - its, its - mine
    units = [" ".join(m[6:] for m in marks if m.startswith("#unit")) for marks in (mine, its)]
    if all(units) or any(m[1] == "_" for m in mine):
        return False
    one, percent = sympy.S.One, sympy.Rational(1, 100)
    other = {"#%": percent, "#°": sympy.pi / 180, "#log": sympy.log(10)}
    letters = {s: one for s in a.free_symbols if UNITS.get(s.name) in units[1].split()}  # 5 m
    meanings = [[(sympy.Symbol(m), x) for x in {one, other.get(m, one)}] for m in mine | its]
    choices = [dict(choice) for choice in itertools.product(*meanings)]
    return any(same(a.xreplace(choice | letters), g.xreplace(choice)) for choice in choices)


def assigned(a, g) -> bool:
    """x = 5 is 5, (x, y) = (1, 2) is (1, 2), 2^3 = 8 is 8; 2x = 10 is not 10."""
    relation, other = (a, g) if a.is_Relational else (g, a)
    if relation.kind != "=" or other.is_Relational:
        return False
    left, right = relation.items
    matches = equal(right, g) if relation is a else equal(a, right)
    return matches and (is_name(left) or equal(left, right))


def is_name(node) -> bool:
    """x, x_1, AB (a length), or a tuple of such; not 2x."""
    parts = node.items if isinstance(node, Node) else sympy.Mul.make_args(node)
    return all(x.is_Symbol and (x.name.isupper() or not isinstance(node, sympy.Mul)) for x in parts)


def same_relation(a, g) -> bool:
    """y = 2x + 3 is 2x - y + 3 = 0, x > 3 is 2x > 6: what is compared differs by a factor."""
    if not (a.is_Relational and g.is_Relational and a.kind == g.kind):
        return False
    scalar = all(x.is_scalar for x in a.items + g.items)
    pairs = zip(a.kind, a.items, a.items[1:], g.items, g.items[1:])
    gaps = ((a0 - a1, g0 - g1, sign not in "=≠") for sign, a0, a1, g0, g1 in pairs)
    return all(map(equal, a.items, g.items)) or scalar and all(proportional(*x) for x in gaps)


def proportional(a, b, positive: bool) -> bool:
    values = [(numeric(a, k), numeric(b, k)) for k in range(NUM_SAMPLES)]
    factors = [x[0] / y[0] for x, y in values if x and y and x[1] == y[1] == 0]
    near = (x.is_finite and x != 0 and abs(x / factors[0] - 1) * 10**40 <= 1 for x in factors)
    return bool(factors) and all(near) and not (positive and factors[0] < 0)


def same_items(a, g) -> bool:
    """(1, 1/2) is (1, 0.5), item by item, and so is a bare list in the order of a tuple. -2, 1 is
    1, -2 with its repetitions; a set has none, and a set of one is its item. x > 3 is (3, oo), and
    x < 2 or x > 3 is (-oo,2) ∪ (3,oo) in any order."""
    if a.is_Relational != g.is_Relational:
        a, g = interval(a), interval(g)
    ones = [x.is_Relational or not isinstance(x, Node) for x in (a, g)]
    kinds = {"one" if one else x.kind for one, x in zip(ones, (a, g))}
    a, g = ((x,) if one else x.items for one, x in zip(ones, (a, g)))
    if all(ones) or "{}" not in kinds and len(a) != len(g):
        return False
    if "{}" not in kinds and all(map(equal, a, g)):
        return len(kinds) == 1 or kinds in ({"", "()"}, {"", "∪"})
    if not (kinds <= {"", "{}", "one"} or kinds <= {"", "∪"}):
        return False
    alike = [[(x.kind == "=") == (y.kind == "=") and equal(x, y) for y in g] for x in a]
    if "{}" in kinds:
        return all(map(any, alike)) and all(map(any, zip(*alike))) and bool(a) == bool(g)
    return all(alike.count(row) == sum(row) for row in alike)


def interval(x):
    """3 < x is (3, oo), -2 < x ≤ 3 is (-2, 3]: a chain round one name; what is none stays."""
    names = [item.is_Symbol for item in x.items] if x.is_Relational else []
    if sum(names) != 1 or not set(x.kind) <= set("<≤"):
        return x
    items, kind = (-sympy.oo, *x.items, sympy.oo), f"<{x.kind}<"
    i = 1 + names.index(True)
    return Node("(["[kind[i - 1] == "≤"] + ")]"[kind[i] == "≤"], (items[i - 1], items[i + 1]))


RULES = [same_value, assigned, same_relation, same_items]


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
    ignored = r"(?<![\d,])\s+|\s+(?![\d.])|(?<!\\)\{(\w)\}(?!\w)"  # x^{2} is x^2; 1 2 is not 12
    texts = [re.sub(ignored, r"\1", text) for text in texts]
    if not all(texts) or texts[0] == texts[1]:
        return all(texts)
    import sympy

    try:
        return equal(read(answer), read(gold))
    except (Unreadable, RecursionError, ArithmeticError, sympy.ShapeError):
        return False
