r"""Rollout: the act of answering one problem in turns, with a tool (section 2.1, figures 2, 3).

    prompt forced model (separator tool forced model)*          the kinds of segment, in this order

    <|im_start|>system ... <|im_end|>\n<|im_start|>user ... <|im_end|>\n      prompt     mask 0
    <|im_start|>assistant\n<reason>                                           forced     mask 0
    I compute it.</reason>\n<tool_call>{...}</tool_call><|im_end|>            model      mask 1
    \n                                                                        separator  mask 0
    <|im_start|>user\n<tool_response>\n1512\n</tool_response><|im_end|>\n     tool       mask 0
    <|im_start|>assistant\n<reason>                                           forced     mask 0
    ...</reason>\n<answer>\boxed{1512}</answer><|im_end|>                     model      mask 1

Token in, token out: what the engine sampled and what the tool answered is appended as ids; nothing
is decoded and encoded again. Text is decoded only to look for calls and for the answer.

After a turn its closed <tool_call> blocks run in the sandbox, and all responses go back in one user
message; without a block the rollout stops. It ends too at `max_turns`, when `max_tokens` (prompt,
tool output and all) is spent, or at a wall-clock limit. One loop drives all rollouts of an engine:
while some wait for their tools it decodes the others, and finished ones make room for more from the
queue (scheduler.py).

What a model does wrong is data, never an exception: a block that is not JSON, an unknown tool, a
missing argument are `malformed`, calls beyond `max_calls` in a turn are `refused`; the text of the
error is the response, and both count in Eq. 4. A call cut off by the token limit never runs, nor
does one of the last turn, whose response nobody would read (ours; the paper is silent).

    python rollout.py --run runs/toy "What is 37 * 41 - 5?"     talk to what was just trained
    python rollout.py --model DIR "..."                         to any Qwen folder

Not here: which trajectories are kept (grpo_roc.py), what runs next in the engine (its step plan).
"""

from __future__ import annotations

import argparse
import json
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist

import tokenizer
from data import Problem, ToolCall, Trajectory
from kvcache_engine import Engine, engine_from_folder
from reward import extract_answer, integer_verdict
from sandbox import Sandbox
from scheduler import EngineView, Lengths, RolloutQueue, num_to_start
from tokenizer import PYTHON_TOOL, SYSTEM_TEXT, USER_TEMPLATE, Tokenizer

CHAT_TEMPLATE = "{question}\n\nReason step by step and put the final answer into \\boxed{}."


@dataclass(frozen=True)
class RolloutConfig:
    max_turns: int = 10  # T, assistant turns
    max_tokens: int = 8192  # budget of the whole trajectory: prompt and tool output count
    temperature: float = 1.0
    top_p: float = 1.0  # below 1 only for evaluation: log-probabilities would not be the policy's
    tool_seconds: float = 4.0  # CPU seconds of a call
    check_seconds: float = 4.0  # CPU seconds of an answer check
    wall_seconds: float = 1200.0  # a rollout older than this is cut and counted
    max_calls: int = 8  # tool calls a turn
    max_tool_chars: int = 4096  # of a response; the middle is cut
    traceback_lines: int | None = None  # None: the whole traceback
    policy: str = "expected"  # scheduler: static | static_groups | capacity | expected
    system_text: str = SYSTEM_TEXT
    user_template: str = USER_TEMPLATE
    show_tools: bool = True  # the tool signature in the prompt (the toy leaves it out)
    chat: bool = False  # the model's own form: no forced prefix, the last box anywhere counts


# ---- tools: a second one is a second entry ----


def run_python(box, arguments: dict, seconds: float):
    return box.submit(arguments["code"], arguments.get("input", ""), seconds=seconds)


TOOLS = {PYTHON_TOOL["function"]["name"]: (PYTHON_TOOL, run_python)}  # name -> signature, how


@dataclass
class ParsedCall:
    name: str
    arguments: dict
    raw: str
    error: str = ""  # not empty: the call cannot run, and this is its response


OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse_tool_calls(text: str) -> list[ParsedCall]:
    """The closed call blocks of a turn, in order.

    '<tool_call>{"name": "f", "arguments": {}}</tool_call>' -> one call
    A `</tool_call>` inside a JSON string does not end the block; a block that is never closed is no
    call. A block whose JSON is broken ends at its first `</tool_call>` and carries the error."""
    calls = []
    while OPEN in text:
        text = text.partition(OPEN)[2].lstrip()  # cut: an error counts lines from the start
        try:
            end = json.JSONDecoder().raw_decode(text)[1]
        except (ValueError, RecursionError):
            end = 0
        close = text.find(CLOSE, end)
        if close < 0:
            break
        calls.append(parse_call(text[:close].rstrip()))
        text = text[close + len(CLOSE) :]
    return calls


