"""Where tables lie, and when they are written."""

import pytest
import torch
from checkpoints import save_target
from huggingface_hub import constants

import deltatree
from deltatree.errors import CheckpointError, MismatchError, OptionError
from deltatree.transitions import TransitionTable, store, table_file, table_for, write_table


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(store, "CPU_TOKENS", 600)
    monkeypatch.setattr(store, "CPU_BATCH", 2)
    monkeypatch.setattr("deltatree.transitions.self_text.SEQUENCE_LENGTH", 150)
    return str(save_target(tmp_path / "target"))


def test_the_first_use_writes_and_the_next_reads(target, tmp_path, monkeypatch, capsys):
    pair = deltatree.load(target)
    options = deltatree.GenerateOptions(tree="transitions")
    pair.transitions(options)
    assert "600 tokens" in capsys.readouterr().err
    (file,) = (tmp_path / "home" / "deltatree" / "transitions").iterdir()
    assert file == table_file(target)
    monkeypatch.setattr(store, "write_self_text", None)  # not again
    again = deltatree.load(target).transitions(options)
    assert again.num_entries == pair.transitions(options).num_entries > 100
    assert pair.transitions(deltatree.GenerateOptions()) is None  # the published trees read none
    assert pair.transitions(deltatree.GenerateOptions(tree="transitions", transitions="none")) is None


def test_other_weights_have_another_table(target, tmp_path):
    other = save_target(tmp_path / "other", seed=1)
    assert table_file(target) != table_file(str(other))
    for weights in other.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(CheckpointError, match="no \\*.safetensors"):
        table_file(str(other))


def test_a_table_of_another_vocabulary_is_refused(target, tmp_path):
    TransitionTable.empty(7, num_buckets=2).save(tmp_path / "small.safetensors", {})
    pair = deltatree.load(target)
    with pytest.raises(MismatchError, match="vocabulary of 7, the target has 131"):
        table_for(str(tmp_path / "small.safetensors"), target, pair.target, pair.tokenizer)


def test_nothing_is_left_of_a_table_that_could_not_be_finished(target, tmp_path, monkeypatch):
    pair = deltatree.load(target)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "write_self_text", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_table(pair.target, pair.tokenizer, tmp_path / "new" / "t.safetensors")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "plain").write_text("a file")
    with pytest.raises(OptionError, match="cannot be written"):
        write_table(pair.target, pair.tokenizer, tmp_path / "plain" / "t.safetensors")


def test_the_shipped_target_brings_its_table():
    file = table_file("shipped")
    assert file.parent == store.PACKAGED and file.stat().st_size < 3e6
    assert len(list(store.PACKAGED.iterdir())) == 1  # none of weights that are no longer shipped
    table = TransitionTable.load(file)
    assert table.vocab_size == 4096 and table.num_bytes <= 64e6
    pair = deltatree.load("shipped", device="cpu")
    before, last, then = pair.tokenizer.encode("\ndef ")[-2:] + pair.tokenizer.encode(" is")[-1:]
    assert table.scores(torch.tensor([before]), torch.tensor([last]), torch.tensor([then])).isfinite().all()
