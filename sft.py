"""SFT: the non-reasoning cold start (section 4.1, table 1): tool calls, their format, answers.

Before RL the paper trains on no chain of thought, only on following instructions and calling tools:
RL finds its own way of reasoning, and responses start short. Its mix: ToolACE 11K, APIGen-MT 5K,
Glaive v2 101K (function calls), Magicoder 48K (each solution becomes a JSON call), Tulu3 30K and
Llama-Nemotron 27K (chat; rewritten by another model in the paper, which is not done here). The
converters bring their shapes into the one protocol of `tokenizer.render_*`: text beside a call goes
into <reason>, any other answer into <answer>, signatures of other tools into the system text.

Loss is on what the assistant wrote, in every turn, <|im_end|> included; not on tool responses, nor
on assistant turns that are examples inside a prompt. It is a sum over tokens / one denominator for
all ranks and micro-batches. A broken conversation is skipped and counted by cause.

    python sft.py --preset toy                                               two minutes on a CPU
    torchrun --nproc-per-node 8 sft.py --preset qwen3-14b --init Qwen3-14B-Base \\
        --data toolace.json,glaive.json,magicoder.jsonl --out runs/cold
    torchrun --nproc-per-node 8 train.py --preset qwen3-14b --init runs/cold/sft

The same command continues a run. During training held-out conversations are written again turn by
turn (`measure_calls`): does the call parse, is it the right tool, are the arguments equal?
"""

from __future__ import annotations

import ast
import json
import math
import random
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import chain, takewhile
from pathlib import Path

import torch
from tqdm import tqdm

import parallel
import toy
from data import iter_rows, micro_batches, pack, read_json, require, to_object
from kvcache_engine import Engine
from model import Model, ModelConfig, init_weights, load_model, packed_attention, save_model
from rollout import parse_tool_calls
from tokenizer import PYTHON_TOOL, SYSTEM_TEXT, Tokenizer, render_conversation


@dataclass
class Config:
    preset: str = "qwen3-14b"  # the paper's values; or toy
    out: str = ""  # run folder, default runs/sft-PRESET; the model is left in OUT/sft
    init: str = ""  # Hugging Face folder to start from, with its tokenizer.json
    data: str = ""  # files of conversations, with commas between
    documents: int = 16000  # toy only, which makes its own
    held_out: int = 200  # conversations for measure_calls
    measure_every: int = 200  # steps
    checkpoint_every: int = 200  # steps
    fresh: bool = False  # moves an old run folder aside
    device: str = ""  # default: cuda if there is one
    dtype: str = "bfloat16"  # of the computation; parameters stay float32
    max_len: int = 16384  # tokens; a longer conversation is skipped; paper silent
    lr: float = 5e-6  # paper
    epochs: int = 3  # paper
    batch_size: int = 128  # documents an optimiser step, over all ranks; paper
    warmup: float = 0.04  # share of the steps; paper
    schedule: str = "cosine"  # or linear; paper
    final_lr: float = 0.0  # at the end, as a share of lr
    beta2: float = 0.95  # AdamW; paper silent, as on the next two
    weight_decay: float = 0.01
    clip: float = 1.0  # gradient norm
    loss_tokens: float = 0.0  # constant denominator of the loss; 0 = the step's tokens with loss
    shuffle: bool = True  # every epoch anew; False keeps the order of the documents
    pool: int = 1  # sorts the documents of so many steps by length; 1 = off
    micro_tokens: int = 16384  # tokens of a micro-batch
    seed: int = 0


# A mean per batch would weigh short toy traces more: the share without a call grew to 73 %.
PRESETS = {"qwen3-14b": {}, "toy": dict(
    dtype="float32", lr=3e-3, epochs=1, batch_size=16, warmup=0.05, schedule="linear",
    final_lr=0.05, loss_tokens=720.0, shuffle=False, pool=16,
)}  # fmt: skip

# ---- training ----