def parse_call(raw: str) -> ParsedCall:
    try:
        value = json.loads(raw)
        error = check_call(value)
    except (ValueError, RecursionError) as e:  # not JSON, an integer or a nesting beyond Python's
        value, error = None, str(e)
    if not error:
        return ParsedCall(value["name"], value["arguments"], raw)
    name = value.get("name") if isinstance(value, dict) else None
    return ParsedCall(name if isinstance(name, str) else "", {}, raw, error)


def check_call(value) -> str:
    """'' or what is wrong with a decoded call, by the tool's own signature."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "ValueError: a tool call is a JSON object with a name and arguments"
    if value["name"] not in TOOLS:
        return f"NameError: no tool is named {value['name']!r}; there is: {', '.join(TOOLS)}"
    arguments = value.get("arguments")
    if not isinstance(arguments, dict):
        return "TypeError: arguments must be a JSON object"
    parameters = TOOLS[value["name"]][0]["function"]["parameters"]
    kinds = {name: p.get("type") for name, p in parameters["properties"].items()}
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"TypeError: the argument {name!r} is missing"
    for name, argument in arguments.items():
        if name not in kinds:
            return f"TypeError: there is no argument {name!r}"
        if kinds[name] == "string" and not isinstance(argument, str):
            return f"TypeError: the argument {name!r} must be a string"
    return ""


# ---- the loop ----


@dataclass
class Running:
    """A rollout in flight: its trajectory and what it waits for."""

    trajectory: Trajectory
    started: float
    waiting: dict = field(default_factory=dict)  # handle -> ToolCall without an answer
    check: object = None  # handle of the answer check


@dataclass
class RolloutStats:
    """Seconds and counts of one phase on one engine (metrics of the step)."""

    seconds: float = 0.0
    engine_seconds: float = 0.0  # decoding or prefilling
    tool_wait_seconds: float = 0.0  # nothing to decode, all wait for tools or checks
    queue_seconds: float = 0.0  # unclaimed rollouts x seconds
    idle_end_seconds: float = 0.0  # from this engine's last rollout to the end of the phase
    check_seconds: float = 0.0  # integer answers are decided here, others in the sandbox
    tool_calls: int = 0
    checks: int = 0
    checks_failed: int = 0  # a check that crashed or hung: reward 0, counted
    lost_calls: int = 0
    wall_cut: int = 0

    def add(self, other: RolloutStats) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def rollout(
    engine: Engine, box, tok: Tokenizer, queue, problems: list[Problem], cfg: RolloutConfig, *,
    seed: int, step: int, policy_version: int = 0, lengths: Lengths | None = None,
    progress: Callable | None = None, watch: Callable | None = None,
) -> tuple[list[Trajectory], RolloutStats]:  # fmt: skip
    """Runs what this engine claims from the queue to the end; trajectories sorted by (problem, i).

    queue: RolloutQueue of (problem index, rollout index), shared by all engines
    box: Sandbox or SandboxClient; lengths: of earlier trajectories of this run, grown here;
    progress(trajectory) is called as each ends; watch(trajectory, ids of the turn in progress)
    after every engine step, to look on live. Returns when all engines are done with the queue."""
    loop = Loop(engine, box, tok, cfg, seed, step, policy_version, progress)
    lengths = lengths or Lengths(cfg.max_tokens)
    begin, remaining, stale = time.monotonic(), queue.remaining(), True
    while remaining or loop.running:
        num_started, num_finished = loop.next_id, len(loop.finished)
        if remaining and stale:
            view = engine_view(loop, lengths, queue, remaining)
            for problem_index, rollout_index in queue.claim(num_to_start(cfg.policy, view)):
                loop.start(problems[problem_index], rollout_index)
            remaining = queue.remaining()
        at = time.monotonic()
        loop.advance()
        loop.stats.queue_seconds += remaining * (time.monotonic() - at)
        if watch:
            for seq_id, run in loop.running.items():  # its last turn may be in the trajectory
                in_turn = not run.waiting and run.check is None
                watch(run.trajectory, engine.generated(seq_id) if in_turn else [])
        for t in loop.finished[num_finished:]:
            lengths.add(t.problem.id, len(t.token_ids))
        stale = len(loop.finished) > num_finished or loop.next_id > num_started or not loop.running
    queue.close()
    loop.stats.seconds = time.monotonic() - begin
    while not queue.finished():  # the other engines: in the store, not in a collective
        time.sleep(0.005)
    loop.stats.idle_end_seconds = time.monotonic() - begin - loop.stats.seconds
    order = {p.id: i for i, p in enumerate(problems)}
    return sorted(loop.finished, key=lambda t: (order[t.problem.id], t.rollout)), loop.stats


def engine_view(loop: Loop, lengths: Lengths, queue, remaining: int) -> EngineView:
    """What a scheduler policy may see. Rollouts that only wait for their check hold no cache."""
    capacity, runs = loop.engine.capacity(), loop.running.items()
    return EngineView(
        queue.num_engines, len(queue.order), remaining, started=loop.next_id,
        cache_tokens=capacity.num_blocks * capacity.block_size,
        max_tokens=loop.cfg.max_tokens, max_seqs=loop.engine.max_num_seqs,
        running=[(r.trajectory.problem.id, capacity.tokens[s]) for s, r in runs if r.check is None],
        ended=[len(t.token_ids) for t in loop.finished], finished=lengths,
    )  # fmt: skip


class Loop:
    """All rollouts in flight on one engine: advance() decodes a step, hands out calls, takes
    answers, and scores what has ended."""

    def __init__(self, engine, box, tok, cfg, seed, step, policy_version, progress):
        self.engine, self.box, self.tok, self.cfg = engine, box, tok, cfg
        self.seed, self.step, self.policy_version = seed, step, policy_version
        self.progress, self.stats, self.next_id = progress, RolloutStats(), 0
        self.running: dict[int, Running] = {}  # by seq_id
        self.owner: dict = {}  # handle -> seq_id
        self.finished: list[Trajectory] = []
        self.forced = tokenizer.render_forced_prefix(tok, "" if cfg.chat else "<reason>")
        self.separator = tokenizer.render_separator(tok)

    def start(self, problem: Problem, rollout_index: int) -> None:
        cfg, seq_id = self.cfg, self.next_id
        self.next_id += 1
        tools = [signature for signature, _ in TOOLS.values()] if cfg.show_tools else ()
        user = cfg.user_template.replace("{question}", problem.question)
        prompt = tokenizer.render_prompt(self.tok, user, cfg.system_text, tools)
        t = Trajectory(problem, rollout_index, self.step, policy_version=self.policy_version)
        t.append(prompt, "prompt")
        t.append(self.forced, "forced")
        t.num_prompt_tokens = len(prompt)
        self.running[seq_id] = Running(t, time.monotonic())
        room = cfg.max_tokens - len(t.token_ids)
        if room < 1:  # the prompt alone is over the budget: truncated, whatever the model would say
            return self.end(seq_id, "length")
        # 63 bits from which the engine draws all noise of a rollout, with the token's position
        digest = sha256(f"{self.seed}/{self.step}/{problem.id}/{rollout_index}".encode()).digest()
        self.engine.add(
            seq_id, t.token_ids, max_new_tokens=room, stop_ids=(self.tok.im_end,),
            noise_key=int.from_bytes(digest[:8], "big") >> 1,
            temperature=cfg.temperature, top_p=cfg.top_p,
        )  # fmt: skip

    def advance(self) -> None:
        if self.engine.has_runnable():
            at = time.monotonic()
            turns = self.engine.step()
            self.stats.engine_seconds += time.monotonic() - at
            for turn in turns:
                self.end_of_turn(turn)
        elif self.owner:  # nothing to decode: sleep until an answer comes, or to look at the clock
            at = time.monotonic()
            poll = select.poll()  # select.select refuses file numbers from 1024 on
            poll.register(self.box.fileno(), select.POLLIN)
            poll.poll(500)  # milliseconds
            self.stats.tool_wait_seconds += time.monotonic() - at
        for handle in self.box.ready() if self.owner else ():
            self.answered(handle)
        self.cut_overdue()

    def end_of_turn(self, turn) -> None:
        seq_id, run = turn.seq_id, self.running[turn.seq_id]
        t = run.trajectory
        t.append(turn.token_ids, "model", turn.logprobs, turn.entropies)
        t.num_turns += 1
        text = self.tok.decode(turn.token_ids)
        t.num_answer_tags += text.count("<answer>")
        if turn.stop_reason == "length":
            return self.end(seq_id, "length")
        calls = parse_tool_calls(text)
        if not calls or t.num_turns >= self.cfg.max_turns:
            return self.end(seq_id, "turns" if calls else "stopped")
        for index, call in enumerate(calls):
            self.hand_out(seq_id, index, call)
        if not run.waiting:
            self.respond(seq_id)

    def hand_out(self, seq_id: int, index: int, call: ParsedCall) -> None:
        """Records a call of the turn and submits it, or answers it at once if it cannot run."""
        run, most = self.running[seq_id], self.cfg.max_calls
        turn = run.trajectory.num_turns - 1
        record = ToolCall(turn, call.name, call.raw, "", "malformed", stderr=call.error)
        run.trajectory.tool_calls.append(record)
        self.stats.tool_calls += 1
        if index >= most:
            record.status = "refused"
            record.stderr = f"RuntimeError: at most {most} tool calls in a turn"
        elif not call.error:
            record.code, record.input = call.arguments["code"], call.arguments.get("input", "")
            record.status = "lost"  # until the sandbox has answered
            handle = TOOLS[call.name][1](self.box, call.arguments, self.cfg.tool_seconds)
            run.waiting[handle], self.owner[handle] = record, seq_id

    def answered(self, handle) -> None:
        """A tool call or an answer check came back; what a cut rollout asked for is dropped."""
        result = self.box.result(handle)
        seq_id = self.owner.pop(handle, None)
        if seq_id not in self.running:
            return
        run = self.running[seq_id]
        if handle == run.check:
            self.stats.checks_failed += result.status != "ok"
            return self.score(seq_id, result.status == "ok" and result.stdout.strip() == "1")
        call = run.waiting.pop(handle)
        call.status, call.stdout, call.stderr = result.status, result.stdout, result.stderr
        call.seconds = result.cpu_seconds
        self.stats.lost_calls += call.status == "lost"
        if not run.waiting:
            self.respond(seq_id)

    def respond(self, seq_id: int) -> None:
        """All calls of the turn are answered: append the responses, go on with the next turn."""
        t, cfg = self.running[seq_id].trajectory, self.cfg
        limits = cfg.traceback_lines, cfg.max_tool_chars
        calls = [c for c in t.tool_calls if c.turn == t.num_turns - 1]
        texts = [tokenizer.tool_response_text(call, *limits) for call in calls]
        response = tokenizer.render_tool_responses(self.tok, texts)
        new_ids = self.separator + response + self.forced
        room = cfg.max_tokens - len(t.token_ids) - len(new_ids)
        if room < 1:  # a response that does not fit is not appended
            return self.end(seq_id, "length")
        t.append(self.separator, "separator")
        t.append(response, "tool")
        t.append(self.forced, "forced")
        self.engine.extend(seq_id, new_ids, max_new_tokens=room)

    def end(self, seq_id: int, stop_reason: str) -> None:
        """Frees the engine's blocks and scores: truncated means 0, whatever it contains."""
        run, cfg = self.running[seq_id], self.cfg
        t = run.trajectory
        t.stop_reason = stop_reason
        if t.num_turns or stop_reason == "wall":  # else the engine has not seen it
            self.engine.abort(seq_id)
        wrote = [self.tok.decode(t.token_ids[a:b]) for a, b, kind in t.segments if kind == "model"]
        text = "\n".join(wrote)
        t.answer = extract_answer(f"<answer>{text}</answer>" if cfg.chat else text)
        if stop_reason in ("length", "wall") or t.answer is None:
            return self.score(seq_id, False)
        at = time.monotonic()
        verdict = integer_verdict(t.answer, t.problem.answer)
        self.stats.check_seconds += time.monotonic() - at
        self.stats.checks += 1
        if verdict is not None:
            return self.score(seq_id, verdict)
        run.check = self.box.submit_check(t.answer, t.problem.answer, seconds=cfg.check_seconds)
        self.owner[run.check] = seq_id

    def score(self, seq_id: int, correct: bool) -> None:
        t = self.running.pop(seq_id).trajectory
        t.reward = float(correct)
        self.finished.append(t)
        if self.progress:
            self.progress(t)

    def cut_overdue(self) -> None:
        """The clock of the wall limit, for rollouts and for the tools they wait for."""
        limit = time.monotonic() - self.cfg.wall_seconds
        for seq_id, run in [(s, r) for s, r in self.running.items() if r.started < limit]:
            self.stats.wall_cut += 1
            if run.check is None:
                self.stats.lost_calls += len(run.waiting)  # their status stays lost
                self.end(seq_id, "wall")
            else:  # the rollout has ended, its check has not: counts as wrong
                self.stats.checks_failed += 1
                self.score(seq_id, False)


