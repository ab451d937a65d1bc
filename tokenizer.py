r"""Tokenizer: byte-level BPE, and `render_*`, the one place that turns messages into token ids.

    "Hi there"  --split-->  "Hi", " there"  --bytes, merges-->  [13048, 1052]

Byte-level BPE starts from the 256 byte values, so no text is unknown, and joins neighbours; the
merge learned first goes first. `train` learns merges by counting pairs; `from_file` reads a Hugging
Face `tokenizer.json` (Qwen2.5, Qwen3, what `save` wrote). Stages of `encode`:

    added tokens   cut out whole (`<|im_end|>`, `<tool_call>`). Those flagged *special* are control
                   tokens: `encode(text, special=False)` never yields one, whatever the text holds
    normaliser     NFC or none
    split          "qwen": words by the Qwen pattern, each digit alone, as in real models
                   "none": no words; merges may cross spaces, so a fixed phrase is few tokens (toy)
    merges         word by word, and remembered; a lone surrogate, not in UTF-8, becomes "?"

Letters and numbers are those that this Python's Unicode knows. Not here: offsets, padding, unigram.

Rendering (paper section 2.1, figures 2-3). A trajectory is ChatML; mask 1 is what the model wrote:

    <|im_start|>system\n...<|im_end|>\n<|im_start|>user\n...<|im_end|>\n    render_prompt          0
    <|im_start|>assistant\n<reason>                                         render_forced_prefix   0
    ...</reason>\n<tool_call>\n{...}\n</tool_call><|im_end|>                the model              1
    \n                                                                      render_separator       0
    <|im_start|>user\n<tool_response>\n...\n</tool_response><|im_end|>\n    render_tool_responses  0
    forced prefix and model again, until ...\boxed{42}</answer><|im_end|>

A rollout appends these pieces as they come and `render_conversation` (SFT) joins the very same
calls: equal text, equal ids. What stands between two control tokens is encoded in one go with
special=False: questions, tool output and data are not trusted. Figure 3 prints `<think>`; the
paper's traces and the release use `<reason>`. The release loses the newline after `<|im_end|>`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter, defaultdict
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import chain, groupby
from pathlib import Path
from types import SimpleNamespace
from unicodedata import category, normalize

# As in Qwen: a control token is special; a tag is one token too, but any text may hold it.
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# The printable character that stands for each byte in a file: 65 -> "A", 32 -> "Ġ" = chr(256 + 32).
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in PRINTABLE]
ALPHABET = [chr(b if b in PRINTABLE else 256 + HIDDEN.index(b)) for b in range(256)]
TO_LATIN1 = {ord(char): byte for byte, char in enumerate(ALPHABET)}
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_WORDS = {
    "type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated", "invert": False,
}  # fmt: skip
BYTE_LEVEL = {  # offsets are not kept here, so either value of trim_offsets will do
    "type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": True,
}  # fmt: skip
PRE_TOKENIZERS = {"none": [BYTE_LEVEL], "qwen": [QWEN_WORDS, BYTE_LEVEL]}
SUPPORTED = {  # fields of a tokenizer.json; with another value the ids would silently be others
    "truncation": (None,), "padding": (None,), "normalizer": (None, {"type": "NFC"}),
    "post_processor.type": (None, "ByteLevel"), "decoder.type": ("ByteLevel",),
    "model.type": ("BPE",), "model.dropout": (None, 0), "model.unk_token": (None, ""),
    "model.continuing_subword_prefix": (None, ""), "model.end_of_word_suffix": (None, ""),
    "model.byte_fallback": (None, False), "model.ignore_merges": (None, False),
}  # fmt: skip
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token: all false
MAX_WORDS = 1 << 16  # remembered; a real text of 2 MB has about 15,000 different ones


class Tokenizer:
    """vocab {token: id} and merges ("a b" or ["a", "b"]) are in the byte alphabet, added {content:
    id} is not. ValueError names what is wrong with them in the words of a tokenizer.json."""

    def __init__(self, vocab, merges, added, special, normalizer=None, split="none"):
        self.vocab, self.added, self.special = vocab, added, frozenset(special)
        self.normalizer, self.split = normalizer, split
        self.token_to_id = vocab | added
        ids = {id for id in self.token_to_id.values() if type(id) is int and id >= 0}
        own = len(ids) == len(self.token_to_id) and self.token_to_id == added | vocab
        require(own, "a token of model.vocab or added_tokens has no id of its own")
        require(vocab.keys() >= {*ALPHABET}, "model.vocab lacks bytes, so text would be lost")
        require(added.keys() >= {*CONTROL_TOKENS[1:]}, "added_tokens lack <|im_start|>, <|im_end|>")
        self.vocab_size = max(ids) + 1
        self.byte_ids = [vocab[char] for char in ALPHABET]
        self.merges = {}  # (left id, right id) -> (rank, merged id)
        for rank, merge in enumerate(merges):
            try:
                left, right = merge.split(" ") if isinstance(merge, str) else merge
                self.merges[vocab[left], vocab[right]] = rank, vocab[left + right]
            except (KeyError, TypeError, ValueError):
                problem = f"model.merges[{rank}] {merge!r} does not join two tokens of model.vocab"
                raise ValueError(problem) from None
        plain = {*self.byte_ids, *(id for _, id in self.merges.values())}
        unsafe = [token for token in special if added[token] in plain]
        require(not unsafe, f"added_tokens {unsafe} are special, but plain text can make them")
        in_bytes = lambda token: token.translate(TO_LATIN1).encode("latin-1", "replace")
        self.id_to_bytes = {id: in_bytes(token) for token, id in vocab.items()}
        self.id_to_bytes |= {id: content.encode() for content, id in added.items()}
        self.im_start, self.im_end = added["<|im_start|>"], added["<|im_end|>"]
        self.patterns = {True: any_of(added), False: any_of(added.keys() - self.special)}
        self.words = {}  # word -> ids

    def encode(self, text: str, special: bool = True) -> list[int]:
        """special=False: the text is not trusted, control tokens in it stay plain text."""
        token_ids = []
        for i, piece in enumerate(self.patterns[special].split(text)):
            token_ids += [self.added[piece]] if i % 2 else self.encode_words(piece)
        return token_ids  # subtle: the pattern is one group, so odd pieces are added tokens

    def encode_words(self, text: str) -> list[int]:
        words = split_words(normalize("NFC", text) if self.normalizer else text, self.split)
        if len(self.words) > MAX_WORDS:
            self.words = {}
        for word in set(words).difference(self.words):
            self.words[word] = self.merge(word.encode("utf-8", "replace"))
        return list(chain.from_iterable(map(self.words.__getitem__, words)))

    def merge(self, data: bytes) -> list[int]:
        """Applies the merge of lowest rank, the leftmost first, until there is none: O(n log n).

        Candidates wait in a heap over a linked list of tokens. -1 is an eaten token and the
        sentinel at both ends (the last index is also index -1); no merge has a -1 in it."""
        ids = [self.byte_ids[byte] for byte in data] + [-1]
        after = [*range(1, len(ids)), -1]
        before = list(range(-1, len(ids) - 1))
        entries = map(self.merges.get, zip(ids, ids[1:]))
        heap = [(*entry, i) for i, entry in enumerate(entries) if entry]  # (rank, merged id, index)
        heapify(heap)
        while heap:
            rank, merged, i = heappop(heap)
            j = after[i]
            if self.merges.get((ids[i], ids[j])) != (rank, merged):
                continue  # one of the two was merged since
            ids[i], ids[j] = merged, -1
            after[i] = after[j]
            before[after[i]] = i
            for left in (before[i], i):
                entry = self.merges.get((ids[left], ids[after[left]]))
                if entry:
                    heappush(heap, (*entry, left))
        return [id for id in ids if id != -1]

    def decode(self, token_ids) -> str:
        """Broken UTF-8 becomes U+FFFD. An id without a token (a padded embedding row) is ""."""
        data = b"".join([self.id_to_bytes.get(id, b"") for id in token_ids])
        return data.decode("utf-8", "replace")

    def stream(self) -> SimpleNamespace:
        """Decodes one sequence as it grows: .push(id) -> the text that is complete with this id;
        .push(None) ends it, and bytes that still wait for others become U+FFFD."""
        get, decoder = self.id_to_bytes.get, codecs.getincrementaldecoder("utf-8")("replace")
        return SimpleNamespace(push=lambda id: decoder.decode(get(id, b""), id is None))

    @classmethod
    def train(cls, texts, vocab_size, split="none"):
        """texts: segments. No token straddles two of them or an added token; no digit is merged.
        Ids: 256 bytes, what merges make (fewer if the texts have no more pairs), added tokens."""
        contents = CONTROL_TOKENS + TAG_TOKENS
        pattern, words = any_of(contents), Counter()
        for text in texts:
            for piece in pattern.split(text)[::2]:
                for word in split_words(piece, split):
                    words.update(re.findall(r"\d|\D+", word))
        vocab, merges = learn_merges(words, vocab_size - len(contents))
        added = {content: id for id, content in enumerate(contents, start=len(vocab))}
        normalizer = {"type": "NFC"} if split == "qwen" else None
        return cls(vocab, merges, added, CONTROL_TOKENS, normalizer, split)

    @classmethod
    def from_file(cls, path) -> Tokenizer:
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is missing: give the tokenizer.json of a model")
        try:
            return cls(*read_spec(json.loads(Path(path).read_bytes())))
        except ValueError as error:
            raise ValueError(f"{path} cannot be used: {error}") from None

    def save(self, path) -> None:
        """Beside it goes the tokenizer_config.json that transformers needs: without one it gives
        any Qwen folder the Qwen pattern, whatever the file says."""
        tokens = {id: token for token, id in self.vocab.items()}
        merges = [f"{tokens[a]} {tokens[b]}" for a, b in sorted(self.merges, key=self.merges.get)]
        flags = dict.fromkeys(FLAGS, False)
        added = [
            {"id": id, "content": content, "special": content in self.special, **flags}
            for content, id in self.added.items()
        ]
        spec = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": self.normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[self.split]},
            "post_processor": None, "decoder": BYTE_LEVEL,
            "model": {"type": "BPE", "vocab": self.vocab, "merges": merges},
        }  # fmt: skip
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        Path(path).write_text(json.dumps(spec, ensure_ascii=False, indent=1), encoding="utf-8")
        Path(path).with_name("tokenizer_config.json").write_text(json.dumps(config, indent=1))


def split_words(text: str, split: str) -> list[str]:
    if split == "none":
        return [text]
    return qwen_pattern(0x110000 if max(text, default="") > "\uffff" else 0x10000).findall(text)


@cache
def qwen_pattern(limit: int) -> re.Pattern:
    r"""QWEN_PATTERN for `re`, which lacks \p{L} and \p{N}, for text of characters below limit: `re`
    walks the ranges above U+FFFF one by one, so text without them is split five times faster.
    The class of white space is written out because the \s of `re` has U+001C to U+001F too."""

    def ranges(kind):
        runs = groupby(range(limit), lambda code: category(chr(code))[0] == kind)
        runs = [list(run) for inside, run in runs if inside]
        return "".join(f"\\U{run[0]:08x}-\\U{run[-1]:08x}" for run in runs)

    L, N = ranges("L"), ranges("N")
    S = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
    return re.compile(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n{L}{N}]?[{L}]+|[{N}]| ?[^{S}{L}{N}]+[\r\n]*"
        rf"|[{S}]*[\r\n]+|[{S}]+(?![^{S}])|[{S}]+"
    )


def any_of(contents) -> re.Pattern:
    """One group that matches any of the contents, the longest of those that fit."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def learn_merges(words: dict[str, int], vocab_size: int) -> tuple[dict, list[tuple[str, str]]]:
    """({"abab": 2, "ab": 1}, 258) -> (bytes and "ab", "abab"; [("a", "b"), ("ab", "ab")]).

    The most frequent pair first, on a tie the smaller; then only its words are counted again."""
    require(vocab_size >= 256, f"vocab_size: {vocab_size} without added tokens, but bytes need 256")
    counts = list(words.values())
    sequences = [[ALPHABET[byte] for byte in word.encode("utf-8", "replace")] for word in words]
    pair_counts, places = Counter(), defaultdict(set)  # pair -> indices of words that hold it
    for i, tokens in enumerate(sequences):
        for pair in zip(tokens, tokens[1:]):
            pair_counts[pair] += counts[i]
            places[pair].add(i)
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapify(heap)
    vocab, merges = {char: id for id, char in enumerate(ALPHABET)}, []
    while heap and len(vocab) < vocab_size:
        count, pair = heappop(heap)
        if -count != pair_counts[pair]:
            continue  # counted again since
        changes = Counter()
        for i in places.pop(pair):
            for changed in zip(sequences[i], sequences[i][1:]):
                changes[changed] -= counts[i]
            sequences[i] = replace_pair(sequences[i], pair)
            for changed in zip(sequences[i], sequences[i][1:]):
                changes[changed] += counts[i]
                places[changed].add(i)
        merges.append(pair)
        vocab["".join(pair)] = len(vocab)
        for changed, change in changes.items():
            pair_counts[changed] += change
            if change and pair_counts[changed] > 0:
                heappush(heap, (-pair_counts[changed], changed))
    return vocab, merges


