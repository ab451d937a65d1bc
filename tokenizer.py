r"""Tokenizer: byte-level BPE, and `render_*`, the one place that turns messages into token ids.

    "Hi there"  --split-->  "Hi", " there"  --bytes, merges-->  [13048, 1052]

Byte-level BPE starts from the 256 byte values, so no text is unknown, and joins neighbours: the
merge that was learned first goes first. `Tokenizer.train` learns merges by counting pairs,
`Tokenizer.from_file` reads those of a Hugging Face `tokenizer.json` (Qwen2.5, Qwen3, or what `save`
wrote). Before merging, a text goes through three stages, as the file says:

    added tokens   cut out whole (`<|im_end|>`, `<tool_call>`); those flagged *special* are control
                   tokens: `encode(text, special=False)` never yields one, whatever the text holds
    normaliser     NFC or none
    split          "qwen": words by the Qwen pattern, each digit alone
                   "none": no words; merges may cross spaces, so a fixed phrase is few tokens (toy)

Letters and numbers of the pattern come from `unicodedata`: a character newer than this Python's
Unicode tables is neither. Lone surrogates, which UTF-8 cannot hold, are encoded as "?".

Rendering (paper section 2.1, figures 2-3). A trajectory is ChatML; mask 1 is what the model wrote:

    <|im_start|>system\n...<|im_end|>\n<|im_start|>user\n...<|im_end|>\n    render_prompt          0
    <|im_start|>assistant\n<reason>                                         render_forced_prefix   0
    ...</reason>\n<tool_call>\n{...}\n</tool_call><|im_end|>                the model              1
    \n                                                                      render_separator       0
    <|im_start|>user\n<tool_response>\n...\n</tool_response><|im_end|>\n    render_tool_responses  0
    <|im_start|>assistant\n<reason>                                         render_forced_prefix   0
    ...</reason>\n<answer>\boxed{42}</answer><|im_end|>                     the model              1

A rollout appends these pieces as they come, and `render_conversation` (SFT) concatenates the very
same calls, so equal text is equal ids; history is never decoded and encoded again. What stands
between two control tokens is encoded in one go with special=False: questions, tool output and data
are not trusted. Figure 3 prints the forced prefix as `<think>`; the paper's traces and the release
use `<reason>`. The release loses the newline after `<|im_end|>`; here it is render_separator.

Not here: parsing calls (rollout.py), other model types, padding, truncation, offsets.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import chain, groupby
from pathlib import Path

# As in Qwen: control tokens are special; a tag is one token too, but any text may contain it.
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
WORDS = {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated"}
PRE_TOKENIZERS = {
    "none": BYTE_LEVEL,
    "qwen": {"type": "Sequence", "pretokenizers": [WORDS | {"invert": False}, BYTE_LEVEL]},
}
# What the fields of a tokenizer.json may be: anything else would silently give other ids.
SUPPORTED = {
    "truncation": (None,),
    "padding": (None,),
    "normalizer": (None, {"type": "NFC"}),
    "model.type": ("BPE",),
    "model.dropout": (None, 0),
    "model.unk_token": (None, ""),
    "model.continuing_subword_prefix": (None, ""),
    "model.end_of_word_suffix": (None, ""),
    "model.byte_fallback": (None, False),
    "model.ignore_merges": (None, False),
}
CACHE_CHARS = 1 << 24  # memoised words are forgotten when they hold this many characters


@dataclass(frozen=True)
class AddedToken:
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False  # looked for after the normaliser instead of before
    special: bool = False


class Tokenizer:
    """vocab {token: id} and merges [(left, right)], both in the byte alphabet of tokenizer.json."""

    def __init__(self, vocab, merges, added=(), normalizer=None, split="none"):
        check_added(vocab, merges, added)
        self.vocab, self.added, self.normalizer, self.split = vocab, tuple(added), normalizer, split
        self.token_to_id = vocab | {t.content: t.id for t in added}
        self.vocab_size = max(self.token_to_id.values()) + 1
        self.merges = {  # (left id, right id) -> (rank, merged id)
            (vocab[left], vocab[right]): (rank, vocab[left + right])
            for rank, (left, right) in enumerate(merges)
        }
        self.byte_ids = [vocab[char] for char in byte_alphabet()]
        self.id_to_bytes = {id: token_bytes(token) for token, id in vocab.items()}
        self.id_to_bytes |= {t.id: t.content.encode() for t in added}
        self.added_ids = {
            self.normalise(t.content) if t.normalized else t.content: t.id for t in added
        }
        self.added_patterns = {True: [], False: []}  # special -> [before, after the normaliser]
        for special, normalized in ((True, False), (True, True), (False, False), (False, True)):
            allowed = (t for t in added if t.normalized == normalized and special >= t.special)
            contents = (self.normalise(t.content) if normalized else t.content for t in allowed)
            self.added_patterns[special].append(any_of(contents))
        self.words, self.cached_chars = {}, 0  # word -> ids

    # ---- text to ids ----

    def encode(self, text: str, special: bool = True) -> list[int]:
        """special=False: text is not trusted, so control tokens in it stay plain text."""
        before, after = self.added_patterns[special]
        token_ids = []
        for i, piece in enumerate(before.split(text)):
            if i % 2:  # the pattern is one group: every second piece is an added token
                token_ids.append(self.added_ids[piece])
                continue
            for j, part in enumerate(after.split(self.normalise(piece))):
                token_ids += [self.added_ids[part]] if j % 2 else self.encode_plain(part)
        return token_ids

    def encode_plain(self, text: str) -> list[int]:
        """No added tokens in it. Each word is merged once and then remembered."""
        words = self.split_words(text)
        unseen = set(words).difference(self.words)
        self.cached_chars += sum(map(len, unseen))
        if self.cached_chars > CACHE_CHARS:
            self.words, self.cached_chars, unseen = {}, 0, set(words)
        for word in unseen:
            self.words[word] = self.merge(word.encode("utf-8", "replace"))
        return list(chain.from_iterable(map(self.words.__getitem__, words)))

    def normalise(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self.normalizer else text

    def split_words(self, text: str) -> list[str]:
        if self.split == "none" or not text:
            return [text] if text else []
        top = ord(max(text))
        limit = next(limit for limit in (0x80, 0x10000, 0x110000) if top < limit)
        return qwen_pattern(limit).findall(text)

    def merge(self, data: bytes) -> list[int]:
        """Applies the merge of lowest rank, the leftmost first, until there is none: O(n log n).

        Candidates wait in a heap over a linked list of tokens; -1 is an eaten token, and the
        sentinel at both ends (index n, which is also index -1). No merge has a -1 in it.
        """
        ids = [self.byte_ids[byte] for byte in data] + [-1]
        after, before = list(range(1, len(ids) + 1)), list(range(-1, len(ids) - 1))
        after[-1] = -1
        pairs = map(self.merges.get, zip(ids, ids[1:]))
        heap = [(*entry, i) for i, entry in enumerate(pairs) if entry]  # (rank, merged id, index)
        heapify(heap)
        while heap:
            rank, merged, i = heappop(heap)
            j = after[i]
            if self.merges.get((ids[i], ids[j])) != (rank, merged):
                continue  # one of the two has been merged since
            ids[i], ids[j] = merged, -1
            after[i] = after[j]
            before[after[i]] = i
            for left in (before[i], i):
                entry = self.merges.get((ids[left], ids[after[left]]))
                if entry:
                    heappush(heap, (*entry, left))
        return [id for id in ids if id != -1]

    # ---- ids to text ----

    def decode(self, token_ids) -> str:
        """Broken UTF-8 becomes U+FFFD; an id that has no token (a padded embedding row) is ""."""
        data = b"".join([self.id_to_bytes.get(id, b"") for id in token_ids])
        return data.decode("utf-8", "replace")

    def stream(self) -> Stream:
        return Stream(self.id_to_bytes)

    @property
    def im_start(self) -> int:
        return self.control_id("<|im_start|>")

    @property
    def im_end(self) -> int:
        return self.control_id("<|im_end|>")

    def control_id(self, content: str) -> int:
        if content not in self.added_ids:
            raise ValueError(f"the tokenizer has no added token {content}: ChatML needs one")
        return self.added_ids[content]

    # ---- learning ----

    @classmethod
    def train(cls, texts, vocab_size, special_tokens=CONTROL_TOKENS, split="none", tags=TAG_TOKENS):
        """texts: segments; no token straddles two of them, nor an added token. A digit is never
        merged. Ids: 256 bytes, merges in the order learned, added tokens."""
        num_merges = vocab_size - 256 - len(special_tokens) - len(tags)
        assert num_merges >= 0, f"vocab_size {vocab_size} is less than bytes and added tokens"
        alphabet = byte_alphabet()
        untrained = cls({char: i for i, char in enumerate(alphabet)}, [], split=split)
        added_pattern, counts = any_of([*special_tokens, *tags]), Counter()
        for text in texts:
            for piece in added_pattern.split(text)[::2]:
                words = untrained.split_words(piece)
                counts.update(chain.from_iterable(re.findall(r"\d|\D+", word) for word in words))
        tokens, merges = alphabet, []
        for left, right in learn_merges(counts, num_merges):
            merges.append((tokens[left], tokens[right]))
            tokens.append(tokens[left] + tokens[right])
        added = [
            AddedToken(id, content, special=content in special_tokens)
            for id, content in enumerate([*special_tokens, *tags], start=len(tokens))
        ]
        normalizer = {"type": "NFC"} if split == "qwen" else None
        return cls({token: i for i, token in enumerate(tokens)}, merges, added, normalizer, split)

    # ---- tokenizer.json ----

    @classmethod
    def from_file(cls, path) -> Tokenizer:
        path = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: give a tokenizer.json or its folder")
        try:
            return cls(*read_spec(json.loads(path.read_bytes())))
        except ValueError as error:
            raise ValueError(f"{path} cannot be used: {error}") from None

    def save(self, path) -> None:
        id_to_token = {id: token for token, id in self.vocab.items()}
        merges = [f"{id_to_token[left]} {id_to_token[right]}" for left, right in self.merges]
        model = {"type": "BPE", "vocab": self.vocab, "merges": merges}
        spec = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [asdict(token) for token in self.added],
            "normalizer": self.normalizer,
            "pre_tokenizer": PRE_TOKENIZERS[self.split],
            "post_processor": None,
            "decoder": BYTE_LEVEL,
            "model": model,
        }
        Path(path).write_text(json.dumps(spec, ensure_ascii=False, indent=1), encoding="utf-8")


class Stream:
    """Decodes one sequence as it grows: a character comes out with its last byte."""

    def __init__(self, id_to_bytes: dict[int, bytes]):
        self.id_to_bytes = id_to_bytes
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self.decoder.decode(self.id_to_bytes.get(token_id, b""))

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


@cache
def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a file: 65 -> "A", 32 -> "Ġ"."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


@cache
def char_to_byte() -> dict[str, int]:
    return {char: byte for byte, char in enumerate(byte_alphabet())}


def token_bytes(token: str) -> bytes:
    try:
        return bytes(map(char_to_byte().__getitem__, token))
    except KeyError:  # not in the byte alphabet: an added token that stands in the vocabulary too
        return token.encode("utf-8", "replace")


@cache
def qwen_pattern(limit: int) -> re.Pattern:
    r"""QWEN_PATTERN for `re`, which lacks \p{L} and \p{N}, for text of characters below limit.

    Short classes are fast: `re` walks the ranges above U+FFFF one by one. Its \s is not Unicode's
    White_Space either: it has U+001C to U+001F, so the class is written out.
    """

    def char_class(kind):
        runs = groupby(range(limit), lambda code: unicodedata.category(chr(code))[0] == kind)
        runs = [list(run) for inside, run in runs if inside]
        return "".join(f"\\U{run[0]:08x}-\\U{run[-1]:08x}" for run in runs)

    L, N = char_class("L"), char_class("N")
    S = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
    return re.compile(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n{L}{N}]?[{L}]+|[{N}]| ?[^{S}{L}{N}]+[\r\n]*"
        rf"|[{S}]*[\r\n]+|[{S}]+(?![^{S}])|[{S}]+"
    )


def any_of(contents) -> re.Pattern:
    """One group that finds any of the contents, the longest where several begin."""
    choices = sorted(contents, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, choices)) or '(?!)'})")


def learn_merges(words: Counter, num_merges: int) -> list[tuple[int, int]]:
    """{"abab": 2, "ab": 1} -> [(97, 98), (256, 256)]. The most frequent pair, the smaller ids on a
    tie; after a merge only the words that hold the pair are counted again."""
    counts = list(words.values())
    sequences = [list(word.encode("utf-8", "replace")) for word in words]
    pair_counts, places = Counter(), defaultdict(set)  # pair -> indices of words that hold it
    for i, ids in enumerate(sequences):
        for pair in zip(ids, ids[1:]):
            pair_counts[pair] += counts[i]
            places[pair].add(i)
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapify(heap)
    merges = []
    while heap and len(merges) < num_merges:
        count, pair = heappop(heap)
        if -count != pair_counts[pair]:
            continue  # counted again since
        changes = Counter()
        for i in places.pop(pair):
            old = sequences[i]
            new = sequences[i] = replace_pair(old, pair, 256 + len(merges))
            for changed in zip(old, old[1:]):
                changes[changed] -= counts[i]
            for changed in zip(new, new[1:]):
                changes[changed] += counts[i]
                places[changed].add(i)
        merges.append(pair)
        for changed, change in changes.items():
            pair_counts[changed] += change
            if change and pair_counts[changed] > 0:
                heappush(heap, (-pair_counts[changed], changed))
    return merges


def replace_pair(ids: list[int], pair: tuple[int, int], merged: int) -> list[int]:
    """[1, 2, 3, 1, 2], (1, 2), 4 -> [4, 3, 4]"""
    result, i = [], 0
    while i < len(ids):
        found = ids[i] == pair[0] and i + 1 < len(ids) and ids[i + 1] == pair[1]
        result.append(merged if found else ids[i])
        i += 2 if found else 1
    return result


# ---- reading a tokenizer.json ----


def read_spec(spec) -> tuple:
    """Arguments of Tokenizer. A field that is not supported raises ValueError with its name."""
    require(isinstance(spec, dict), "it is not a JSON object")
    model = spec.get("model")
    require(isinstance(model, dict), "model is missing")
    for field, values in SUPPORTED.items():
        value = (model if "." in field else spec).get(field.removeprefix("model."))
        require(value in values, f"{field} {value!r} is not supported, only {list(values)}")
    pre_tokenizer = without_offsets(spec.get("pre_tokenizer"))
    split = [n for n, known in PRE_TOKENIZERS.items() if without_offsets(known) == pre_tokenizer]
    require(split, f"pre_tokenizer {pre_tokenizer!r} is not supported, only {PRE_TOKENIZERS}")
    for field, known in (("post_processor", (None, "ByteLevel")), ("decoder", ("ByteLevel",))):
        kind = (spec.get(field) or {}).get("type")
        require(kind in known, f"{field}.type {kind!r} is not supported, only {list(known)}")
    vocab = read_vocab(model.get("vocab"))
    merges = [read_merge(i, merge, vocab) for i, merge in enumerate(model.get("merges") or [])]
    added = [read_added(i, row) for i, row in enumerate(spec.get("added_tokens") or [])]
    return vocab, merges, added, spec.get("normalizer"), split[0]


def require(fine, problem: str) -> None:
    if not fine:
        raise ValueError(problem)


def without_offsets(spec):
    """trim_offsets moves character offsets, which are not kept here; ids do not depend on it."""
    if isinstance(spec, list):
        return [without_offsets(part) for part in spec]
    if isinstance(spec, dict):
        return {key: without_offsets(v) for key, v in spec.items() if key != "trim_offsets"}
    return spec


def read_vocab(vocab) -> dict[str, int]:
    require(isinstance(vocab, dict), "model.vocab is not an object of token: id")
    ids = set(vocab.values())
    require(all(type(id) is int and id >= 0 for id in ids), "model.vocab has an id that is no id")
    require(len(ids) == len(vocab), "model.vocab gives one id to two tokens")
    missing = [char for char in byte_alphabet() if char not in vocab]
    require(not missing, f"model.vocab lacks the bytes {missing[:8]}: not all text can be encoded")
    return vocab


def read_merge(i: int, merge, vocab) -> tuple[str, str]:
    """ "a b" in older files, ["a", "b"] in newer ones"""
    pair = merge.split(" ") if isinstance(merge, str) else merge
    whole = isinstance(pair, list) and len(pair) == 2 and all(isinstance(p, str) for p in pair)
    require(whole, f"model.merges[{i}] is {merge!r}, not a pair of tokens")
    for token in (*pair, "".join(pair)):
        require(token in vocab, f"model.merges[{i}] needs {token!r}, which is not in model.vocab")
    return tuple(pair)


def read_added(i: int, row) -> AddedToken:
    try:
        token = AddedToken(**row)
    except TypeError as error:
        raise ValueError(f"added_tokens[{i}] is {row!r}: {error}") from None
    whole = type(token.id) is int and token.id >= 0 and isinstance(token.content, str)
    require(whole and token.content, f"added_tokens[{i}] needs an id and a content, not {row!r}")
    for field in ("single_word", "lstrip", "rstrip"):
        require(not getattr(token, field), f"added_tokens[{i}].{field} is not supported")
    return token


def check_added(vocab, merges, added) -> None:
    """Ids agree with the vocabulary, and no merge builds a control token out of plain text."""
    owners = {id: token for token, id in vocab.items()}
    plain = {*byte_alphabet(), *map("".join, merges)}
    for i, token in enumerate(added):
        same = owners.setdefault(token.id, token.content) == token.content
        same = same and vocab.get(token.content, token.id) == token.id
        require(same, f"added_tokens[{i}] {token.content!r} and another token share an id")
        safe = not (token.special and token.content in plain)
        require(safe, f"added_tokens[{i}] {token.content!r} is special, but merges can build it")


# ---- messages to ids ----

SYSTEM_TEXT = (
    "This is a conversation between a user and an assistant. The user poses a problem and the "
    "assistant solves it. The assistant first reasons inside <reason> </reason> and then gives "
    "the user the answer inside <answer> </answer>, like this: <reason> reasoning </reason> "
    "<answer> answer </answer>."
)
USER_TEMPLATE = (
    "Solve the problem below; use the tool where it helps. Give your answer inside "
    "<answer> </answer> and put the final value into \\boxed{}.\n\n{question}"
)
PYTHON_TOOL = {
    "type": "function",
    "function": {
        "name": "execute_python_code_with_standard_io",
        "description": "Runs Python code in a fresh process and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "The Python code to run."},
                "input": {"type": "string", "description": "What the code reads from stdin."},
            },
            "required": ["code"],
        },
    },
}
TOOLS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""  # the form that Qwen's own chat template has

FORCED_PREFIX = "<reason>"
STATUS_TEXT = {  # what the model reads where stdout and traceback do not say it
    "empty": "The code ran and printed nothing.",
    "timeout": "Timed out: the code did not finish in time.",
    "memory": "Out of memory: the code was stopped.",
    "output": "Too much output: the code was stopped.",
    "lost": "The tool failed, not the code. Try again.",
}


def render_prompt(
    tok, question: str, system_text=SYSTEM_TEXT, tools=(PYTHON_TOOL,), user_template=USER_TEMPLATE
) -> list[int]:
    """System message (none if there is nothing to say in it) and user message."""
    user = user_template.replace("{question}", question)
    return render_system(tok, system_text, tools) + render_message(tok, "user", user)


def render_system(tok, system_text: str | None, tools=()) -> list[int]:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    tools_text = TOOLS_TEXT.replace("{signatures}", signatures) if tools else ""
    text = "\n\n".join(part for part in (system_text, tools_text) if part)
    return render_message(tok, "system", text) if text else []


def render_message(tok, role: str, content: str) -> list[int]:
    body = tok.encode(f"{role}\n{content}", special=False)
    return [tok.im_start, *body, tok.im_end, *render_separator(tok)]


def render_separator(tok) -> list[int]:
    return tok.encode("\n")


def render_forced_prefix(tok, prefix: str = FORCED_PREFIX) -> list[int]:
    """Opens an assistant turn. prefix="" is a model's own form, the generation prompt."""
    return [tok.im_start, *tok.encode(f"assistant\n{prefix}", special=False)]