def sft(model, optimizer, documents, cfg, *, rank=0, world=1, start=0, device="cpu", on_step=None):
    """Trains on documents [(token_ids, loss_mask), ...], known to every rank, which runs its share
    of each step from `start` on; then on_step(step, metrics). Returns the metrics of all steps."""
    plan = plan_steps([len(ids) for ids, _ in documents], cfg)
    model.train()
    history = []
    bar = tqdm(range(start, len(plan)), "SFT", disable=rank > 0, mininterval=1.0)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, len(plan), cfg)
        chosen = [documents[i] for i in plan[step]]
        history.append(sft_step(model, optimizer, chosen, cfg, rank, world, device))
        bar.set_postfix(loss=f"{history[-1]['loss']:.3f}", refresh=False)
        if on_step:
            on_step(step, history[-1])
    return history


def sft_step(model, optimizer, documents, cfg, rank, world, device) -> dict:
    """One optimiser step: -(sum of log-probabilities of model tokens) / denominator.
    One denominator for all ranks and micro-batches: a mean in each would weigh the tokens of sparse
    ones more. Sharded gradients are averaged over ranks, hence the factor world."""
    num_tokens = sum(sum(mask) for _, mask in documents)
    denominator = cfg.loss_tokens or num_tokens
    lengths, total = [len(ids) for ids, _ in documents], 0.0
    shares = micro_batches(lengths, parallel.num_shares(world), cfg.micro_tokens)
    for micro in chain(*shares[rank::world]):
        chosen = [documents[i] for i in micro] or documents[:1]  # idle: one of weight 0
        loss = sft_loss(model, pack(chosen, bool(micro) / denominator, device=device))
        (loss * world).backward()
        total += loss.item()
    norm = parallel.clip_gradients_over_ranks(model.parameters(), cfg.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss = parallel.sum_over_ranks({"loss": total})["loss"] * denominator / num_tokens
    return dict(loss=loss, grad_norm=norm, tokens=num_tokens)  # loss: nats a model token


def sft_loss(model, batch):
    attend = packed_attention(batch.cu_seqlens)
    logprobs, _ = model(batch.token_ids, batch.positions, attend, targets=batch.targets())
    return -(logprobs[:-1] * batch.token_weights[1:]).sum()  # row t predicts token t + 1


def plan_steps(lengths: list[int], cfg) -> list[list[int]]:
    """Which documents each optimiser step sees, the same on every rank."""
    steps, span = [], cfg.batch_size * cfg.pool
    for epoch in range(cfg.epochs):
        rng, order = random.Random(f"sft {cfg.seed} {epoch}"), list(range(len(lengths)))
        if cfg.shuffle:
            rng.shuffle(order)
        for start in range(0, len(order), span):
            pool = order[start : start + span]
            if cfg.pool > 1:
                pool.sort(key=lengths.__getitem__)
            batches = [pool[i : i + cfg.batch_size] for i in range(0, len(pool), cfg.batch_size)]
            rng.shuffle(batches)
            steps += batches
    return steps


def lr_at(step: int, num_steps: int, cfg) -> float:
    """Linear warm-up, then cosine or linear down to final_lr."""
    warmup = math.ceil(cfg.warmup * num_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    x = (step - warmup) / max(1, num_steps - warmup)
    fall = 1 - x if cfg.schedule == "linear" else (1 + math.cos(math.pi * x)) / 2
    return cfg.lr * (cfg.final_lr + (1 - cfg.final_lr) * fall)


def make_optimizer(model, cfg):
    how = dict(lr=cfg.lr, betas=(0.9, cfg.beta2), weight_decay=cfg.weight_decay, fused=True)
    return torch.optim.AdamW(model.parameters(), **how)


# ---- converters: a row of any known shape to a Conversation ----

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant",
         "gpt": "assistant", "function_call": "assistant", "tool": "tool", "observation": "tool",
         "function": "tool", "function response": "tool"}  # fmt: skip
PAIRS = (  # fields of a question and its answer
    ("problem", "solution"), ("instruction", "response"), ("instruction", "output"),
    ("prompt", "response"), ("prompt", "completion"), ("input", "output"))  # fmt: skip
SPEAKER = r"(USER|ASSISTANT|FUNCTION RESPONSE):"
GLAIVE = re.compile(rf"{SPEAKER}\s*(.*?)\s*(?=\n\s*{SPEAKER}|\Z)", re.DOTALL)
as_list = lambda value: value if isinstance(value, list) else [value]
PYTHON_CODE = re.compile(r"```(?:python|py)\s*\n(.*?)```", re.DOTALL)


@dataclass
class Turn:
    role: str  # user, assistant, tool
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict]] = field(default_factory=list)
    loss: bool = True

    def content(self) -> str:
        """What an assistant writes after the forced <reason>."""
        if self.role != "assistant":
            return self.text
        if not self.calls:
            return f"{self.reasoning}</reason>\n<answer>{self.text}</answer>"
        thought = "\n".join(filter(None, [self.reasoning, self.text]))
        calls = [json.dumps({"name": name, "arguments": given}) for name, given in self.calls]
        return f"{thought}</reason>" + "".join(f"\n<tool_call>\n{c}\n</tool_call>" for c in calls)