def replace_pair(tokens: list[str], pair: tuple[str, str]) -> list[str]:
    """["a", "b", "c", "a", "b"], ("a", "b") -> ["ab", "c", "ab"]"""
    result = []
    for token in tokens:
        if result and (result[-1], token) == pair:
            result[-1] += token
        else:
            result.append(token)
    return result


def require(fine, problem: str) -> None:
    if not fine:
        raise ValueError(problem)


def read_spec(spec) -> tuple:
    """The arguments of Tokenizer; a field that is broken or not supported is named."""
    for name, values in SUPPORTED.items():
        value = field(spec, name)
        require(value in values, f"{name} {value!r} is not supported, only {list(values)}")
    steps = field(spec, "pre_tokenizer.pretokenizers")
    steps = steps if isinstance(steps, list) else [field(spec, "pre_tokenizer")]
    steps = [s | {"trim_offsets": True} if field(s, "type") == "ByteLevel" else s for s in steps]
    split = [name for name, known in PRE_TOKENIZERS.items() if steps == known]
    require(split, f"pre_tokenizer {steps} is not supported, only {PRE_TOKENIZERS}")
    rows = field(spec, "added_tokens", list)
    for i, row in enumerate(rows):
        content = field(row, "content")
        require(isinstance(content, str) and content, f"added_tokens[{i}] has no content")
        for flag in FLAGS:
            require(not row.get(flag), f"added_tokens[{i}].{flag} must be false to be supported")
    added = {row["content"]: row.get("id") for row in rows}
    special = [row["content"] for row in rows if row.get("special")]
    vocab, merges = field(spec, "model.vocab", dict), field(spec, "model.merges", list)
    return vocab, merges, added, special, field(spec, "normalizer"), split[0]


