"""Simulated training that is healthy, and looks like what people train. Seeds make it repeatable."""
import math

import numpy as np

from instrument.record import Record

CELLS = ("blocks.0.relu", "blocks.1.relu", "head")
WEIGHTS = ("blocks.0.weight", "blocks.1.weight", "blocks.1.bias", "head.weight")


def warm_up_and_cosine(step, steps, peak=1e-3, warm_up=100):
    if step <= warm_up:
        return peak * step / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def step_decay(step, steps, peak=0.1):
    return peak * 0.1 ** (3 * step // steps)


def constant(step, steps, peak=1e-4):
    return peak


def language_model(random, t):
    """Cross-entropy from ln 50,000 on, which falls by a power law; large batches."""
    return (3 + 7.8 * (1 + t / 30) ** -0.5) * math.exp(0.03 * random.normal()), 5 * (1 + t / 20) ** -0.5, 0.2


def classifier(random, t):
    """Small batches that are learned by heart: the losses come to vary by factors of ten."""
    noise = 0.1 + 1.2 * (1 - math.exp(-t / 500))
    return (2.3 * math.exp(-t / 300) + 0.005) * math.exp(noise * random.normal()), 2 * math.exp(-t / 800) + 0.02, noise


def fine_tuning(random, t):
    return (0.9 + 0.3 * math.exp(-t / 200)) * math.exp(0.3 * random.normal()), 1.0, 0.5


def likelihood(random, t):
    """A log-likelihood of densities, which becomes negative."""
    return 3 - 6 * (1 - math.exp(-t / 400)) + 0.3 * random.normal(), 3 * math.exp(-t / 600) + 0.5, 0.3


def plateau(random, t):
    return 0.7 + 0.01 * random.normal(), 0.1, 0.1


KINDS = {"language model": (language_model, warm_up_and_cosine), "classifier": (classifier, step_decay),
         "fine-tuning": (fine_tuning, constant), "likelihood": (likelihood, warm_up_and_cosine),
         "plateau": (plateau, constant)}


def healthy_run(kind, seed, *, steps=1500, every=1, loss_scale=True, validate_every=200):
    """The records of one run, training and validation."""
    random = np.random.default_rng([seed, *kind.encode()])
    curve, schedule = KINDS[kind]
    scale, overflows_left = 2.0 ** 24, 9 if loss_scale else 0
    pace = 0.2 * random.uniform(0.5, 2)
    total, number, best = 0.0, 0, math.inf
    for t in range(1, steps + 1):
        loss, level, sigma = curve(random, t)
        norm = level * math.exp(sigma * random.normal())
        overflow = overflows_left > 0 or (loss_scale and t % 400 == 0)
        overflows_left -= overflows_left > 0
        total, number = total + loss, number + 1
        values = {"loss": loss, "loss/aux": 0.1 * loss, "grad/norm": math.inf if overflow else norm,
                  "weight/norm": 30 + 0.01 * t, "grad/nonfinite": 2.0 * overflow}
        if loss_scale:
            values.update(loss_scale=scale, overflow=float(overflow), skipped=float(overflow))
            scale = scale / 2 if overflow else scale * 2 if t % 399 == 0 else scale
        shares = random.dirichlet(np.full(len(WEIGHTS), 3.0))
        for name, share in zip(WEIGHTS, shares):
            values[f"grad/norm/{name}"] = math.inf if overflow else norm * math.sqrt(share)
            values[f"weight/norm/{name}"] = 0.01 * t if name.endswith("bias") else 15.0
            values[f"update/ratio/{name}"] = 0.0 if overflow else 1e-3 * random.uniform(0.3, 3)
        for depth, cell in enumerate(CELLS):
            rms = (1 + depth) * math.exp(0.1 * random.normal())
            values.update({f"activation/count/{cell}": 1.0, f"activation/mean/{cell}": 0.1 * random.normal(),
                           f"activation/rms/{cell}": rms, f"activation/absmax/{cell}": rms * random.uniform(4, 8),
                           f"activation/nonfinite/{cell}": 0.0})
            if cell.endswith("relu"):
                values[f"activation/zero_fraction/{cell}"] = random.uniform(0.5, 0.98)
        values["learning_rate"] = schedule(t, steps)
        values["step_time"] = pace * (random.lognormal(0, 0.2) + 5 * (t % 250 == 0)) + 30 * (t == 1)
        values["data_wait_fraction"] = min(random.exponential(0.1), 1.0)
        if t == 1 or t % every == 0 or t == steps:
            yield Record(t, float(t), values)
        if t % validate_every == 0:
            best = min(best, total / number)
            yield Record(t, float(t), {"val/loss": best * (1.05 + 0.003 * random.normal()), "val/accuracy": 0.5})
            total, number = 0.0, 0
