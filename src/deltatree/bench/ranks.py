"""Data parallel over prompts: the processes that `torchrun` started. Each decodes its share alone, rank 0 gathers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from deltatree.errors import OptionError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others; by default it is alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Ranks:
        """As `torchrun` tells it. Raises OptionError."""
        if "WORLD_SIZE" not in environment:
            return cls()
        try:
            return cls(*(int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
        except (KeyError, ValueError) as error:
            raise OptionError(
                "WORLD_SIZE is set, but RANK or LOCAL_RANK is not; start several processes with torchrun"
            ) from error

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def open(self) -> None:
        """Meet the others. Only small Python objects pass between processes, so gloo serves GPUs too."""
        if self.size > 1:
            import torch.distributed as dist

            dist.init_process_group("gloo", timeout=timedelta(days=2))  # the fastest rank waits for the slowest

    def close(self) -> None:
        if self.size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()

    def share(self, value):
        """Rank 0's value, everywhere."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def own(self, items: Sequence) -> list:
        """This process's share, in turns."""
        return list(items[self.rank :: self.size])
