"""Muon for the matrices, Adam for the rest, a schedule that knows only the time left, and a step as a CUDA graph."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrices by a quintic Newton-Schulz iteration (Jordan et al. 2024, "Muon").

    matrices: [..., M, N]. Returns a bfloat16 tensor of the same shape, singular values near 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; parameters of one shape are stacked into one product."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.same_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for param in params:
            self.same_shape.setdefault(param.shape, []).append(param)

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        for shape, params in self.same_shape.items():
            grads = [p.grad for p in params]
            buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            update = orthogonalise(torch.stack(torch._foreach_lerp(grads, buffers, momentum)))
            update = update.to(params[0].dtype) * max(1.0, shape[-2] / shape[-1]) ** 0.5
            torch._foreach_mul_(params, 1 - lr * decay)
            torch._foreach_add_(params, list(update.unbind()), alpha=-lr)


class TimedOptimizer:
    """Both optimizers under one trapezoid over the seconds given: warm up, hold, fall to zero."""

    def __init__(
        self, model: nn.Module, *, seconds: float, matrix_lr: float, other_lr: float, decay_from: float = 0.4
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        is_matrix = {name: p.ndim >= 2 and min(p.shape[-2:]) >= 16 and "embed" not in name for name, p in named}
        matrices = [p for name, p in named if is_matrix[name]]
        others = [p for name, p in named if not is_matrix[name]]
        self.optimizers = [
            Muon(matrices, lr=matrix_lr),
            torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda),
        ]
        self.base = [matrix_lr, other_lr]
        self.seconds, self.decay_from, self.steps = seconds, decay_from, 0
        self.start = time.monotonic()

    @property
    def progress(self) -> float:
        return (time.monotonic() - self.start) / self.seconds

    def step(self) -> None:
        self.steps += 1
        fall = max(0.0, (1 - self.progress) / (1 - self.decay_from))
        factor = min(1.0, self.steps / 50, fall)
        for optimizer, lr in zip(self.optimizers, self.base, strict=True):
            optimizer.param_groups[0]["lr"] = lr * factor
            optimizer.step()


def repeat_step(
    step: Callable[[Tensor], tuple[Tensor, ...]], model: nn.Module, example: Tensor, *, graph: bool
) -> Callable:
    """`step` (forward and backward) for many inputs shaped like `example`, each leaving fresh gradients in `model`.

    Small models spend their time on launches; a CUDA graph of the whole step takes them away.
    """

    def plain(inputs: Tensor) -> tuple[Tensor, ...]:
        model.zero_grad(set_to_none=True)
        return step(inputs)

    if not graph:
        return plain
    static = example.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            plain(static)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)  # captured so, a replay overwrites gradients rather than adding to them
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        outputs = step(static)

    def replay(inputs: Tensor) -> tuple[Tensor, ...]:
        static.copy_(inputs)
        captured.replay()
        return tuple(output.clone() for output in outputs)

    return replay
