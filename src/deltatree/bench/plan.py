"""What a bench run measures: which arms, with which options. Free of torch, so that a mistake is told before anything loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from deltatree.decode.options import AUTO, METHODS, GenerateOptions
from deltatree.errors import OptionError

DEFAULTS = GenerateOptions()


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding that is compared: a method with its budget."""

    method: str
    budget: int | str  # drafted nodes a round: 0 for ar, the drafter's depth for dflash
    tree: str = DEFAULTS.tree  # policy of ddtree, where arms of one run differ in it

    @property
    def label(self) -> str:
        """For tables and charts, in words."""
        tree = "" if self.tree == DEFAULTS.tree else f" {self.tree}"
        return {"ar": "plain", "dflash": "DFlash"}.get(self.method, f"DDTree {self.budget}{tree}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """Options of a bench run, checked when made. Raises OptionError.

    Plain decoding always runs: it is the baseline of every speedup and the oracle of every verdict.
    """

    methods: tuple[str, ...] = METHODS
    budgets: tuple[int | str, ...] = (16, 64, AUTO)  # drafted nodes a round; each is one ddtree arm
    tree: str = DEFAULTS.tree
    transitions: str = DEFAULTS.transitions  # for trees of that name
    max_new_tokens: int = DEFAULTS.max_new_tokens
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # of the first request; each request has its own, the same in every arm
    ignore_eos: bool = False
    thinking: bool = False  # given to the chat template; off in the published evaluation
    raw: bool = False  # prompts without the chat template; one turn only
    stage_samples: int = 0  # samples that are decoded a second time with stage timing
    noise_samples: int = 2  # samples on which the numeric noise is measured

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise OptionError(f"method {method!r} is not known; possible are {', '.join(METHODS)}")
        for name in ("stage_samples", "noise_samples"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise OptionError(f"{name}={value!r} is not possible; give a whole number of at least 0")
        if "ddtree" in self.methods and not self.budgets:
            raise OptionError("method 'ddtree' needs at least one budget, e.g. --budgets 16,64,auto")
        for arm in self.arms(depth=0):
            self.options(arm)

    def arms(self, depth: int) -> list[Arm]:
        """All arms, plain decoding first. depth: the drafter's, which is dflash's budget."""
        arms = [Arm("ar", 0)]
        if "dflash" in self.methods:
            arms.append(Arm("dflash", depth))
        if "ddtree" in self.methods:
            arms += [Arm("ddtree", budget) for budget in dict.fromkeys(self.budgets)]
        return arms

    @property
    def needs_drafter(self) -> bool:
        return any(method != "ar" for method in self.methods)

    def options(self, arm: Arm, request: int = 0) -> GenerateOptions:
        """Options of one generation. request: its running number, which moves the seed."""
        return GenerateOptions(
            max_new_tokens=self.max_new_tokens,
            method=arm.method,
            budget=arm.budget,
            tree=self.tree,
            transitions=self.transitions,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed + request,
            ignore_eos=self.ignore_eos,
        )

    @property
    def is_greedy(self) -> bool:
        return self.options(Arm("ar", 0)).is_greedy

    def as_dict(self) -> dict:
        """For run.json."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def parse_methods(text: str) -> tuple[str, ...]:
    """`ar,dflash,ddtree`, in any order. The plan judges the names."""
    return tuple(dict.fromkeys(_items(text, "methods", ",".join(METHODS))))


def parse_budgets(text: str) -> tuple[int | str, ...]:
    """`16,64,auto`: whole numbers of drafted nodes, or `auto`. Raises OptionError."""
    budgets: list[int | str] = []
    for item in _items(text, "budgets", "16,64,auto"):
        if item != AUTO and not item.isdecimal():
            raise OptionError(
                f"budget {item!r} is not a whole number of drafted nodes, nor auto; write e.g. --budgets 16,64,auto"
            )
        budgets.append(item if item == AUTO else int(item))
    return tuple(dict.fromkeys(budgets))


def _items(text: str, name: str, example: str) -> Sequence[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise OptionError(f"{name} {text!r} has an empty entry; write e.g. --{name} {example}")
    return items
