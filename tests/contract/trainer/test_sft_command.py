"""`rollmesh sft --data` as a user runs it: it learns, it repeats, and what it leaves is a folder that others load."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.config.fitting import read_facts
from services.wire.errors import UsageError
from services.wire.tasks.tables import read_table
from tests.support.chat_policy import TURN_END, save_chat_policy
from tests.support.forked_command import run_forked
from tests.support.mesh_command import COMMAND
from trainer.sft.columns import read_examples
from trainer.sft.display import Display
from trainer.sft.finetune import Reached, SftArguments, finetune
from trainer.sft.report import Summary, as_lines
from trainer.sft.sft_settings import fit_sft, load_sft_settings
from trainer.sft.tiny_model import build_model, save_policy

TIMED = {"sft.jsonl", "summary.json"}
"""What holds seconds."""


def a_model(folder: Path) -> Path:
    save_policy(build_model(seed=3, hidden_size=32, layers=1), folder)
    return folder


def questions(file: Path) -> Path:
    """50 prompts with answers: the second of two digits, and the first."""
    numbers = random.Random(1)
    lines = []
    for _ in range(50):
        first, second = numbers.randrange(10), numbers.randrange(10)
        lines.append(json.dumps({"question": f"{first} and {second}?", "reply": f"{second},{first}"}) + "\n")
    file.write_text("".join(lines))
    return file


NAMED = ("data.prompt=question", "data.answer=reply", "data.held_out=0.2")
LEARNING = ("trainer.learning_rate=1e-2", "evaluation.every=50", "steps=150")


def command(model: Path, data: Path, out: Path, *overrides: str) -> list[str]:
    return ["sft", "--model", str(model), "--data", str(data), "--out", str(out), *overrides]


def trained(model: Path, data: Path, out: Path, *overrides: str) -> Summary:
    """As the command does, in this process."""
    settings, origins = load_sft_settings(None, overrides)
    settings, changed = fit_sft(settings, read_facts(model), cores=2, gpu=False)
    examples = read_examples(data, read_table(data), settings.data)
    threads = torch.get_num_threads()
    try:
        return finetune(SftArguments(model, data, examples, out, settings, origins | changed), Display(), Reached())
    finally:
        torch.set_num_threads(threads)


def answer_to(folder: Path, prompt: str) -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    made = model.generate(ids, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(made[0, ids.shape[1] :]))


def test_prompts_with_answers_are_learned_the_same_way_twice(tmp_path: Path) -> None:
    model, data = a_model(tmp_path / "model"), questions(tmp_path / "data.jsonl")
    one, two = tmp_path / "one", tmp_path / "two"
    done = run_forked(command(model, data, one, *NAMED, *LEARNING), tmp_path)
    assert done.code == 0, done.err
    summary = trained(model, data, two, *NAMED, *LEARNING)
    assert summary.examples.read == 50 == summary.examples.trained + summary.examples.held_out
    before, after = summary.loss_before, summary.loss_after
    assert before is not None and after is not None and after < before / 2
    assert f"{before:.3f} → {after:.3f}" in done.out and str(one) in done.out
    lines = [json.loads(line) for line in (one / "sft.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 151))
    assert [line["step"] for line in lines if line["held_out_loss"] is not None] == [50, 100, 150]
    assert summary.tokens == sum(line["tokens"] for line in lines)
    assert json.loads((one / "summary.json").read_bytes())["loss_after"] == after
    assert answer_to(one, "4 and 7?") == "7,4$"
    settings, origins = load_sft_settings(one / "sft.toml", [])
    assert (settings.steps, settings.trainer.learning_rate, origins["steps"]) == (150, 1e-2, "sft.toml")
    files = sorted(path.name for path in one.iterdir())
    assert files == sorted(path.name for path in two.iterdir())
    for name in {*files} - TIMED:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_chats_are_learned_through_the_template(tmp_path: Path) -> None:
    model, out, data = tmp_path / "model", tmp_path / "out", tmp_path / "chats.jsonl"
    save_chat_policy(model)
    chats = [
        {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "fine"},
                {"role": "user", "content": f"and {number}?"},
                {"role": "assistant", "content": str(number)},
            ]
        }
        for number in range(10)
        for text in ("the weather?", "the city?", "the number?")
    ]
    data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    summary = trained(model, data, out, "trainer.learning_rate=5e-3", "steps=30", "data.held_out=0.2")
    assert summary.loss_before is not None and summary.loss_after is not None
    assert summary.loss_after < summary.loss_before / 2
    prompt = AutoTokenizer.from_pretrained(out).apply_chat_template(
        [{"role": "user", "content": "the city?"}], tokenize=False, add_generation_prompt=True
    )
    assert answer_to(out, str(prompt)) == f"fine{TURN_END}"


@pytest.mark.parametrize("rank", [0, 8])
def test_the_best_weights_are_kept_where_more_training_makes_them_worse(tmp_path: Path, rank: int) -> None:
    """Answers at random: there is nothing to learn beyond their form, and remembering them is wrong elsewhere."""
    model, out, data = a_model(tmp_path / "model"), tmp_path / "out", tmp_path / "d.jsonl"
    numbers = random.Random(2)
    rows = [{"prompt": f"{number:03d}=", "answer": str(numbers.randrange(10))} for number in range(60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    often = ("steps=80", "evaluation.every=5", "evaluation.keep_best=true", "data.held_out=0.2")
    summary = trained(model, data, out, "trainer.learning_rate=2e-2", f"trainer.lora.rank={rank}", *often)
    lines = [json.loads(line) for line in (out / "sft.jsonl").read_text().splitlines()]
    measured = {line["step"]: line["held_out_loss"] for line in lines if line["held_out_loss"] is not None}
    assert len(measured) == 16
    assert summary.written_step == min(measured, key=lambda step: measured[step]) < 80
    assert summary.loss_written == min(measured.values()) < measured[80]
    again = trained(out, data, tmp_path / "again", "steps=1", "data.held_out=0.2")
    assert again.loss_before == pytest.approx(summary.loss_written, rel=1e-4)


def test_adapters_are_merged_into_a_folder_in_the_serving_dtype(tmp_path: Path) -> None:
    model, data, out = a_model(tmp_path / "model"), questions(tmp_path / "data.jsonl"), tmp_path / "out"
    lora = ("trainer.lora.rank=8", "trainer.learning_rate=2e-2", "model.dtype=bfloat16", "steps=60")
    summary = trained(model, data, out, *NAMED, *lora)
    assert summary.loss_before is not None and summary.loss_after is not None
    assert summary.loss_after < summary.loss_before * 0.8
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    changed = {name for name in before if not torch.equal(before[name].to(torch.bfloat16), after[name])}
    assert changed == {name for name in before if "_proj" in name}
    assert summary.parameters_trained < sum(weight.numel() for weight in before.values())
    assert not (out / "adapter_config.json").exists()


def test_examples_that_are_too_long_or_without_an_answer_are_counted(tmp_path: Path) -> None:
    model, out, data = a_model(tmp_path / "model"), tmp_path / "out", tmp_path / "d.jsonl"
    rows = [{"tokens": [5, 6, 7], "mask": [0, 1, 1]}] * 6
    rows += [{"tokens": [5] * 9, "mask": [1] * 9}] * 2 + [{"tokens": [5, 6], "mask": [0, 0]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with capture_logs() as logs:
        summary = trained(model, data, out, "data.longest=8", "data.held_out=0", "examples_per_step=3")
    dropped = {line["event"]: line["count"] for line in logs if "dropped" in line["event"]}
    assert dropped == {"examples dropped: too long": 2, "examples dropped: without an answer": 1}
    assert (summary.steps, summary.learned_tokens, summary.loss_after) == (2, 12, None)
    told = "\n".join(as_lines(summary, out))
    assert "9 read = 6 for training + 0 held out + dropped: 2 too long, 1 without an answer" in told
    with pytest.raises(UsageError, match="no example to train on: 9 read, 8 too long, 1 without an answer"):
        trained(model, data, tmp_path / "none", "data.longest=2", "data.held_out=0")


def test_the_loss_is_the_mean_over_learned_tokens_whatever_the_packing(tmp_path: Path) -> None:
    model, out, data = a_model(tmp_path / "model"), tmp_path / "out", tmp_path / "d.jsonl"
    rows = [([5, 6, 7, 8], [0, 1, 0, 1]), ([9, 3, 4], [0, 0, 1])]
    data.write_text("".join(json.dumps({"tokens": ids, "mask": mask}) + "\n" for ids, mask in rows))
    policy = AutoModelForCausalLM.from_pretrained(model)
    wanted = []
    for ids, mask in rows:
        logprobs = policy(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted += [-float(logprobs.detach()[place - 1, ids[place]]) for place in range(1, len(ids)) if mask[place]]
    for number, budget in enumerate((1, 4096)):
        trained(model, data, out / str(number), "data.held_out=0", f"trainer.micro_batch_tokens={budget}")
        line = json.loads((out / str(number) / "sft.jsonl").read_text())
        assert line["loss"] == pytest.approx(sum(wanted) / 3, rel=1e-5)
        assert (line["tokens"], line["learned_tokens"]) == (7, 3)


def test_ctrl_c_says_how_far_it_came_and_leaves_nothing(tmp_path: Path) -> None:
    model, data, out = a_model(tmp_path / "model"), questions(tmp_path / "data.jsonl"), tmp_path / "made" / "out"
    words = [*COMMAND, *command(model, data, out, *NAMED, "steps=1000000")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        ends = time.monotonic() + 90
        while not [*(tmp_path / "made").glob(".making-*/sft.jsonl")]:
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.05)
        [lines] = (tmp_path / "made").glob(".making-*/sft.jsonl")
        while lines.stat().st_size == 0:
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "of 1000000" in said and "Traceback" not in said
    assert [*(tmp_path / "made").iterdir()] == []


def test_misuse_is_one_line_before_anything_is_loaded(tmp_path: Path) -> None:
    model, data, out = a_model(tmp_path / "model"), questions(tmp_path / "data.jsonl"), tmp_path / "out"
    (tmp_path / "there").mkdir()
    cases = [
        (command(model, data, tmp_path / "there"), "is there already"),
        (command(model, data, out, "trainer.learning_rat=1"), "nearest known key is 'trainer.learning_rate'"),
        (command(Path("smollm2-136m/x"), data, out), "fetch it: rollmesh models fetch smollm2-136m/x"),
        (command(tmp_path / "none", data, out), "is no Hugging Face model folder"),
        (command(model, tmp_path / "none.jsonl", out), "cannot be read"),
        (command(model, data, out), "make no example"),
        (["sft", "--out", str(out)], "--data or from --demonstrations"),
        (["sft", "--data", str(data), "--out", str(out)], "needs a model"),
        ([*command(model, data, out), "--threads", "1"], "set trainer.threads"),
        (["sft", "--demonstrations", str(tmp_path), "--out", str(out), "seed=3"], "goes with --data"),
    ]
    for arguments, complaint in cases:
        done = run_forked(arguments, tmp_path)
        lines = done.err.strip().splitlines()
        assert (done.code, complaint in done.err, len(lines)) == (2, True, 1), (arguments, done.err)
    for overrides, complaint in (
        (["data.longest=100000"], "more than the model's context"),
        (["trainer.schedule.kind=linear", "steps=2"], "schedule linear cannot decay"),
        (["trainer.activation_offload=true"], "trainer.activation_offload"),
    ):
        with pytest.raises(UsageError, match=complaint):
            trained(model, data, out, *NAMED, *overrides)
    assert not out.exists() and not [*tmp_path.glob(".making-*")]
