"""Reward: find the final answer in what the model wrote, decide whether it is the label."""

from __future__ import annotations

import re

# ---- find the final answer ----

TOOL_RESPONSE = re.compile(r"<tool_response>.*?(?:</tool_response>|\Z)", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
BARE = re.compile(r"[^\s{}$]+")


def extract_answer(text: str) -> str | None:
    """The content of the last box inside the last closed <answer>, or None.

    r"<answer>so \\boxed{\\frac{1}{2}}.</answer>" -> r"\\frac{1}{2}"
    """
    text = TOOL_RESPONSE.sub("", text)
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return last_box(text[start : text.index("</answer>", start)])


def last_box(text: str) -> str | None:
    r"""\boxed{1} or \boxed{\boxed{2}} -> "2"; \boxed 5. -> "5"; no closed box -> None."""
    found, pos = None, 0
    while box := BOX.search(text, pos):
        pos = box.end()
        if text[pos : pos + 1] != "{":
            bare = BARE.match(text, pos)
            found = bare.group().rstrip(".,;:") if bare else found
        elif (end := closing_brace(text, pos)) is not None:
            content = text[pos + 1 : end]
            inner = last_box(content) if BOX.match(content.strip()) else None
            found, pos = content.strip() if inner is None else inner, end + 1
    return found


def closing_brace(text: str, start: int) -> int | None:
    r"""Index of the } that closes the { at start; \{ and \} are characters, not braces."""
    depth, pos = 0, start
    while pos < len(text):
        depth += {"{": 1, "}": -1}.get(text[pos], 0)
        if depth == 0:
            return pos
        pos += 2 if text[pos] == "\\" else 1
    return None


# ---- integers, without the sandbox ----

SEPARATOR = r"(?:,|\{,\}|,?\\!\s?|\\[,;: ]|[ ~'_\u00a0\u2009\u202f])"
INTEGER = re.compile(
    rf"\s*\$?\s*([-+\u2212]?)\s*(?:\\\$)?\s*(\d{{1,3}}(?:{SEPARATOR}\d{{3}})+|\d+)(?:\.0*)?\s*\$?\.?\s*",
    re.ASCII,
)


def integer_verdict(answer: str, gold: str) -> bool | None:
    """Equal or not if both are plain integers, else None: ask is_equivalent in the sandbox."""
    a, g = integer(answer), integer(gold)
    return None if a is None or g is None else a == g


def integer(text: str) -> str | None:
    """Canonical digits: "+1,234." -> "1234", "-007" -> "-7". A string: int() stops at 4,300."""
    match = INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = re.sub(r"\D", "", match[2]).lstrip("0") or "0"
    return "-" + digits if match[1] in ("-", "\u2212") and digits != "0" else digits


# ---- equivalence ----


def is_equivalent(answer: str, gold: str) -> bool:
    """Whether the answer is the label. Any text in, a bool out."""
    verdict = integer_verdict(answer, gold)
    if verdict is not None:
        return verdict
    a, g = "".join(answer.split()), "".join(gold.split())
    return bool(a) and a == g