@dataclass
class Conversation:
    turns: list[Turn]
    tools: list[dict]
    system: str = ""

    def render(self, tok) -> tuple[list[int], list[int]]:
        """(token_ids, loss_mask)"""
        messages = [{"role": t.role, "content": t.content(), "loss": t.loss} for t in self.turns]
        system_text = f"{SYSTEM_TEXT}\n\n{self.system}" if self.system else SYSTEM_TEXT
        return render_conversation(tok, messages, system_text, self.tools)


def convert(row: dict) -> Conversation:
    """ValueError: the cause for which the row is skipped."""
    messages = [{"role": "system", "content": row.get("system")}, *chat_messages(row)]
    opening = takewhile(lambda turn: turn.role == "system", map(read_turn, messages))
    system = "\n".join(filter(None, (turn.text for turn in opening)))
    tools = read_json(row.get("tools") or [], "tools that are not JSON")
    if not tools and (tools := signatures_in(system)):  # ToolACE, Glaive
        system = ""
    tools = [t.get("function", t) if isinstance(t, dict) else t for t in as_list(tools)]
    require(all(isinstance(t, dict) for t in tools), "tools that are not objects")
    names = [str(t.get("name")) for t in tools]
    _, *turns = merge_turns([read_turn(m, names) for m in messages]) or [None]
    check_turns(turns)
    if "problem" in row and "solution" in row:  # Magicoder
        require(code := "\n".join(PYTHON_CODE.findall(turns[-1].text)), "solution without Python")
        tools = [PYTHON_TOOL["function"]]
        turns[-1] = Turn("assistant", calls=[(tools[0]["name"], {"code": code})])
    return Conversation(turns, [{"type": "function", "function": t} for t in tools], system)


def chat_messages(row: dict) -> list:
    """The messages of a row. Assistant turns of a prompt are examples: weight 0."""
    if isinstance(row.get("chat"), str):  # Glaive's text form
        return [{"from": m[1], "value": m[2]} for m in GLAIVE.finditer(row["chat"])]
    for key in ("conversations", "messages"):
        if isinstance(row.get(key), list):
            return row[key]
    for ask, answer in PAIRS:
        prompt = row.get(ask)
        if prompt and isinstance(prompt, (str, list)) and isinstance(row.get(answer), str):
            prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = [{**m, "weight": 0} if isinstance(m, dict) else m for m in prompt]
            return [*prompt, {"role": "assistant", "content": row[answer]}]
    raise ValueError("unknown shape")


