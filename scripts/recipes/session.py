"""A training from its first step, or a checkpoint, to its last."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from recipes import models
from recipes.dali import DaliLoaders
from recipes.data import Loaders
from recipes.events import EventLog
from recipes.models import (
    SMALL,
    best_of,
    check_classes,
    check_complete,
    load_checkpoint,
    load_weights,
    make_model,
    save_checkpoint,
    start_from,
)
from recipes.options import Place
from torchpipe_py.training import Batch, TrainingError

IGNORED = -100
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Validation(NamedTuple):
    """``accuracy`` is the share of images named rightly, ``loss`` the mean cross entropy."""

    accuracy: float
    loss: float
    images: int

    def is_better_than(self, other: Validation) -> bool:
        """Whether its accuracy is higher, or the same with a lower loss."""
        return (self.accuracy, -self.loss) > (other.accuracy, -other.loss)


def run(args: argparse.Namespace, place: Place) -> None:
    """Train. Prints a line for each epoch on rank 0."""
    with (DaliLoaders if args.dali else Loaders)(args, place) as loaders:
        log = EventLog(args.log) if args.log is not None and place.rank == 0 else None
        Session(args, place, loaders, log).train()


class Session:
    """Model, optimiser, schedule and loaders of one process; ``log`` gets the figures of each epoch."""

    def __init__(
        self, args: argparse.Namespace, place: Place, loaders: Loaders | DaliLoaders, log: EventLog | None = None
    ) -> None:
        self._args, self._place, self._loaders, self._log = args, place, loaders, log
        self.device = loaders.train.devices[0]
        torch.backends.cudnn.benchmark = args.cudnn_benchmark
        self.bare = make_model(args.arch, len(loaders.classes), args.seed)
        if args.weights is not None and not (args.checkpoint is not None and args.checkpoint.exists()):
            self._say(start_from(self.bare, args.weights, args.arch, loaders.classes))
        self.bare = self.bare.to(self.device)
        if self.device.type == "cuda":
            self.bare = self.bare.to(memory_format=torch.channels_last)  # the layout for tensor cores
        self.model = place.wrap(self.bare)
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self.bare = self.model.module  # another module with synchronised batch norms
        self._optimiser = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=1e-2)
        total = max(1, args.epochs * len(loaders.train))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimiser, lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
        )
        self._dtype = PRECISIONS[args.amp]
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=args.amp == "fp16")
        self._steps = self._steps_now = 0
        # Of this epoch: losses, on the device, since reading one waits for the step; samples; seconds.
        self._loss: Any = torch.zeros((), dtype=torch.float64, device=self.device)
        self._samples = 0
        self._timed = 0.0, 0  # seconds of the epoch in this run, and its samples before this run
        self._best: Validation | None = None
        self._resume()

    def train(self) -> None:
        """Epoch by epoch, until all are through or ``--max-steps`` are made."""
        while self._loaders.train.epoch < self._args.epochs:
            if not self._train_epoch():
                self._save()
                self._say(f"stopped after {self._steps_now} steps, in epoch {self._loaders.train.epoch}")
                return
            self._finish_epoch()
        args = self._args
        if args.checkpoint is not None and args.toml is not None:
            file = Path(sys.argv[0]).parent / "recipes" / "models.py"  # as the script was named
            own = f"{file if file.exists() else models.__file__}:{SMALL}"
            best = best_of(args.checkpoint)
            weights = best if best.exists() else args.checkpoint
            command = [own if args.arch == SMALL else args.arch, "--weights", weights]
            command += ["--preprocess", args.val_toml or args.toml]
            self._say(f"to serve it: torchpipe export {shlex.join(map(str, command))}")

    def _say(self, line: str) -> None:
        if self._place.rank == 0:
            print(line, flush=True)

    # -- one epoch ------------------------------------------------------------------------------------------------

    def _train_epoch(self) -> bool:
        """Train an epoch; return ``False`` if it was left early."""
        loader, args = self._loaders.train, self._args
        self.model.train()
        done, quiet = loader.state_dict()["position"], True if self._place.rank else None
        shown = tqdm(initial=done, total=len(loader), desc=f"epoch {loader.epoch}", disable=quiet, leave=False)
        began, before = perf_counter(), self._samples
        with shown:
            for batch in loader:
                self.step(batch)
                shown.update()
                if self._steps_now == args.max_steps:
                    return False
                if args.save_every and self._steps % args.save_every == 0:
                    self._save()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._timed = perf_counter() - began, before
        return True

    def step(self, batch: Batch) -> None:
        """Forward, backward and update on one batch, of a model in training mode."""
        loss = self.forward(batch)
        self.backward(loss)
        self.update()
        count = int(batch.mask.sum())
        self._loss += loss.detach() * count
        self._samples += count

    def forward(self, batch: Batch) -> Any:
        """The loss, a scalar on the device."""
        images, labels = batch
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = self.model(images)
            classes = len(self._loaders.classes)
            if logits.ndim != 2 or logits.shape[1] < classes:
                shape = "x".join(map(str, logits.shape))
                raise TrainingError(f"--arch {self._args.arch}: gives {shape}, expected Nx{classes}, for the classes")
            return masked_loss(logits, labels)

    def backward(self, loss: Any) -> None:
        """Compute the gradients of the weights, of this batch alone."""
        self._optimiser.zero_grad(set_to_none=True)
        self._scaler.scale(loss).backward()

    def update(self) -> None:
        """Change the weights by their gradients, and count the step."""
        self._scaler.step(self._optimiser)
        self._scaler.update()
        self._schedule.step()
        self._steps += 1
        self._steps_now += 1

    def _finish_epoch(self) -> None:
        epoch = self._loaders.train.epoch
        seconds, before = self._timed
        loss, samples, timed = self._place.summed(
            [float(self._loss), self._samples, self._samples - before], self.device
        )
        found = self.validate()
        stats = self._loaders.train.stats()
        loss /= max(1.0, samples)
        self._say(
            f"epoch {epoch}: loss {loss:.4f}; validation loss {found.loss:.4f}, accuracy {found.accuracy:.4f} of "
            f"{found.images} images; {seconds:.2f} s, {timed / seconds:.0f} images/s, "
            f"waited for data {stats['stall_share']:.0%} of the time, bad samples {stats['bad']['count']}"
        )
        if self._log is not None:
            figures = {"loss/train": loss, "loss/val": found.loss, "accuracy/val": found.accuracy}
            self._log.add(self._steps, {**figures, "images_per_s": timed / seconds})
        self._loaders.train.reset()
        self._loss.zero_()
        self._samples = 0
        is_best = self._best is None or found.is_better_than(self._best)
        if is_best:
            self._best = found
        self._save(is_best)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def validate(self) -> Validation:
        """Loss and accuracy over the validation images, each counted once; over all processes."""
        self.model.eval()
        hits = seen = loss = 0.0
        for images, labels in self._loaders.val:
            with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
                logits = self.bare(images)
            hits += float((logits.argmax(dim=1) == labels).sum())
            loss += float(summed_loss(logits.float(), labels))
            seen += float((labels != IGNORED).sum())
        self._loaders.val.reset()
        hits, loss, seen = self._place.summed([hits, loss, seen], self.device)
        return Validation(hits / max(1.0, seen), loss / max(1.0, seen), int(seen))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _save(self, is_best: bool = False) -> None:
        """Write the checkpoint, and the one of the best epoch if that has just ended."""
        if self._args.checkpoint is None:
            return
        loss, samples = self._place.summed([float(self._loss), self._samples], self.device)
        state = {name: part.state_dict() for name, part in self._parts().items()}  # of DALI: a part from each rank
        if self._place.rank == 0:
            state |= {"arch": self._args.arch, "classes": self._loaders.classes, "options": self._kept_options()}
            state |= {"steps": self._steps, "sums": [loss, samples], "best": self._best and list(self._best)}
            if is_best:
                save_checkpoint(best_of(self._args.checkpoint), state)
            save_checkpoint(self._args.checkpoint, state)

    def _resume(self) -> None:
        state = load_checkpoint(self._args.checkpoint)
        if state is None:
            return
        path = self._args.checkpoint
        check_classes(path, state["classes"], self._loaders.classes)
        parts = self._parts()
        check_complete(path, state, [*parts, "steps", "sums"])
        for name, here in self._kept_options().items():
            saved = state.get("options", {}).get(name, here)  # older checkpoints lack them
            if saved != here:
                kept = " ".join(saved) if isinstance(saved, list) else saved
                how = f"go on with --{name} {kept}" if kept != "" else f"go on without --{name}"
                raise TrainingError(f"{path}: was saved with another --{name}; {how}")
        load_weights(path, parts.pop("model"), state["model"], self._args.arch, state.get("arch"))
        try:
            for name, part in parts.items():
                part.load_state_dict(state[name])
        except TrainingError as error:
            raise TrainingError(f"{path}: {error}; go on with the options it was made with") from error
        self._steps = state["steps"]
        self._best = Validation(*state["best"]) if state.get("best") else None  # older checkpoints lack it
        epoch, epochs = self._loaders.train.epoch, self._args.epochs
        where = f"goes on after step {self._steps}, in epoch {epoch} of 0 to {epochs - 1}"
        self._say(f"{path}: {where if epoch < epochs else f'has all {epochs} epochs'}")
        if self._place.rank == 0:
            self._loss += state["sums"][0]
            self._samples = int(state["sums"][1])

    def _kept_options(self) -> dict[str, Any]:
        """Options that a training which goes on must not change, and that are not in the state of a part."""
        return {"lr": self._args.lr, "augment": sorted(self._args.augment)}

    def _parts(self) -> dict[str, Any]:
        return {
            "model": self.bare,
            "optimiser": self._optimiser,
            "schedule": self._schedule,
            "scaler": self._scaler,
            "loader": self._loaders.train,
        }


def masked_loss(logits: Any, labels: Any) -> Any:
    """Mean cross entropy of the samples that are not masked; 0, with a gradient of 0, where all are."""
    return summed_loss(logits, labels) / (labels != IGNORED).sum().clamp(min=1)


def summed_loss(logits: Any, labels: Any) -> Any:
    """The sum of the cross entropies of the samples that are not masked."""
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