def model_config(chat: bool) -> RolloutConfig:
    """The paper's evaluation settings (section 5.1), for a folder that is not a run of ours."""
    form = dict(chat=True, system_text="", user_template=CHAT_TEMPLATE) if chat else {}
    return RolloutConfig(max_turns=30, max_tokens=30720, temperature=0.6, **form)


# ---- talk to a model ----

COLOURS = {"prompt": "2", "forced": "90", "model": "32", "separator": "0", "tool": "36"}
CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}, "\ufffd")


def live_printer(tok: Tokenizer, colour: bool):
    """A `watch` that prints each token once, as it comes, in the colour of who wrote it. Escape
    sequences, which would command the terminal, are shown: a model or its program wrote them."""
    stream, printed, last = tok.stream(), 0, None

    def watch(t: Trajectory, generated: list[int]) -> None:
        nonlocal printed, last
        kinds = [kind for start, end, kind in t.segments for _ in range(start, end)]
        kinds += ["model"] * len(generated)
        for token_id, kind in [*zip(t.token_ids + generated, kinds)][printed:]:
            if colour and kind != last:
                print(f"\033[0;{COLOURS[kind]}m", end="")
            print(stream.push(token_id).translate(CONTROLS), end="", flush=True)
            last = kind
        printed = len(kinds)

    return watch