def read_turn(message, names=()) -> Turn:
    """OpenAI's role, content (text or parts), tool_calls; ShareGPT's from and value."""
    name = message.get("from") or message.get("role") if isinstance(message, dict) else None
    require(role := ROLES.get(str(name).lower()), "unknown role")
    body = message["value"] if "value" in message else message.get("content")
    turn = Turn(role, loss=role == "assistant" and message.get("weight") != 0)
    kind = "tool_call" if name == "function_call" else "text"
    for part in body if isinstance(body, list) else [{"type": kind, "text": body}]:
        require(isinstance(part, dict), "content that is neither text nor parts")
        value = part.get("text") or part.get("value") or ""
        text = value if isinstance(value, str) else json.dumps(value)
        if part.get("type") == "tool_call":
            turn.calls += read_calls(value)
        elif part.get("type") == "reasoning":
            turn.reasoning += text
        else:
            turn.text += text
    for call in as_list(message.get("tool_calls") or []):
        turn.calls += read_calls(call.get("function") if isinstance(call, dict) else call)
    turn.text = turn.text.replace("<|endoftext|>", "").strip()
    before, glaive, call = turn.text.partition("<functioncall>")
    if role == "assistant":
        found = read_calls(call.strip()) if glaive else bracket_calls(turn.text, names)
        require(not (found and turn.calls), "calls in two forms")
        turn.text = "" if found and not glaive else before.strip()
        turn.calls += found
    return turn


def read_calls(value) -> list[tuple[str, dict]]:
    """{"name": ..., "arguments": {...}} or a list of these, or JSON of either."""
    if isinstance(value, str):  # Glaive has the arguments' JSON in single quotes
        value = re.sub(r"(\"arguments\":\s*)'(.*)'(\s*\})", r"\1\2\3", value, flags=re.DOTALL)
        value = read_json(value, "call that is not JSON")
    calls = []
    for call in as_list(value):
        named = isinstance(call, dict) and isinstance(call.get("name"), str)
        require(named, "call without a name")
        arguments = read_json(call.get("arguments") or {}, "arguments that are not JSON")
        require(isinstance(arguments, dict), "arguments that are not an object")
        calls.append((call["name"], arguments))
    return calls


def bracket_calls(text: str, names) -> list[tuple[str, dict]]:
    """'[Get Weather(city="Rome", days=2)]' -> [("Get Weather", {"city": "Rome", "days": 2})]
    A name is one of `names` or a dotted identifier: '[see the note (below)]' -> []"""
    known = "|".join([*map(re.escape, names), r"[A-Za-z_][\w.]*"])
    if not re.fullmatch(rf"\[\s*({known})\(.*\)\s*\]", text, re.DOTALL):
        return []
    words, found = {"true": "True", "false": "False", "null": "None"}, []

    def in_python(match):  # a name may hold spaces, Python's may not: the k-th is _k
        if match["name"] is None:
            return words.get(match[0], match[0])
        found.append(match["name"])
        return f"_{len(found) - 1}("

    pieces = rf"""(?P<name>{known})\(|(["'])(?:\\.|(?!\2).)*\2|\w+"""
    calls = []
    try:
        nodes = ast.parse(re.sub(pieces, in_python, text), mode="eval").body.elts
        for k, (name, call) in enumerate(zip(found, nodes, strict=True)):
            given = {x.arg: ast.literal_eval(x.value) for x in call.keywords}
            fine = call.func.id == f"_{k}" and not call.args and None not in given  # not f(3, **x)
            require(fine, "not a name and keywords")
            calls.append((name, given))
    except (SyntaxError, ValueError, AttributeError, TypeError, MemoryError, RecursionError):
        raise ValueError("bracket call that cannot be read") from None
    return calls


def signatures_in(text: str) -> list[dict]:
    """Objects with a name, in a list or one after the other, with text around."""
    found, at = [], 0
    while match := re.compile(r"[\[{]").search(text, at):
        try:
            value, at = json.JSONDecoder().raw_decode(text, match.start())
        except ValueError:
            value, at = [], match.end()
        found += as_list(value)
    return [v for v in found if isinstance(v, dict) and "name" in v]


def merge_turns(turns: list[Turn]) -> list[Turn]:
    """Neighbours of one role and loss are one turn, but for tool responses; after the last
    assistant turn there is nothing to learn."""
    merged = []
    for turn in turns:
        last = merged[-1] if merged else Turn("")
        if last.role == turn.role != "tool" and last.loss == turn.loss:
            last.text = "\n".join(filter(None, [last.text, turn.text]))
            last.reasoning, last.calls = last.reasoning + turn.reasoning, last.calls + turn.calls
        else:
            merged.append(turn)
    while merged and merged[-1].role != "assistant":
        merged.pop()
    return merged


