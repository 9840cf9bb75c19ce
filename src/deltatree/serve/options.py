"""What whoever runs the server may choose. Free of the web stack, so that mistakes are reported before it loads."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltatree.decode.options import GenerateOptions
from deltatree.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the server, checked when made. Raises OptionError."""

    model_name: str = "deltatree"  # what clients call the model
    defaults: GenerateOptions = field(default_factory=GenerateOptions)  # method, budget, tree, and max_new_tokens
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    api_key: str | None = None  # None asks for none
    max_queue: int = 64  # requests that may wait; beyond it 429
    timeout_seconds: float = 600.0  # of one request, waiting included
    max_body_bytes: int = 4 << 20
    max_choices: int = 16  # answers of one request: n, times the prompts
    keep_conversations: int = 1  # states kept for a next turn; 0 keeps none
    grace_seconds: float = 30.0  # at shutdown, for requests that run
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_queue", 1), ("max_body_bytes", 1024), ("max_choices", 1), ("keep_conversations", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name}={value!r} is not possible; give a whole number of at least {least}")
        if not 0 <= self.port < 65536:
            raise OptionError(f"port={self.port} is not possible; give one from 1 to 65535, or 0 for a free one")
        for name in ("timeout_seconds", "grace_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise OptionError(f"{name}={getattr(self, name)!r} is not possible; give a positive number of seconds")
        if not self.model_name.strip():
            raise OptionError("model_name is empty; give the name that clients will ask for")
        if self.api_key is not None and not self.api_key:
            raise OptionError("api_key is empty; give a key, or none at all")
