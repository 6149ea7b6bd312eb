"""A request's sampling parameters as vLLM wants them."""

from __future__ import annotations

from typing import Any

from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.request_check import check_request, drawable_stops
from services.wire.errors import UsageError


def vllm_parameters(
    request: GenerationRequest, *, max_model_len: int, vocabulary: int, eos_token_ids: tuple[int, ...]
) -> Any:
    """The request's vLLM parameters. Raises as `check_request` does."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSampling

    check_request(request, max_model_len=max_model_len, vocabulary=vocabulary, eos_token_ids=eos_token_ids)
    sampling = request.sampling
    limit = min(sampling.max_tokens, max_model_len - len(request.prompt_token_ids))
    try:
        parameters = VllmSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            min_tokens=min(max(sampling.min_tokens - request.resumed, 0), limit),
            seed=sampling.seed,
            max_tokens=limit,
            # All of them: vLLM has no tokenizer here and does not know the end-of-sequence ids by itself.
            stop_token_ids=sorted(drawable_stops(sampling, vocabulary, eos_token_ids)),
            ignore_eos=True,
            logprobs=min(request.top_logprobs, vocabulary),
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
            stream_interval=request.delta_every,
            skip_clone=True,
        )
    except ValueError as error:
        raise UsageError(f"vLLM refuses the sampling parameters ({error})") from error
    # Set afterwards: vLLM refuses several greedy samples when asked for them at once, and draws them all the same.
    parameters.n = request.n
    return parameters
