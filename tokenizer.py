r"""Tokenizer: byte-level BPE, and `render_*`, the one place that turns messages into token ids.

    "Hi there"  --split-->  "Hi", " there"  --bytes, merges-->  [13048, 1052]

Byte-level BPE starts from the 256 byte values, so no text is unknown, and joins neighbours; the
merge learned first goes first. `train` learns merges by counting pairs; `from_file` reads those of
a Hugging Face `tokenizer.json` (Qwen2.5, Qwen3, what `save` wrote) and gives the ids that the
tokenizers package gives. Stages of `encode`:

    added tokens   cut out whole (`<|im_end|>`, `<tool_call>`). Those flagged *special* are control
                   tokens: `encode(text, special=False)` never yields one, whatever the text holds
    normaliser     NFC or none
    split          "qwen": words by the Qwen pattern, each digit alone, as every real model has it
                   "none": no words; merges may cross spaces, so a fixed phrase is few tokens (toy)
    merges         word by word, and remembered

Letters and numbers of the pattern are those of this Python's `unicodedata`; a character that is
newer is neither. A lone surrogate, which UTF-8 cannot hold, becomes "?".

Rendering (paper section 2.1, figures 2-3). A trajectory is ChatML; mask 1 is what the model wrote:

    <|im_start|>system\n...<|im_end|>\n<|im_start|>user\n...<|im_end|>\n    render_prompt          0
    <|im_start|>assistant\n<reason>                                         render_forced_prefix   0
    ...</reason>\n<tool_call>\n{...}\n</tool_call><|im_end|>                the model              1
    \n                                                                      render_separator       0
    <|im_start|>user\n<tool_response>\n...\n</tool_response><|im_end|>\n    render_tool_responses  0
    <|im_start|>assistant\n<reason>                                         render_forced_prefix   0
    ...</reason>\n<answer>\boxed{42}</answer><|im_end|>                     the model              1

A rollout appends these pieces as they come and `render_conversation` (SFT) joins the very same
calls: equal text, equal ids. History is never encoded again. What stands between two control tokens
is encoded in one go with special=False: questions, tool output and data are not trusted. Figure 3
prints `<think>`; the paper's traces and the release use `<reason>`. The release loses the newline
after `<|im_end|>`. Not here: parsing calls (rollout.py), other model types, offsets, padding.
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
QWEN_WORDS = {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}}
QWEN_WORDS |= {"behavior": "Isolated", "invert": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
BYTE_LEVEL |= {"trim_offsets": True}  # offsets are not kept here, so either value will do
PRE_TOKENIZERS = {"none": [BYTE_LEVEL], "qwen": [QWEN_WORDS, BYTE_LEVEL]}
SUPPORTED = {  # fields of a tokenizer.json; with another value the ids would silently be others
    "truncation": (None,), "padding": (None,), "normalizer": (None, {"type": "NFC"}),
    "post_processor.type": (None, "ByteLevel"), "decoder.type": ("ByteLevel",),
    "model.type": ("BPE",), "model.dropout": (None, 0), "model.unk_token": (None, ""),
    "model.continuing_subword_prefix": (None, ""), "model.end_of_word_suffix": (None, ""),
    "model.byte_fallback": (None, False), "model.ignore_merges": (None, False),
}  # fmt: skip
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token: all false
MAX_CACHE = 1 << 24  # characters of remembered words


class Tokenizer:
    """vocab {token: id} and merges [(left, right)] in the byte alphabet, added {content: id}."""

    def __init__(self, vocab, merges, added, special, normalizer=None, split="none"):
        self.vocab, self.added, self.special = vocab, added, frozenset(special)
        self.normalizer, self.split = normalizer, split
        self.merges = {  # (left id, right id) -> (rank, merged id)
            (vocab[left], vocab[right]): (rank, vocab[left + right])
            for rank, (left, right) in enumerate(merges)
        }
        self.byte_ids = [vocab[char] for char in ALPHABET]
        self.token_to_id = vocab | added
        self.vocab_size = max(self.token_to_id.values()) + 1
        self.id_to_bytes = {
            id: token.translate(TO_LATIN1).encode("latin-1", "replace")
            for token, id in vocab.items()
        } | {id: content.encode() for content, id in added.items()}
        for token in CONTROL_TOKENS[1:]:
            require(token in added, f"added_tokens lacks {token}: the protocol is ChatML")
        self.im_start, self.im_end = added["<|im_start|>"], added["<|im_end|>"]
        self.patterns = {True: any_of(added), False: any_of(added.keys() - self.special)}
        self.words, self.num_cached = {}, 0  # word -> ids; characters in it

    # ---- text to ids ----

    def encode(self, text: str, special: bool = True) -> list[int]:
        """special=False: the text is not trusted, control tokens in it stay plain text."""
        token_ids = []
        for i, piece in enumerate(self.patterns[special].split(text)):
            token_ids += [self.added[piece]] if i % 2 else self.encode_words(piece)
        return token_ids  # subtle: the pattern is one group, so odd pieces are added tokens

    def encode_words(self, text: str) -> list[int]:
        words = split_words(normalize("NFC", text) if self.normalizer else text, self.split)
        unseen = set(words).difference(self.words)
        self.num_cached += sum(map(len, unseen))
        if self.num_cached > MAX_CACHE:
            self.words, self.num_cached, unseen = {}, 0, set(words)
        for word in unseen:
            self.words[word] = self.merge(word.encode("utf-8", "replace"))
        return list(chain.from_iterable(map(self.words.__getitem__, words)))

    def merge(self, data: bytes) -> list[int]:
        """Applies the merge of lowest rank, the leftmost first, until there is none: O(n log n).

        Candidates wait in a heap over a linked list of tokens. -1 is an eaten token and the
        sentinel at both ends (the last index is also index -1); no merge has a -1 in it.
        """
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

    # ---- ids to text ----

    def decode(self, token_ids) -> str:
        """Broken UTF-8 becomes U+FFFD. An id without a token (a padded embedding row) is ""."""
        data = b"".join([self.id_to_bytes.get(id, b"") for id in token_ids])
        return data.decode("utf-8", "replace")

    def stream(self) -> Stream:
        return Stream(self.id_to_bytes)

    # ---- learning, loading, saving ----

    @classmethod
    def train(cls, texts, vocab_size, special_tokens=CONTROL_TOKENS, split="none", tags=TAG_TOKENS):
        """texts: segments. No token straddles two of them or an added token; no digit is merged.
        Ids: 256 bytes, merges as learned (fewer if the texts have no more pairs), added tokens."""
        added = [*special_tokens, *tags]
        num_merges = vocab_size - 256 - len(added)
        require(num_merges >= 0, f"vocab_size {vocab_size} is less than bytes and added tokens")
        counts, tokens, merges = Counter(), list(ALPHABET), []
        for text in texts:
            for piece in any_of(added).split(text)[::2]:
                for word in split_words(piece, split):
                    counts.update(re.findall(r"\d|\D+", word))
        for left, right in learn_merges(counts, num_merges):
            merges.append((tokens[left], tokens[right]))
            tokens.append(tokens[left] + tokens[right])
        vocab = {token: id for id, token in enumerate(tokens)}
        added = {content: id for id, content in enumerate(added, start=len(tokens))}
        normalizer = {"type": "NFC"} if split == "qwen" else None
        return cls(vocab, merges, added, special_tokens, normalizer, split)

    @classmethod
    def from_file(cls, path) -> Tokenizer:
        """path: a tokenizer.json or its folder."""
        path = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: give a tokenizer.json or its folder")
        try:
            return cls(*read_spec(json.loads(path.read_bytes())))
        except ValueError as error:
            raise ValueError(f"{path} cannot be used: {error}") from None

    def save(self, path) -> None:
        """Writes tokenizer.json, and beside it the tokenizer_config.json that transformers needs
        (without it, a folder of a Qwen model gets the Qwen pattern whatever the file says)."""
        tokens = {id: token for token, id in self.vocab.items()}
        merges = [f"{tokens[a]} {tokens[b]}" for a, b in sorted(self.merges, key=self.merges.get)]
        added = [
            {"id": id, "content": content, "special": content in self.special}
            | dict.fromkeys(FLAGS, False)
            for content, id in self.added.items()
        ]
        steps = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[self.split]}
        spec = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
        spec |= {"normalizer": self.normalizer, "pre_tokenizer": steps, "post_processor": None}
        spec |= {"decoder": BYTE_LEVEL, "model": {"type": "BPE", "vocab": self.vocab}}
        spec["model"]["merges"] = merges
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        for file, content in {"tokenizer.json": spec, "tokenizer_config.json": config}.items():
            text = json.dumps(content, ensure_ascii=False, indent=1)
            Path(path).with_name(file).write_text(text, encoding="utf-8")


class Stream:
    """Decodes one sequence as it grows: a character comes out with its last byte."""

    def __init__(self, id_to_bytes: dict[int, bytes]):
        self.id_to_bytes = id_to_bytes
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self.decoder.decode(self.id_to_bytes.get(token_id, b""))

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


def split_words(text: str, split: str) -> list[str]:
    if split == "none" or not text:
        return [text] if text else []
    return qwen_pattern(0x10000 if max(text) < "\U00010000" else 0x110000).findall(text)


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


def learn_merges(words: dict[str, int], num_merges: int) -> list[tuple[int, int]]:
    """{"abab": 2, "ab": 1} -> [(97, 98), (256, 256)]. The most frequent pair first, on a tie that
    of the smaller ids. After a merge only the words that hold the pair are counted again."""
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
    result = []
    for id in ids:
        if result and (result[-1], id) == pair:
            result[-1] = merged
        else:
            result.append(id)
    return result


def require(fine, problem: str) -> None:
    if not fine:
        raise ValueError(problem)


def read_spec(spec) -> tuple:
    """The arguments of Tokenizer. ValueError names a field that is broken or not supported."""
    for name, values in SUPPORTED.items():
        value = field(spec, name)
        require(value in values, f"{name} {value!r} is not supported, only {list(values)}")
    steps = field(spec, "pre_tokenizer.pretokenizers") or [field(spec, "pre_tokenizer")]
    steps = [s | {"trim_offsets": True} if field(s, "type") == "ByteLevel" else s for s in steps]
    split = [name for name, known in PRE_TOKENIZERS.items() if steps == known]
    require(split, f"pre_tokenizer {steps} is not supported, only {PRE_TOKENIZERS}")
    vocab, merges = field(spec, "model.vocab"), field(spec, "model.merges")
    require(isinstance(vocab, dict) and ids_differ(vocab), "model.vocab needs an id for each token")
    require(vocab.keys() >= {*ALPHABET}, "model.vocab lacks bytes: some text could not be encoded")
    require(isinstance(merges, list), "model.merges is not a list")
    merges = [read_merge(f"model.merges[{i}]", merge, vocab) for i, merge in enumerate(merges)]
    added, special = read_added(field(spec, "added_tokens") or [], vocab)
    plain = {*ALPHABET, *map("".join, merges)}.intersection(special)
    require(not plain, f"added_tokens {plain} are special, but plain text could make them")
    return vocab, merges, added, special, field(spec, "normalizer"), split[0]


def field(spec, name: str):
    """({"model": {"type": "BPE"}}, "model.type") -> "BPE"; None where there is none"""
    for key in name.split("."):
        spec = spec.get(key) if isinstance(spec, dict) else None
    return spec


def ids_differ(ids: dict) -> bool:
    return all(type(i) is int and i >= 0 for i in ids.values()) and len({*ids.values()}) == len(ids)


def read_merge(name: str, merge, vocab) -> list[str]:
    """Older files have "a b", newer ones ["a", "b"]."""
    pair = merge.split(" ") if isinstance(merge, str) else merge
    fine = isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair)
    fine = fine and pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab
    require(fine, f"{name} {merge!r} is not two tokens of model.vocab that make a third")
    return pair


def read_added(rows, vocab) -> tuple[dict[str, int], list[str]]:
    added, special = {}, []
    for i, row in enumerate(rows):
        content = field(row, "content")
        fine = isinstance(content, str) and content and content not in added
        require(fine, f"added_tokens[{i}] {row!r} needs a content of its own")
        for flag in FLAGS:
            require(not row.get(flag), f"added_tokens[{i}].{flag} must be false, not {row[flag]!r}")
        added[content] = row.get("id")
        special += [content] if row.get("special") else []
    require(ids_differ(vocab | added), "added_tokens do not have ids of their own")
    fine = all(vocab.get(content, id) == id for content, id in added.items())
    require(fine, "added_tokens have other ids than in model.vocab")
    return added, special


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
PYTHON_TOOL = {"type": "function", "function": {
    "name": "execute_python_code_with_standard_io",
    "description": "Runs Python code in a fresh process and returns what it prints.",
    "parameters": {"type": "object", "required": ["code"], "properties": {
        "code": {"type": "string", "description": "The Python code to run."},
        "input": {"type": "string", "description": "What the code reads from stdin."},
    }},
}}  # fmt: skip
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

STATUS_TEXT = {  # what the model reads where stdout and traceback do not say it
    "empty": "The code ran and printed nothing.",
    "timeout": "Timed out: the code did not finish in time.",
    "memory": "Out of memory: the code was stopped.",
    "output": "Too much output: the code was stopped.",
    "lost": "The tool failed, not the code.",
}


def render_prompt(tok, question: str, system_text=SYSTEM_TEXT, tools=(PYTHON_TOOL,)) -> list[int]:
    """question: the whole user text (USER_TEMPLATE filled in). No system message if it is empty."""
    return render_system(tok, system_text, tools) + render_message(tok, "user", question)


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


def render_forced_prefix(tok, prefix: str = "<reason>") -> list[int]:
    """Opens a turn of the assistant; prefix="" is a model's own generation prompt."""
    return [tok.im_start, *tok.encode(f"assistant\n{prefix}", special=False)]