def field(spec, name: str, kind=object):
    """({"model": {"type": "BPE"}}, "model.type") -> "BPE"; None where there is none"""
    for key in name.split("."):
        spec = spec.get(key) if isinstance(spec, dict) else None
    require(isinstance(spec, kind), f"{name} is {spec!r:.40}, not a {kind.__name__}")
    return spec


# ---- messages to ids ----

SYSTEM_TEXT = (
    "This is a conversation between a user and an assistant. The user poses a problem, and the "
    "assistant solves it: it reasons inside <reason> </reason> and then gives the answer inside "
    "<answer> </answer>, like this: <reason> reasoning </reason> <answer> answer </answer>."
)
USER_TEMPLATE = (
    "Solve the problem; use the tool where it helps. Give the answer inside <answer> </answer>, "
    "with the final value in \\boxed{}.\n\n{question}"
)
PYTHON_TOOL = {"type": "function", "function": {
    "name": "execute_python_code_with_standard_io",
    "description": "Runs Python code in a fresh process and returns what it prints.",
    "parameters": {"type": "object", "properties": {
        "code": {"type": "string", "description": "The Python code to run."},
        "input": {"type": "string", "description": "What the code reads from stdin."},
    }, "required": ["code"]},
}}  # fmt: skip
TOOLS_TEXT = """# Tools\n
You may call one or more functions to assist with the user query.\n
You are provided with function signatures within <tools></tools> XML tags:
<tools>\n{signatures}\n</tools>\n
For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>"""  # Qwen's
STATUS_TEXT = {  # what the model reads where output and traceback do not say it
    "empty": "(no output)", "timeout": "(stopped: out of time)", "lost": "(the tool failed)",
    "memory": "(stopped: out of memory)", "output": "(stopped: too much output)",
}  # fmt: skip


