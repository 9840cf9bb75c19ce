"""What a person sees: answers, JSON, and one sentence with exit code 2 for everything that cannot be done."""

import importlib
import json
import logging
import subprocess
import sys

import pytest
from checkpoints import drafter_config, save_drafter, save_target


def run(*arguments, cwd=None, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "deltatree", *map(str, arguments)], capture_output=True, text=True, cwd=cwd, **kwargs
    )


@pytest.fixture(scope="module")
def shipped():
    import deltatree

    return deltatree.load("shipped", device="cpu")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "--wibble"], "No such option"),
        (["generate"], "exactly one of --prompt and --prompt-file"),
        (["generate", "--prompt", "x", "--method", "beam"], "possible are ar, dflash, ddtree"),
        (["generate", "--prompt", "x", "--tree", "star"], "possible are chain, best-first"),
        (["generate", "--prompt", "x", "--budget", "-1"], "budget=-1 is not possible"),
        (["generate", "--prompt", "x", "--budget", "many"], "not a whole number of drafted nodes; try 32, or auto"),
        (["generate", "--prompt", "x", "--trace", "absent/trace.jsonl"], "absent/trace.jsonl' cannot be written"),
        (["generate", "--prompt", "x", "--max-new-tokens", "0"], "at least 1"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature=-1"),
        (["generate", "--prompt-file", "absent.txt"], "absent.txt cannot be read"),
        (["generate", "--prompt-file", "latin1.txt"], "latin1.txt is not UTF-8 (byte 1)"),
        (["generate", "--prompt", "x", "--target", "./nowhere"], "neither an existing folder nor a hub id"),
        (["inspect", "./nowhere"], "neither an existing folder nor a hub id"),
        (["demo", "--chart", "absent/chart.png"], "does not exist or cannot be written"),
        (["demo", "--chart", "chart.txt"], "no picture"),
        (["frobnicate"], "No such command"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, sentence, tmp_path, run_here, monkeypatch):
    (tmp_path / "latin1.txt").write_bytes("né".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    done = run_here(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latin1.txt"]  # nothing half-written


@pytest.mark.parametrize(
    ("device", "sentence"),
    [("cpu", "needs a GPU, and the device is cpu"), ("cuda", "needs flash-linear-attention; pip install")],
)
@pytest.mark.parametrize(
    "arguments",
    [["generate", "--prompt", "x"], ["bench", "--dataset", "demo", "--out", "runs"], ["serve"]],
    ids=lambda a: a[0],
)
def test_flash_linear_attention_that_cannot_run_is_refused(
    arguments, device, sentence, run_here, monkeypatch, tmp_path
):
    """In this process, which can be told that it has a GPU, and that a package is not there."""
    import torch

    if arguments == ["serve"]:
        for package in ("uvicorn", "fastapi", "prometheus_client"):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)  # the server's log
    done = run_here(*arguments, "--device", device, "--prefill", "fla")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("error: ") == 1 and f"error: prefill='fla' {sentence}" in done.stderr.splitlines()[-1]


def test_prompts_that_only_the_target_can_judge(run_here):
    for arguments, sentence in [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "word " * 5000, "--raw"], "the target's context is 4096"),
    ]:
        done = run_here("generate", *arguments)
        assert (done.returncode, done.stdout) == (2, "") and sentence in done.stderr


def test_generate_streams_the_text_and_ends_with_figures():
    done = run("generate", "--prompt", "Ann has 3 apples and eats 1.", "--max-new-tokens", "12")
    assert done.returncode == 0 and done.stdout.strip()
    assert "acceptance length" in done.stderr


def test_json_is_one_object_and_methods_agree(run_here, shipped, monkeypatch):
    monkeypatch.setattr(importlib.import_module("deltatree.cli.generate"), "load_pair", lambda *args: shipped)
    answers = {}
    for method in ("ar", "dflash", "ddtree"):
        arguments = ("--prompt", "Ann has 3 apples.", "--max-new-tokens", "24", "--method", method, "--json")
        answers[method] = json.loads(run_here("generate", *arguments).stdout)
    fields = {"token_ids", "text", "acceptance_lengths", "rounds", "tokens_per_second", "stop_reason"}
    assert fields <= set(answers["ddtree"])
    assert answers["ar"]["token_ids"] == answers["dflash"]["token_ids"] == answers["ddtree"]["token_ids"]
    assert answers["ddtree"]["rounds"] == len(answers["ddtree"]["acceptance_lengths"]) < answers["ar"]["rounds"]


@pytest.mark.parametrize("cap", [1, 2, 3, 8, 9])
def test_B22_exactly_the_tokens_asked_for(cap, capsys, monkeypatch, shipped):
    """In this process, because the shipped pair's drafter is right often enough and loading takes its time."""
    commands = importlib.import_module("deltatree.cli.generate")
    monkeypatch.setattr(commands, "load_pair", lambda *args: shipped)
    prompt = "Ann has 3 apples and buys 4 more."
    options = dict(prompt=prompt, max_new_tokens=cap, ignore_eos=True, json=True)
    commands.generate(**options)
    done = json.loads(capsys.readouterr().out)
    assert len(done["token_ids"]) == cap and done["stop_reason"] == "length"
    assert done["token_ids"] == shipped.generate(prompt, max_new_tokens=9, method="ar", ignore_eos=True).token_ids[:cap]


def test_B47_a_drafter_that_does_not_exist_is_no_silent_plain_decoding():
    done = run("generate", "--prompt", "x", "--drafter", "./no-such-drafter")
    assert done.returncode == 2 and done.stdout == ""
    assert "drafter './no-such-drafter' is neither an existing folder nor a hub id" in done.stderr


def test_inspect_tells_sizes_and_why_a_pair_is_refused(tmp_path, run_here):
    target = save_target(tmp_path / "target")
    report = json.loads(run_here("inspect", target, "--json").stdout)["target"]
    assert report["layers"] == {"linear_attention": 6, "full_attention": 2}
    assert report["copied_state_bytes_per_node"] == 6 * 6 * 16 * 16 * 4
    drafter = save_drafter(tmp_path / "drafter", drafter_config(hidden_size=32))
    done = run_here("inspect", target, "--drafter", drafter)
    assert done.returncode == 2 and "refused" in done.stdout and "hidden size 32" in " ".join(done.stdout.split())
    fitting = run_here("inspect", "shipped", "--drafter", "shipped")
    assert fitting.returncode == 0 and "block size" in fitting.stdout


def test_inspect_measures_noise_when_asked(run_here):
    done = run_here("inspect", "shipped", "--numerics", "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr
    noise = json.loads(done.stdout)["noise"]
    assert list(noise) == ["2", "8", "16", "32", "64"] and all(0 < size < 1e-3 for size in noise.values())