def render_tool_responses(tok, texts: list[str]) -> list[int]:
    """All responses of a turn are one user message."""
    blocks = [f"<tool_response>\n{text}\n</tool_response>" for text in texts]
    return render_message(tok, "user", "\n".join(blocks))


def tool_response_text(result, traceback_lines: int | None = None, max_chars: int = 2000) -> str:
    """What the model reads of a result (fields status, stdout, stderr): output or a note that there
    was none; output and traceback; or a note that a limit stopped it, without the output, which
    depends on the machine's speed. The message of malformed and refused is stderr. Addresses in a
    repr differ from run to run and are blanked."""
    stdout, stderr = result.stdout.rstrip("\n"), result.stderr.rstrip("\n")
    if result.status == "error" and traceback_lines:
        stderr = "\n".join(stderr.split("\n")[-traceback_lines:])
    parts = {"ok": [stdout], "error": [stdout, stderr], "malformed": [stderr], "refused": [stderr]}
    text = "\n".join(part for part in parts.get(result.status, []) if part)
    text = re.sub(r" at 0x[0-9a-f]{8,}>", " at 0x...>", text or STATUS_TEXT.get(result.status, ""))
    return cut_middle(text, max_chars)


def cut_middle(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    head, tail = max_chars - max_chars // 2, len(text) - max_chars // 2
    return f"{text[:head]}\n... {tail - head} characters left out ...\n{text[tail:]}"


def render_conversation(
    tok, messages: list[dict], system_text=None, tools=(), prefix: str = "<reason>"
) -> tuple[list[int], list[int]]:
    """[{"role": "user", "content": "2+2?"}, {"role": "assistant", ...}] -> (ids, loss_mask).

    An assistant's content is what follows the forced prefix, verbatim; tool messages in a row are
    one user message; a system message, if any, comes first and takes the place of system_text.
    """
    if messages and messages[0]["role"] == "system":
        system_text, messages = messages[0]["content"], messages[1:]
    pieces = [(render_system(tok, system_text, tools), 0)]
    for role, run in groupby(messages, key=lambda message: message["role"]):
        require(role in ("user", "assistant", "tool"), f"a message has role {role!r}")
        contents = [message["content"] for message in run]
        if role == "tool":
            pieces.append((render_tool_responses(tok, contents), 0))
        for content in contents if role != "tool" else []:
            if role == "user":
                pieces.append((render_message(tok, role, content), 0))
            else:
                pieces.append((render_forced_prefix(tok, prefix), 0))
                pieces.append((tok.encode(content, special=False) + [tok.im_end], 1))
                pieces.append((render_separator(tok), 0))
    if messages and messages[-1]["role"] == "assistant":
        pieces.pop()  # a rollout ends at <|im_end|>
    return [id for ids, _ in pieces for id in ids], [mask for ids, mask in pieces for _ in ids]


def render_chat(tok, messages: list[dict], system_text=None, tools=()) -> list[int]:
    """ChatML as a model's own template has it, up to the generation prompt, for the evaluation of
    models that were trained elsewhere; messages end with the user or a tool."""
    token_ids, _ = render_conversation(tok, messages, system_text, tools, prefix="")
    return token_ids + render_forced_prefix(tok, prefix="")
