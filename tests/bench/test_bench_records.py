"""Records on disk: whole lines, and one sentence for what the disk refuses."""

from __future__ import annotations

import json
import resource
from dataclasses import replace

import pytest
from bench_doubles import PLAN, SAMPLES, table_pair

from deltatree.bench import read_records, run_bench
from deltatree.bench.records import Divergence, Record, RecordWriter, merge_ranks, records_file
from deltatree.errors import RecordError

RECORD = Record(
    dataset="sums", sample="a", turn=0, method="ddtree", budget=8, tree="best-first", thinking=False, prompt_length=3,
    token_ids=[1, 2, 3, 4, 5, 6], prefill_seconds=0.1, decode_seconds=0.5, acceptance_lengths=[3, 1, 2], num_drafted=24,
    stop_reason="length", verdict="near_tie", divergence=Divergence(4, 5, 9, 0.01), stage_seconds={"verify": 0.2},
)  # fmt: skip


def test_a_record_survives_the_disk_and_carries_its_derived_figures(tmp_path):
    file = records_file(tmp_path)
    writer = RecordWriter(file)
    writer.append(RECORD)
    assert read_records(file) == [RECORD]  # at once, before the file is closed
    row = json.loads(file.read_text())
    assert (row["tokens"], row["rounds"], row["accepted_by_depth"]) == (6, 3, [2, 1])
    assert row["acceptance_length"] == 2 and row["tokens_per_second"] == 10
    writer.close()


def test_a_torn_last_line_is_passed_over_and_cut_off_before_the_next_one(tmp_path):
    file = records_file(tmp_path)
    line = RECORD.to_line()
    file.write_bytes(line + line[:40])
    assert read_records(file) == [RECORD]
    writer = RecordWriter(file)
    writer.append(replace(RECORD, turn=1))
    writer.close()
    assert [record.turn for record in read_records(file)] == [0, 1]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    file = records_file(tmp_path)
    file.write_bytes(RECORD.to_line() + b"{}\n" + RECORD.to_line())
    with pytest.raises(RecordError, match=r"records.jsonl, line 2 is no bench record"):
        read_records(file)


def test_files_of_single_processes_are_merged_once_even_if_the_merge_was_interrupted(tmp_path):
    others = [replace(RECORD, sample=name) for name in "abc"]
    records_file(tmp_path).write_bytes(others[0].to_line())
    for rank, record in enumerate(others[1:]):  # one of them was merged already
        records_file(tmp_path, rank, 2).write_bytes(others[0].to_line() + record.to_line())
    assert merge_ranks(tmp_path) == read_records(records_file(tmp_path)) == others
    assert [file.name for file in tmp_path.iterdir()] == ["records.jsonl"]


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(tmp_path):
    run_bench(table_pair(), SAMPLES[:1], PLAN)  # whatever a first run writes elsewhere is written
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, hard[1]))
    try:
        with pytest.raises(RecordError, match=r"cannot write .*records.jsonl .*records written before are whole"):
            run_bench(table_pair(), SAMPLES, PLAN, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, hard)
    before = read_records(records_file(tmp_path))
    assert before
    after = run_bench(table_pair(), SAMPLES, PLAN, tmp_path).records
    assert after[: len(before)] == before and len({record.key for record in after}) == len(after) == 16


def test_a_folder_that_cannot_be_written_or_is_not_ours_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot write .*file/out"):
        run_bench(table_pair(), SAMPLES, PLAN, tmp_path / "file" / "out")
    (tmp_path / "records.jsonl").write_bytes(RECORD.to_line())
    with pytest.raises(RecordError, match=r"records without their run.json"):
        run_bench(table_pair(), SAMPLES, PLAN, tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RecordError, match=r"run.json cannot be read"):
        run_bench(table_pair(), SAMPLES, PLAN, tmp_path)
    assert read_records(records_file(tmp_path)) == [RECORD]