def settings_of_run(run: Path) -> tuple[Path, RolloutConfig]:
    """(model folder, rollout settings) of a finished, or at least begun, training run."""
    config = run / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{run} holds no config.json: it is not a run folder of train.py")
    for name in ("model", "sft"):
        if (run / name / "config.json").is_file():
            return run / name, RolloutConfig(**json.loads(config.read_text())["evaluation"])
    raise FileNotFoundError(f"{run} has no trained model yet: let train.py reach the end of SFT")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print one rollout live, coloured by who wrote it")
    parser.add_argument("problem", help="the question")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--run", type=Path, help="a run folder of train.py")
    where.add_argument("--model", type=Path, help="a Qwen3 or Qwen2.5 folder")
    parser.add_argument("--answer", default="", help="the label, to be scored against")
    parser.add_argument("--chat", action="store_true", help="with --model: its own ChatML form")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another rollout")
    parser.add_argument("--temperature", type=float, help="0: greedy")
    parser.add_argument("--max-tokens", type=int, help="budget of the trajectory")
    parser.add_argument("--colour", action=argparse.BooleanOptionalAction)
    parser.add_argument("--device", default=None, help="cpu or cuda; default: what is there")
    args = parser.parse_args()
    if args.run and args.chat:
        parser.error("--chat is for --model: a run folder has a form of its own")

    torch.set_num_threads(1)
    try:
        stranger = args.model, model_config(args.chat)
        folder, cfg = settings_of_run(args.run) if args.run else stranger
        given = {"temperature": args.temperature, "max_tokens": args.max_tokens}
        cfg = replace(cfg, **{k: v for k, v in given.items() if v is not None})
        tok = Tokenizer.from_file(folder / "tokenizer.json")
        engine = engine_from_folder(folder, cache_tokens=cfg.max_tokens, device=args.device)
    except (OSError, ValueError) as e:
        sys.exit(f"rollout.py: {e}")
    colour = sys.stdout.isatty() if args.colour is None else args.colour
    problem, watch = Problem("asked", args.problem, args.answer), live_printer(tok, colour)
    queue = RolloutQueue(dist.HashStore(), "rollout", [(0, 0)])
    with Sandbox(workers=1) as box:
        how = dict(seed=args.seed, step=0, watch=watch)
        (t,), _ = rollout(engine, box, tok, queue, [problem], cfg, **how)
    watch(t, [])
    calls = ", ".join(f"{c.status} ({c.seconds:.2f} s)" for c in t.tool_calls) or "none"
    print("\033[0m\n" if colour else "\n")
    print(f"ended: {t.stop_reason}   turns: {t.num_turns}   tool calls: {calls}")
    print(f"tokens: {len(t.token_ids)}, of them {t.num_model_tokens} by the model")
    verdict = f", label {args.answer}: {'right' if t.reward else 'wrong'}" if args.answer else ""
    print(f"answer: {str(t.answer).translate(CONTROLS)}{verdict}")


if __name__ == "__main__":
    main()
