"""The same loop for users of Transformers: `model.generate(..., custom_generate=deltatree.custom_generate, drafter=...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from deltatree.decode.options import AUTO, DEFAULT_BUDGET, GenerateOptions
from deltatree.errors import OptionError, PromptError

if TYPE_CHECKING:
    from torch import Tensor

    from deltatree.drafter.dflash import DFlashDrafter


def load_drafter(source: str, model) -> DFlashDrafter:
    """Load a DFlash drafter for a Transformers model that is already loaded.

    source: hub id or folder    model: a `...ForCausalLM` or `...ForConditionalGeneration` of a supported family
    Raises CheckpointError, ArchitectureError, MismatchError.
    """
    from deltatree.drafter.dflash import load_drafter as load_weights
    from deltatree.drafter.dialects import check_pair, read_drafter_config
    from deltatree.models.checkpoint import TargetConfig
    from deltatree.models.reference import ReferenceTarget, text_model_of

    config = read_drafter_config(source)
    text = text_model_of(model).config
    check_pair(
        config,
        TargetConfig(
            source=model.name_or_path or type(model).__name__,
            folder=config.folder,
            model_type=text.model_type,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            num_layers=text.num_hidden_layers,
            context_length=text.max_position_embeddings,
            text={},
        ),
    )
    return load_weights(config, ReferenceTarget(model, config.taps))


def custom_generate(
    model,
    input_ids: Tensor,
    logits_processor=None,
    stopping_criteria=None,
    generation_config=None,
    drafter: DFlashDrafter | str | None = None,
    method: str = "ddtree",
    budget: int | str = DEFAULT_BUDGET,
    tree: str = "best-first",
    transitions: str = "auto",
    on_tokens: Callable[[list[int]], object] | None = None,
    **model_kwargs,
):
    """Decode one sequence losslessly with a draft tree, as Transformers' `generate` would decode it.

    drafter: from `deltatree.load_drafter(source, model)`, or a hub id or folder (loaded at each call)
    method, budget, tree: as in `deltatree.load(...).generate`
    transitions: for trees of that name: a table's file, which `deltatree transitions` writes, or none
    on_tokens: called with the new tokens of every round (`generate` does not hand its `streamer` to a custom function)
    Logits processors, sampling and stopping criteria are Transformers' own.
    Returns [1, prompt + new] int64, or a GenerateDecoderOnlyOutput if the generation config asks for a dict.
    Raises OptionError, PromptError.
    """
    import torch
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    from deltatree.decode import Ending, Sampler, decode
    from deltatree.decode.auto import Experience
    from deltatree.decode.calibration import round_costs
    from deltatree.decode.methods import plan
    from deltatree.models.reference import ReferenceTarget
    from deltatree.transitions import TransitionTable

    _check_request(input_ids, generation_config, model_kwargs)
    if isinstance(drafter, str):
        drafter = load_drafter(drafter, model)
    target = drafter.target if drafter is not None and method != "ar" else ReferenceTarget(model)
    if target.model is not model:
        raise OptionError(
            "this drafter was loaded for another model object; call deltatree.load_drafter(source, model)"
        )
    prompt = input_ids[0].tolist()
    max_new_tokens = generation_config.max_length - len(prompt)
    options = GenerateOptions(
        max_new_tokens=max_new_tokens, method=method, budget=budget, tree=tree, transitions=transitions
    )

    def is_done(new_ids: list[int]) -> bool:
        so_far = torch.tensor([prompt + new_ids], device=input_ids.device)
        return bool(stopping_criteria(so_far, None).all()) and len(new_ids) < max_new_tokens

    is_auto = method == "ddtree" and budget == AUTO and drafter is not None
    if is_auto and drafter.experience is None:
        drafter.experience = Experience(round_costs(target, drafter, (model.name_or_path, drafter.config.source)))
    experience = drafter.experience if is_auto else None
    table = TransitionTable.load(transitions) if options.uses_transitions and transitions != "auto" else None
    session_drafter, build_tree, budget = plan(options, drafter, target.vocab_size, experience, table)
    sampler = Sampler(logits_processor or None, torch.Generator() if generation_config.do_sample else None)
    if sampler.generator is not None:  # follow torch.manual_seed, as generate does
        sampler.generator.manual_seed(int(torch.randint(1 << 62, ())))
    new_ids: list[int] = []
    for done in decode(
        target,
        session_drafter,
        prompt,
        build_tree=build_tree,
        budget=budget,
        ending=Ending(max_new_tokens, is_done=is_done if stopping_criteria else None),
        sampler=sampler,
    ):
        new_ids += done.token_ids
        if on_tokens is not None:
            on_tokens(done.token_ids)
    sequences = torch.tensor([prompt + new_ids], device=input_ids.device)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def _check_request(input_ids: Tensor, config, model_kwargs: dict) -> None:
    for name, plain in (("num_beams", 1), ("num_return_sequences", 1)):
        if (getattr(config, name, plain) or plain) != plain:
            raise OptionError(f"{name}={getattr(config, name)} is not possible with a draft tree; use {name}={plain}")
    if input_ids.shape[0] != 1:
        raise OptionError(f"{input_ids.shape[0]} sequences at once are not possible; decode one at a time")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise PromptError("padded prompts are not possible: padding would enter the recurrent state; pass it unpadded")
    if any(model_kwargs.get(name) is not None for name in ("pixel_values", "pixel_values_videos", "inputs_embeds")):
        raise OptionError("images, videos and input embeddings are not possible here; text prompts are")