def render_tool_responses(tok, texts: list[str]) -> list[int]:
    """All responses of a turn are one user message."""
    blocks = [f"<tool_response>\n{text}\n</tool_response>" for text in texts]
    return render_message(tok, "user", "\n".join(blocks))


def tool_response_text(result, traceback_lines: int | None = None, max_chars: int = 2000) -> str:
    """What the model reads of a result (fields status, stdout, stderr): one of four kinds.

    Output; a note that there was none; output and traceback; a note that a limit stopped it (with
    no output, which would depend on the machine's speed). malformed and refused carry their message
    in stderr. Addresses in a repr differ from run to run and are blanked.
    """
    stdout, stderr = result.stdout.rstrip("\n"), result.stderr.rstrip("\n")
    if traceback_lines is not None and result.status == "error":
        stderr = "\n".join(stderr.split("\n")[-traceback_lines:])
    parts = {"ok": [stdout], "error": [stdout, stderr]}.get(result.status, [])
    if result.status in ("malformed", "refused"):
        parts = [stderr]
    text = "\n".join(part for part in parts if part) or STATUS_TEXT.get(result.status, "")
    return cut_middle(re.sub(r" at 0x[0-9a-f]{8,}>", " at 0x...>", text), max_chars)


def cut_middle(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    head, tail = max_chars - max_chars // 2, max_chars // 2
    marker = f"\n... {len(text) - max_chars} characters left out ...\n"
    return text[:head] + marker + text[len(text) - tail :]


def render_conversation(
    tok, messages: list[dict], system_text=None, tools=(), prefix: str = FORCED_PREFIX
) -> tuple[list[int], list[int]]:
    """[{"role": "user", "content": "2+2?"}, {"role": "assistant", ...}] -> (ids, loss_mask).

    Made of the calls that a rollout makes. An assistant's content is what follows the forced
    prefix, verbatim; its <|im_end|> has loss; tool messages in a row are one user message. A first
    message of role system takes the place of system_text.
    """
    if messages and messages[0]["role"] == "system":
        system_text, messages = messages[0]["content"], messages[1:]
    pieces = [(render_system(tok, system_text, tools), 0)]  # (ids, mask)
    for role, run in groupby(messages, key=lambda message: message["role"]):
        contents = [message["content"] for message in run]
        if pieces[-1][1]:
            pieces.append((render_separator(tok), 0))
        if role == "tool":
            pieces.append((render_tool_responses(tok, contents), 0))
        elif role == "user":
            pieces += [(render_message(tok, "user", content), 0) for content in contents]
        elif role == "assistant" and len(contents) == 1:
            written = [*tok.encode(contents[0], special=False), tok.im_end]
            pieces += [(render_forced_prefix(tok, prefix), 0), (written, 1)]
        else:
            raise ValueError(f"{len(contents)} messages of role {role!r} in a row: one at a time")
    token_ids = [id for ids, _ in pieces for id in ids]
    return token_ids, [mask for ids, mask in pieces for _ in ids]


def render_chat(tok, messages: list[dict], system_text=None, tools=()) -> list[int]:
    """A model's own ChatML, to evaluate models that were not trained here: no forced prefix, and
    the generation prompt at the end."""
    token_ids, _ = render_conversation(tok, messages, system_text, tools, prefix="")
    separator = render_separator(tok) if messages[-1]["role"] == "assistant" else []
    return token_ids + separator + render_forced_prefix(tok, prefix="")
