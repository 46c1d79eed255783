"""What becomes of a run whose gradient was not finite, or whose loss jumped: its end, or the way back.

[Note: a roll-back]
What makes a loss jump is often not the batch it jumps at, but those before it. So a roll-back goes to the newest good
checkpoint, and on from there behind the bad step: every sample read since is left out, as PaLM's authors did (Chowdhery
et al. 2022, arXiv 2204.02311, section 5.1). Steps, and with them the learning rate, go on from the checkpoint's. Which
samples are left out is on the disk before the run goes on, so that whoever resumes it leaves them out as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from megazero import restore
from megazero.checkpoint import raise_together
from megazero.diagnose import FiniteWatch, earliest
from megazero.errors import DivergenceError

if TYPE_CHECKING:
    from megazero.engine import BatchSource, Engine


class Divergence(NamedTuple):
    """A bad step and what it read. ``cause`` and ``remedy`` are for the user; the latter is "" where none is known."""

    step: int
    samples: range
    cause: str
    remedy: str

    def error(self, further: str = "") -> DivergenceError:
        """For a run that ends. ``further``: a sentence."""
        sentences = (
            f"step {self.step}: {self.cause}",
            "Weights are those before this step; nothing was saved after it",
            f"It read samples {self.samples[0]} to {self.samples[-1]}",
            further,
            self.remedy,
        )
        return DivergenceError(". ".join(sentence for sentence in sentences if sentence))


def find_divergence(engine: Engine, source: BatchSource) -> Divergence | None:
    """Where the flag of a bad step is up: what it was, the same on every rank. Waits for the device."""
    optimizer, stage = engine.optimizer, engine.stage
    step = int(optimizer.bad_step)
    if not step:
        return None
    samples = engine.samples_of(step)
    if optimizer.bad_steps is not None and (spike := optimizer.bad_steps.spike()):
        return Divergence(step, samples, f"{spike} (watch.loss_spike)", "")
    watch = FiniteWatch(stage.model)
    with watch.watching():
        engine.run_again(source, step)
    stage.sharded.wait_for_gradients()
    where = earliest(watch.finding(stage), engine.topology)
    remedy = "Lower optimizer.lr, lengthen optimizer.warmup_steps, or look at these samples"
    return Divergence(step, samples, f"the gradient is not finite, {where}", remedy)


def roll_back(engine: Engine, found: Divergence) -> None:
    """Load the newest good checkpoint, and have the run go on behind what the bad step read. No save is under way.

    Raises DivergenceError where there were too many, or there is no checkpoint to go back to.
    """
    course, limit = engine.course, engine.config.watch.max_rollbacks
    if len(course.left_out) >= limit:
        raise found.error(f"It comes after {limit} roll-backs (watch.max_rollbacks)")
    engine.stage.sharded.rest()
    restored = restore.load_newest(engine)
    if restored is None:
        raise found.error("There is no checkpoint yet to go back to")
    own = restore.group_of(engine).all_gather(engine.telemetry.run_id)[0]  # rank 0's is the run's
    if restored.run_id not in (None, own):
        further = f"There is no checkpoint yet to go back to: those in {engine.config.checkpoint.dir} are another run's"
        raise found.error(further)
    engine.optimizer.bad_step.zero_()
    samples = range(course.begin(engine.consumed_samples), found.samples.stop)
    course.leave_out([samples])
    engine.consumed_samples = course.begin(samples.start)
    raise_together(restore.group_of(engine), restore.record_left_out(engine, restored.run_id))
    for message in restored.messages:
        engine.telemetry.event("start", engine.step, message)
    text = (
        f"step {found.step}: {found.cause}; rolled back to step {engine.step}, without samples {samples[0]} to "
        f"{samples[-1]} (watch.bad_step, {len(course.left_out)} of at most {limit})"
    )
    what = {"bad_step": found.step, "first": samples[0], "last": samples[-1]}
    engine.telemetry.event("rollback", engine.step, text, **what)