def check_turns(turns: list[Turn]) -> None:
    require(turns, "no assistant turn")
    require(any(t.role == "user" for t in turns), "no user turn")
    user_first = turns[0].role == "user" and all(t.role != "system" for t in turns)
    require(user_first, "does not start with the user")
    calls = responses = 0  # of the last assistant turn, and what came back
    for turn in turns:
        if turn.role == "tool":
            responses += 1
            require(calls, "tool response without call")
            require(responses <= calls, "unbalanced calls")
        else:
            require(turn.text or turn.calls, "empty content")
            require(responses or not calls, "unbalanced calls")
            calls, responses = len(turn.calls), 0


def read_conversations(paths: list[str], tok, max_len: int) -> tuple[list, list]:
    """[(conversation, token_ids, loss_mask), ...] and what was skipped ["file:row: cause", ...]"""
    read, skipped = [], []
    for path in paths:
        for line, row in tqdm(iter_rows(path), f"read {Path(path).name}", mininterval=1.0):
            try:
                conversation = convert(to_object(row))
                ids, mask = conversation.render(tok)
                require(any(mask), "nothing has loss")
                require(len(ids) <= max_len, "too long")
                read.append((conversation, ids, mask))
            except (ValueError, RecursionError) as e:
                skipped.append(f"{path}:{line}: {e}")
    return read, skipped


# ---- does it call the right tool? ----


