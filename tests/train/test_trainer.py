"""Training runs that finish, stop, fail and resume."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specengine.train.loss_passes import Diverged
from specengine.train.run_log import read_log
from specengine.train.run_state import load_state
from tests.train.runs import SHORT, objective, trainer

THREE = replace(SHORT, save_steps=3)


def state_after(out: Path) -> dict:
    return load_state(out / "checkpoints")


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def stop_at(step: int, number: int = signal.SIGTERM):
    def show(progress) -> None:
        if progress.step == step and "held_out" not in progress.line:
            os.kill(os.getpid(), number)

    return show


@pytest.mark.full
def test_a_run_learns_its_dialogues(tmp_path):
    trainer(tmp_path / "out", replace(SHORT, epochs=30, learning_rate=5e-3, evaluate_steps=1000)).run()
    steps = [line for line in read_log(tmp_path / "out/training.jsonl") if "held_out" not in line]
    assert max(steps[0]["agreement"]) < 0.3
    assert min(steps[-1]["agreement"]) > 0.6
    assert all(last < 0.7 * first for first, last in zip(steps[0]["loss"], steps[-1]["loss"], strict=True))


def test_a_parameter_learns_at_its_own_rate(tmp_path):
    made = objective()
    before = {name: p.detach().clone() for name, p in made.network.named_parameters() if p.requires_grad}
    still = list(before)[2]
    made.rate_of = lambda name: 0.0 if name == still else 1.0
    trainer(tmp_path / "out", made=made).run()
    same_after = {name for name, p in made.network.named_parameters() if name in before and p.equal(before[name])}
    assert same_after == {still}


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_stopped_by_a_signal_goes_on_bit_for_bit(tmp_path, number):
    whole = trainer(tmp_path / "whole").run()
    assert whole.steps >= 6
    assert trainer(tmp_path / "parts", show=stop_at(4, number)).run().ended == "stopped"
    assert state_after(tmp_path / "parts")["step"] == 4
    assert trainer(tmp_path / "parts", made=objective(seed=99)).run().ended == "finished"
    assert same(state_after(tmp_path / "whole"), state_after(tmp_path / "parts"))
    assert read_log(tmp_path / "whole/training.jsonl") == read_log(tmp_path / "parts/training.jsonl")


def test_a_killed_run_goes_on_bit_for_bit_from_its_last_checkpoint(tmp_path):
    class Killed(BaseException):
        pass

    def die(progress) -> None:
        if progress.step == 5:
            raise Killed

    trainer(tmp_path / "whole").run()
    with pytest.raises(Killed):
        trainer(tmp_path / "parts", show=die).run()
    assert state_after(tmp_path / "parts")["step"] == 3
    trainer(tmp_path / "parts", made=objective(seed=99)).run()
    assert same(state_after(tmp_path / "whole"), state_after(tmp_path / "parts"))
    assert read_log(tmp_path / "whole/training.jsonl") == read_log(tmp_path / "parts/training.jsonl")


def test_another_seed_gives_another_network(tmp_path):
    trainer(tmp_path / "one").run()
    trainer(tmp_path / "other", made=objective(seed=1)).run()
    assert not same(state_after(tmp_path / "one")["network"], state_after(tmp_path / "other")["network"])


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (
            float("nan"),
            Diverged,
            r"not a finite number in step 3; resume from .*checkpoint-00000002.pt at a lower rate",
        ),
        (torch.OutOfMemoryError("full"), MemoryError, r"out of memory in step 3 with passes of 96 rows; resume from "),
        (RuntimeError("can't allocate memory"), MemoryError, r"out of memory in step 3"),
    ],
)
def test_a_step_that_fails_leaves_the_state_before_it(tmp_path, failure, error, message):
    made, steps = objective(), []
    plain = made.loss

    def failing(batch):
        loss, report = plain(batch)
        if len(steps) == 2 and torch.is_grad_enabled():
            if isinstance(failure, Exception):
                raise failure
            loss = loss * failure
        return loss, report

    made.loss = failing
    config = replace(SHORT, save_steps=100, evaluate_steps=100)
    with pytest.raises(error, match=message):
        trainer(tmp_path / "out", config, made=made, show=lambda p: steps.append(p.step)).run()
    state = state_after(tmp_path / "out")
    assert state["step"] == 2
    assert all(tensor.isfinite().all() for tensor in state["network"].values())
    trainer(tmp_path / "whole", config).run()
    trainer(tmp_path / "out", config).run()
    assert same(state_after(tmp_path / "out"), state_after(tmp_path / "whole"))


def test_other_errors_of_a_step_pass_through(tmp_path):
    made = objective()
    made.loss = lambda batch: torch.ones(2) @ torch.ones(3)
    with pytest.raises(RuntimeError, match="size"):
        trainer(tmp_path / "out", made=made).run()


def test_the_newest_two_checkpoints_are_kept_and_a_damaged_one_is_passed_over(tmp_path):
    trainer(tmp_path / "out", replace(SHORT, save_steps=1)).run()
    older, newest = sorted((tmp_path / "out/checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:1000])
    assert state_after(tmp_path / "out") is not None
    older.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read"):
        trainer(tmp_path / "out").run()


def test_a_run_of_other_options_is_refused(tmp_path):
    trainer(tmp_path / "out", about={"drafter": "one", "seed": 0}).run()
    with pytest.raises(ValueError, match=r"holds another run: \{'drafter': 'one'\}, expected \{'drafter': 'two'\}"):
        trainer(tmp_path / "out", about={"drafter": "two", "seed": 0}).run()


@pytest.mark.full
def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    trainer(tmp_path / "out").run()
    published = []
    outcome = trainer(tmp_path / "out", publish=lambda report, tokens: published.append(tokens)).run()
    assert (outcome.ended, outcome.step, published) == ("finished", outcome.steps, [])


@pytest.mark.full
def test_only_better_drafters_are_published(tmp_path):
    taus = []
    trainer(tmp_path / "out", replace(SHORT, epochs=6), publish=lambda report, tokens: taus.append(report.tau)).run()
    assert taus
    assert taus == sorted(taus)
    tested = [line["held_out"]["tau"] for line in read_log(tmp_path / "out/training.jsonl") if "held_out" in line]
    assert max(tested) == pytest.approx(taus[-1], abs=1e-3)


_PART = """
import sys
from pathlib import Path
from specengine.train.process_group import ProcessGroup
from tests.train.runs import CPU, trainer
with ProcessGroup.joined(CPU) as processes:
    assert processes.size == 2
    trainer(Path(sys.argv[1]), processes=processes).run()
"""


@pytest.mark.full
def test_two_processes_train_as_one_does(tmp_path):
    trainer(tmp_path / "one").run()
    (tmp_path / "part.py").write_text(_PART)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*launch, str(tmp_path / "part.py"), str(tmp_path / "two")],
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )
    one, two = (state_after(tmp_path / name)["network"] for name in ("one", "two"))
    for name in one:  # sums differ in order, and at the start Adam turns any difference into a step
        torch.testing.assert_close(one[name], two[name], rtol=1e-2, atol=1e-3)