def render_prompt(tok, question: str, system_text=SYSTEM_TEXT, tools=(PYTHON_TOOL,)) -> list[int]:
    """question: the whole user text (USER_TEMPLATE filled in). No system message if it is empty."""
    return render_system(tok, system_text, tools) + render_message(tok, "user", question)


def render_system(tok, system_text: str | None, tools=()) -> list[int]:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    tools_text = TOOLS_TEXT.replace("{signatures}", signatures) if tools else ""
    text = "\n\n".join(filter(None, (system_text, tools_text)))
    return render_message(tok, "system", text) if text else []


def render_message(tok, role: str, content: str) -> list[int]:
    body = tok.encode(f"{role}\n{content}", special=False)
    return [tok.im_start, *body, tok.im_end, *render_separator(tok)]


def render_separator(tok) -> list[int]:
    return tok.encode("\n")


def render_forced_prefix(tok, prefix: str = "<reason>") -> list[int]:
    """Opens a turn of the assistant; prefix="" is a model's own generation prompt."""
    return [tok.im_start, *tok.encode(f"assistant\n{prefix}", special=False)]


def render_tool_responses(tok, texts: list[str]) -> list[int]:
    """All responses of a turn are one user message."""
    blocks = [f"<tool_response>\n{text}\n</tool_response>" for text in texts]
    return render_message(tok, "user", "\n".join(blocks))


