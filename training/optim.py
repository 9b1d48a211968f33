"""The optimiser: Muon for the matrices inside the layers, AdamW for everything else.

Muon (Jordan et al., 2024) makes the update of a matrix orthogonal. On data as small as this it gains more
from each pass over it than AdamW alone, and with decoupled weight decay it overfits later.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Matrices near the orthogonal factor of each matrix of a stack, by a Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon:
    """Muon over matrices, those of one shape updated as one stack so that a step is few kernels."""

    def __init__(self, matrices: list[nn.Parameter], momentum: float = 0.95) -> None:
        shapes: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            shapes[matrix.shape].append(matrix)
        self.groups = list(shapes.values())
        self.momentum = momentum
        self.buffers = [torch.zeros_like(torch.stack([p.data for p in group])) for group in self.groups]

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradients = torch.stack([p.grad if p.grad is not None else torch.zeros_like(p) for p in group])
            buffer.lerp_(gradients, 1 - self.momentum)
            update = orthogonalise(gradients.lerp_(buffer, self.momentum))
            # 0.2 * sqrt(larger side) gives the update the size of an AdamW update, so both share one rate
            scale = 0.2 * math.sqrt(max(update.shape[-2:]))
            data = [p.data for p in group]
            torch._foreach_mul_(data, 1 - lr * weight_decay)
            torch._foreach_add_(data, list((update.float() * (-lr * scale)).unbind()))


class Optimiser:
    """Both optimisers under one learning rate: warm-up, then straight down to zero.

    Also holds the exponential moving average of the weights, which is what gets evaluated and kept.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        weight_decay: float,
        steps: int,
        warmup: int = 100,
        average: float = 0.995,
    ) -> None:
        self.parameters = list(model.parameters())
        inner = [p for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name]
        chosen = {id(p) for p in inner}
        rest = [p for p in self.parameters if id(p) not in chosen]
        self.muon = Muon(inner)
        groups = [
            {"params": [p for p in rest if p.dim() == 2], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.dim() != 2], "weight_decay": 0.0},
        ]
        fused = self.parameters[0].is_cuda
        self.adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10, fused=fused)
        self.lr, self.weight_decay, self.average = lr, weight_decay, average
        self.steps, self.warmup, self.done = steps, min(warmup, steps // 5), 0
        self.averaged = [p.detach().clone() for p in self.parameters]

    def rate(self) -> float:
        """The learning rate of the next step."""
        rising = (self.done + 1) / (self.warmup + 1)
        falling = (self.steps - self.done) / max(1, self.steps - self.warmup)
        return self.lr * min(1.0, rising, falling)

    def step(self) -> None:
        rate = self.rate()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.muon.step(rate, self.weight_decay)
        self.adamw.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None
        self.done += 1
        weight = 1 - min(self.average, self.done / (self.done + 10))
        with torch.no_grad():
            torch._foreach_lerp_(self.averaged, [p.data for p in self.parameters], weight)

    @torch.no_grad()
    def swap_average(self) -> None:
        """Exchange the weights with their average: once to evaluate, once more to go on."""
        for parameter, averaged in zip(self.parameters, self.averaged, strict=True):
            held = parameter.data.clone()
            parameter.data.copy_(averaged)
            averaged.copy_(held)