def measure_calls(model, tok, conversations: list[Conversation], max_new_tokens=512) -> dict:
    """Writes every assistant turn again, greedily, after its true history. Of the turns with calls:
    how many parse, name the right tools, have equal arguments; of the others, how many call."""
    turns = []  # (turn, the tokens before it)
    for c in conversations:
        ids, mask = c.render(tok)
        starts = [i for i, x in enumerate(mask) if x > mask[i - 1]]
        turns += zip([t for t in c.turns if t.loss], [ids[:i] for i in starts])
    counts = Counter(calls=0, parsed=0, tool=0, arguments=0, plain=0, called=0)
    longest = max((len(ids) for _, ids in turns), default=0) + max_new_tokens
    engine = Engine(model, num_blocks=8 * (longest // 16 + 1))
    how = dict(max_new_tokens=max_new_tokens, noise_key=0, temperature=0.0, stop_ids=(tok.im_end,))
    for i, (_, ids) in enumerate(turns):
        engine.add(i, ids, **how)
    while engine.has_runnable():
        for done in engine.step():
            counts.update(judge(turns[done.seq_id][0].calls, tok.decode(done.token_ids)))
            engine.finish(done.seq_id)
    return dict(counts)


def judge(calls: list[tuple[str, dict]], text: str) -> dict:
    written = [c.raw for c in parse_tool_calls(text)]
    if not calls:
        return dict(plain=1, called=bool(written))
    try:
        found = [call for raw in written for call in read_calls(raw)]
    except ValueError:
        found = []
    same_tools = [name for name, _ in found] == [name for name, _ in calls]
    return dict(calls=1, parsed=bool(found), tool=same_tools, arguments=found == calls)


# ---- command line ----


def make_data(cfg: Config, ranks, folder: Path):
    """(tokenizer, model, documents, held-out conversations)"""
    if cfg.preset == "toy":
        tok, model = toy.toy_tokenizer(cfg.seed), Model(ModelConfig(**toy.TOY_MODEL))
        init_weights(model, cfg.seed, **toy.TOY_INIT)
        return tok, model, toy.toy_documents(tok, cfg.documents, cfg.seed), []
    tok = Tokenizer.from_file(Path(cfg.init) / "tokenizer.json")
    read, skipped = read_conversations(cfg.data.split(","), tok, cfg.max_len)
    causes = dict(Counter(row.rpartition(": ")[2] for row in skipped))
    parallel.print0(ranks, f"{len(read):,} conversations, {len(skipped):,} skipped {causes}")
    if ranks.first:
        (folder / "skipped.txt").write_text("\n".join(skipped))
    random.Random(cfg.seed).shuffle(read)
    documents = [(ids, mask) for _, ids, mask in read[cfg.held_out :]]
    require(documents, f"nothing to train on but {len(read)} held-out ones: lower --held-out")
    model = load_model(cfg.init, ranks.device, torch.float32)
    return tok, model, documents, [c for c, _, _ in read[: cfg.held_out]]


def run(cfg: Config, ranks, folder: Path) -> None:
    tok, model, documents, held_out = make_data(cfg, ranks, folder)
    shape, dtype = model.config, getattr(torch, cfg.dtype)
    model = parallel.shard(model.to(ranks.device), ranks, dtype)
    optimizer = make_optimizer(model, cfg)
    path, damaged = parallel.newest_checkpoint(folder / "checkpoints")
    state = dict(step=0, rows=0) if not path else parallel.load_checkpoint(path, model, optimizer)
    parallel.print0(ranks, *damaged, f"{len(documents):,} documents, from step {state['step']}")
    if ranks.first and (table := folder / "metrics.jsonl").exists():  # cut at the checkpoint
        table.write_text("".join(table.read_text().splitlines(keepends=True)[: state["rows"]]))

    def log(step, metrics):
        state["rows"] += 1
        if ranks.first:
            with open(folder / "metrics.jsonl", "a") as f:
                f.write(json.dumps({"step": step, **metrics}) + "\n")

    def measure(step):
        with torch.device(ranks.device):
            whole = Model(shape).to(dtype)
        for name, tensor in parallel.full_parameters(model):
            whole.get_parameter(name).data.copy_(tensor)
        mine = measure_calls(whole, tok, held_out[ranks.rank :: ranks.world])
        log(step, counts := parallel.sum_over_ranks(mine))
        parallel.print0(ranks, f"step {step}, held-out turns: {counts}")

    def on_step(step, metrics):
        log(step, metrics)
        state["step"] = step + 1
        if held_out and (step + 1) % cfg.measure_every == 0:
            measure(step + 1)
        if (step + 1) % cfg.checkpoint_every == 0:
            name = f"{step + 1:06d}"
            parallel.save_checkpoint(folder / "checkpoints", name, model, optimizer, state)

    sft(model, optimizer, documents, cfg, rank=ranks.rank, world=ranks.world,
        start=state["step"], device=ranks.device, on_step=on_step)  # fmt: skip
    if held_out:
        measure("end")
    tensors = {name: tensor.cpu() for name, tensor in parallel.full_parameters(model)}
    if ranks.first:
        save_model(tensors, shape, folder / "sft")
        tok.save(folder / "sft" / "tokenizer.json")
        print(f"model in {folder / 'sft'}")


def main() -> None:
    base = lambda given: PRESETS[given.get("preset", "qwen3-14b")]
    cfg, _ = parallel.parse_config(Config, base=base, choices=PRESETS, description=__doc__)
    ranks = parallel.start_ranks(cfg.device)
    folder = Path(cfg.out or f"runs/sft-{cfg.preset}")
    try:
        require(cfg.schedule in ("cosine", "linear"), "--schedule is cosine or linear")
        require(cfg.dtype in ("bfloat16", "float32"), "--dtype is bfloat16 or float32")
        if cfg.preset != "toy" and not (cfg.init and cfg.data):
            raise ValueError("give --init FOLDER (Hugging Face) and --data FILE[,FILE...]")
        if ranks.first:
            parallel.open_run(folder, asdict(cfg), cfg.fresh, free=("fresh", "device", "out"))
        parallel.barrier_over_ranks()
        run(cfg, ranks, folder)
    except (OSError, ValueError) as e:
        sys.exit(f"sft.py: {e}")
    parallel.end_ranks()


if __name__ == "__main__":
    main()