def tool_response_text(result, traceback_lines: int | None = None, max_chars: int = 2000) -> str:
    """What the model reads of a result: output, or a note that there is none; output and traceback;
    a note that a limit stopped it, without the output, which depends on the machine's speed.
    Addresses in a repr differ from run to run and are blanked."""
    stdout, stderr = result.stdout.rstrip("\n"), result.stderr.rstrip("\n")
    if result.status == "error" and traceback_lines:
        stderr = "\n".join(stderr.split("\n")[-traceback_lines:])
    parts = {"ok": [stdout], "error": [stdout, stderr], "malformed": [stderr], "refused": [stderr]}
    text = "\n".join(part for part in parts.get(result.status, []) if part)
    text = text or STATUS_TEXT.get(result.status, "(no output)")
    text = re.sub(r" at 0x[0-9a-f]{8,}>", " at 0x...>", text)
    if len(text) <= max_chars:
        return text
    head, tail = max_chars - max_chars // 2, len(text) - max_chars // 2
    return f"{text[:head]}\n... {tail - head} characters left out ...\n{text[tail:]}"


def render_conversation(tok, messages, system_text=None, tools=()):
    """[{"role": "user", "content": "2+2?"}, {"role": "assistant", ...}] -> (ids, loss_mask).

    An assistant's content is what follows the forced prefix, verbatim; one with loss=False is an
    example, mask 0. Tool messages in a row are one user message."""
    pieces = [(render_system(tok, system_text, tools), 0)]  # (ids, mask)
    for role, run in groupby(messages, key=lambda message: message["role"]):
        if role == "tool":
            pieces.append((render_tool_responses(tok, [m["content"] for m in run]), 0))
        elif role == "user":
            pieces += [(render_message(tok, role, m["content"]), 0) for m in run]
        else:
            require(role == "assistant", f"a message has role {role!r}")
            for m in run:
                written = tok.encode(m["content"], special=False) + [tok.im_end]
                pieces.append((render_forced_prefix(tok), 0))
                pieces.append((written, int(m.get("loss", True))))
                pieces.append((render_separator(tok), 0))
    if messages and messages[-1]["role"] == "assistant":
        pieces.pop()  # a rollout ends at <|im_end|>
    return [id for ids, _ in pieces for id in ids], [mask for ids, mask in pieces for _ in ids]
