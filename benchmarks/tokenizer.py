"""Load time and encoding speed of tokenizer.py, beside the tokenizers package.

    python benchmarks/tokenizer.py [tokenizer.json]

Texts that every Python has: English is the language reference that `help()` prints, code is the
standard library, mixed adds Chinese, Greek and emoji to English. CPU seconds of one thread, the
best of three. Cold: no word remembered from an earlier call, as in the first pass over a data set;
warm: the same text again. The package remembers words too, in a smaller cache that is filled when
it is measured.
"""

import argparse
import importlib.util
import pydoc_data.topics
import sys
import sysconfig
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tokenizer import Tokenizer, split_words  # noqa: E402


def texts(num_bytes: int = 1_000_000) -> dict[str, str]:
    english = "\n".join(pydoc_data.topics.topics.values())
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    mixed = english[: num_bytes // 2].replace(" the ", " 的数学问题 ").replace(" a ", " α 🎉 ")
    cut = {"English": english, "code": code, "mixed": mixed}
    return {name: text.encode()[:num_bytes].decode(errors="ignore") for name, text in cut.items()}


def cpu_seconds(run, before=lambda: None, times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        before()
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)


def main():
    default = Path(__file__).parents[2] / "shared/data/qwen/tokenizer.json"
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("tokenizer", nargs="?", default=default, help="a tokenizer.json")
    path = parser.parse_args().tokenizer
    tok = Tokenizer.from_file(path)
    print(f"load: {cpu_seconds(lambda: Tokenizer.from_file(path)):.2f} s", end="")
    package = importlib.util.find_spec("tokenizers")
    if package:
        import tokenizers

        oracle = tokenizers.Tokenizer.from_file(str(path))
        seconds = cpu_seconds(lambda: tokenizers.Tokenizer.from_file(str(path)))
        print(f", tokenizers package {tokenizers.__version__}: {seconds:.2f} s", end="")
    start = time.process_time()
    split_words("\U00010000", "qwen"), split_words("a", "qwen")
    print(f"; the pattern, once per process: {time.process_time() - start:.2f} s")

    print(f"{'MB/s':8} {'bytes':>9} {'ids':>8} {'words':>7} {'cold':>6} {'warm':>6} {'package':>8}")
    for name, text in texts().items():
        size, words = len(text.encode()), split_words(text, tok.split)
        cold = cpu_seconds(lambda: tok.encode(text), before=tok.words.clear)  # noqa: B023
        warm = cpu_seconds(lambda: tok.encode(text))  # noqa: B023
        line = f"{name:8} {size:9,} {len(tok.encode(text)):8,} {len(set(words)):7,}"
        line += f" {size / cold / 1e6:6.2f} {size / warm / 1e6:6.2f}"
        if package:
            seconds = cpu_seconds(lambda: oracle.encode(text))  # noqa: B023
            same = oracle.encode(text).ids == tok.encode(text)
            line += f" {size / seconds / 1e6:8.2f}  {'same ids' if same else 'OTHER IDS'}"
        print(line)

    short = texts(200)["code"]
    micros = cpu_seconds(lambda: [tok.encode(short) for _ in range(1000)]) * 1e3
    print(f"a warm call of {len(short)} characters: {micros:.0f} microseconds")


if __name__ == "__main__":
    main()
