"""`deltatree serve`: an OpenAI-compatible server over one pair."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from deltatree.cli.common import (
    BackendOption,
    BudgetOption,
    ContextOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    PrefillOption,
    TargetOption,
    load_pair,
    parse_budget,
    progress,
)
from deltatree.decode.options import AUTO, DEFAULT_BUDGET, METHODS, TREES, GenerateOptions
from deltatree.errors import OptionError
from deltatree.files import SHIPPED


def serve(
    target: TargetOption = SHIPPED,
    drafter: DrafterOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    model_name: Annotated[str | None, typer.Option(help="What clients call it. [default: the target's name]")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="DELTATREE_API_KEY", show_envvar=True, help="Ask clients for this key.")
    ] = None,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "ddtree",
    budget: BudgetOption = DEFAULT_BUDGET,
    tree: Annotated[str, typer.Option(help=f"Tree policy of ddtree: {', '.join(TREES)}.")] = "best-first",
    max_new_tokens: Annotated[int, typer.Option(help="Where a request names no limit of its own.")] = 1024,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; beyond it 429.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds for one request, waiting included.")] = 600.0,
    max_body_bytes: Annotated[int, typer.Option(help="Size limit of a request.")] = 4 << 20,
    keep_conversations: Annotated[int, typer.Option(help="Conversations whose state is kept for a next turn.")] = 1,
    grace: Annotated[float, typer.Option(help="Seconds that running requests get at shutdown.")] = 30.0,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts to the log.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    backend: BackendOption = None,
    context_length: ContextOption = None,
    prefill: PrefillOption = "own",
) -> None:
    """Serve /v1/chat/completions, /v1/completions and /v1/models, with /health and /metrics beside them."""
    from deltatree.serve.options import ServeOptions

    config = ServeOptions(
        model_name=model_name or ("deltatree" if target == SHIPPED else target.rstrip("/").rsplit("/", 1)[-1]),
        defaults=GenerateOptions(method=method, budget=parse_budget(budget), tree=tree, max_new_tokens=max_new_tokens),
        host=host,
        port=port,
        api_key=api_key,
        max_queue=max_queue,
        timeout_seconds=timeout,
        max_body_bytes=max_body_bytes,
        keep_conversations=keep_conversations,
        grace_seconds=grace,
        log_prompts=log_prompts,
    )
    try:
        import uvicorn

        from deltatree.serve.app import create_app
    except ImportError as error:
        raise OptionError(
            f"serving needs {error.name}, which is not installed; pip install 'deltatree[serve]'"
        ) from error

    if host not in ("127.0.0.1", "::1", "localhost") and api_key is None:
        print(f"warning: {host} may be open to others, and no --api-key is set", file=sys.stderr)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    pair = load_pair(target, drafter, device, dtype, backend, context_length, prefill)
    app = create_app(pair, config)
    if config.defaults.method == "ddtree" and config.defaults.budget == AUTO:
        with progress("measuring what rounds cost here"):
            pair.experience()
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="info",
            timeout_graceful_shutdown=max(int(grace), 1),
            server_header=False,
        )
    )
    server.run()
    if not server.started:
        raise OptionError(f"cannot listen on {host} port {port}; choose another one with --port")
