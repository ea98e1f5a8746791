"""The sampler against plain references: filters, penalties, statistics, logprobs, and independence of the batch."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.core.errors import RequestError
from expediter.core.plan import Admission
from expediter.core.request import GREEDY, Request, RequestState, SamplingParams
from expediter.engine.noise import gumbel, noise_keys
from expediter.engine.sampler import Sampler
from expediter.engine.sampling_params import validate_sampling, validate_token_ids

VOCAB = 50
CPU = torch.device("cpu")


def _admit(sampler: Sampler, slot: int, sampling: SamplingParams, tokens=(1, 2, 3), num_prompt=None, **fields) -> None:
    tokens = np.array(tokens, dtype=np.int32)
    prompt = tokens[: num_prompt or len(tokens)]
    request = Request(request_id=str(slot), prompt=prompt, max_tokens=1000, sampling=sampling, **fields)
    state = RequestState(request=request, sequence=0, token_bytes=tokens.tobytes())
    sampler.admit(Admission(slot, state, tokens, 0))


def _sampler(*params: SamplingParams, vocab_size: int = VOCAB, **fields) -> Sampler:
    sampler = Sampler(max_num_seqs=max(len(params), 1), vocab_size=vocab_size, device=CPU, seed=0)
    for slot, sampling in enumerate(params):
        _admit(sampler, slot, sampling, **fields)
    return sampler


def _sample(sampler: Sampler, logits: torch.Tensor, num_known: int | list[int] = 3):
    slots = np.arange(len(logits), dtype=np.int32)
    known = np.broadcast_to(np.asarray(num_known, dtype=np.int64), (len(logits),))
    drawn = sampler.sample(logits.clone(), slots, known)
    return drawn.tokens, drawn.logprobs


def _many(params: SamplingParams, logits: torch.Tensor, num_draws: int) -> Counter[int]:
    """Return how often each token is drawn at successive output positions."""
    sampler = Sampler(max_num_seqs=1, vocab_size=len(logits), device=CPU, seed=0)
    _admit(sampler, 0, params)
    rows = logits.expand(num_draws, -1).clone()
    tokens = sampler.sample(rows, np.zeros(num_draws, np.int32), np.arange(3, 3 + num_draws)).tokens
    return Counter(tokens.tolist())


def _reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the distribution to draw from, one token at a time: temperature, min-p, top-k, top-p."""
    probabilities = (logits.double() / params.temperature).softmax(-1)
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    order = probabilities.argsort(descending=True, stable=True)
    if params.top_k > 0:
        probabilities[order[params.top_k :]] = 0
    probabilities /= probabilities.sum()
    mass = 0.0
    for rank, token in enumerate(order):
        if rank and mass >= params.top_p:
            probabilities[token] = 0
        mass += float(probabilities[token])
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.6),
        SamplingParams(seed=3, temperature=1.7),
        SamplingParams(seed=4, top_k=5),
        SamplingParams(seed=5, top_p=0.7),
        SamplingParams(seed=6, min_p=0.2),
        SamplingParams(seed=7, temperature=1.3, top_k=20, top_p=0.8, min_p=0.02),
        SamplingParams(seed=8, top_k=1),
        SamplingParams(seed=9, top_p=0.01),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    num_draws = 40_000
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(7)) * 1.5
    expected = _reference(logits, params)
    counts = _many(params, logits, num_draws)
    assert set(counts) <= set(torch.nonzero(expected)[:, 0].tolist())
    for token, probability in enumerate(expected.tolist()):
        deviation = math.sqrt(num_draws * probability * (1 - probability))
        assert abs(counts[token] - num_draws * probability) <= 5 * deviation + 1


def test_wide_nucleus_is_drawn_from_as_a_whole() -> None:
    """A nearly flat distribution has a nucleus far wider than the candidates that are looked at first."""
    logits = torch.linspace(0, 0.1, 2000)
    counts = _many(SamplingParams(seed=1, top_p=0.9), logits, 5_000)
    allowed = torch.nonzero(_reference(logits, SamplingParams(top_p=0.9)))[:, 0].tolist()
    assert set(counts) <= set(allowed)
    assert len(counts) > 1600
    assert max(counts.values()) < 20


def test_noise_is_standard_gumbel_and_differs_between_keys() -> None:
    keys = torch.from_numpy(noise_keys(np.arange(64, dtype=np.uint64), np.arange(64)))
    noise = gumbel(keys, torch.arange(4000, dtype=torch.int32)[None]).double()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    correlation = torch.corrcoef(noise) - torch.eye(64)
    assert correlation.abs().max() < 0.1
    along_tokens = torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))[0, 1]
    assert abs(along_tokens) < 0.01


_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.5]),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 30]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(-(2**63), 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.sampled_from([(), ((4, 3.0), (9, -100.0))]),
    logprobs=st.sampled_from([None, 0, 2]),
)


@settings(max_examples=60, deadline=None)
@given(params=st.lists(_params, min_size=2, max_size=6))
def test_a_row_does_not_depend_on_the_others(params: list[SamplingParams]) -> None:
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(len(params)))
    together, _ = _sample(_sampler(*params), logits)
    for row, sampling in enumerate(params):
        alone, _ = _sample(_sampler(sampling), logits[row : row + 1])
        assert alone[0] == together[row]


def test_slot_taken_over_forgets_the_former_request() -> None:
    logits = torch.randn(1, VOCAB)
    sampler = _sampler(
        SamplingParams(temperature=1.0, seed=3, repetition_penalty=2.0, logit_bias=((7, 100.0),), logprobs=1)
    )
    assert _sample(sampler, logits)[0][0] == 7
    _admit(sampler, 0, GREEDY)
    tokens, logprobs = _sample(sampler, logits)
    assert tokens[0] == logits.argmax()
    assert logprobs is None


def test_penalties_follow_vllm() -> None:
    """Repetition counts prompt and output, presence and frequency the output only; counting goes on while sampling."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3)
    prompt, output = [1, 2, 2], [5, 5, 6]
    sampler = _sampler(params, tokens=[*prompt, *output], num_prompt=3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        logits = torch.randn(VOCAB, generator=generator)
        expected = logits.clone()
        for token in {*prompt, *output}:
            expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
        for token, count in Counter(output).items():
            expected[token] -= 0.4 + 0.3 * count
        tokens, _ = _sample(sampler, logits[None], 3 + len(output))
        assert tokens[0] == expected.argmax()
        output.append(int(tokens[0]))


def test_readmission_after_preemption_restores_penalties() -> None:
    params = SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.8, frequency_penalty=1.0)
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(3))
    outputs = []
    for preempted_at in (None, 9):
        tokens = [1, 2, 3]
        sampler = _sampler(params, tokens=tokens)
        for step in range(20):
            if step == preempted_at:
                _admit(sampler, 0, params, tokens=tokens, num_prompt=3)
            drawn, _ = _sample(sampler, logits[step : step + 1], len(tokens))
            tokens.append(int(drawn[0]))
        outputs.append(tokens)
    assert outputs[0] == outputs[1]


def test_logit_bias_moves_the_choice() -> None:
    logits = torch.zeros(1, VOCAB)
    assert _sample(_sampler(replace(GREEDY, logit_bias=((VOCAB - 1, 1.0),))), logits)[0][0] == VOCAB - 1
    banned = tuple((token, -100.0) for token in range(VOCAB - 1))
    assert set(_many(SamplingParams(seed=0, logit_bias=banned), logits[0], 200)) == {VOCAB - 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_wait_for_min_tokens(temperature: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = logits[0, 9] = 50.0
    params = SamplingParams(temperature=temperature, seed=1)
    sampler = _sampler(params, min_tokens=3, stop_token_ids=(8, 9, 10**6))
    for output_index in range(3):
        assert _sample(sampler, logits, 3 + output_index)[0][0] not in {8, 9}
    assert _sample(sampler, logits, 6)[0][0] in {8, 9}


def test_logprobs_are_those_of_the_raw_logits() -> None:
    params = SamplingParams(temperature=0.5, seed=2, top_k=4, logit_bias=((3, 5.0),), logprobs=3)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    sampler = _sampler(params, replace(params, logprobs=None), replace(params, logprobs=0, seed=9))
    tokens, logprobs = _sample(sampler, logits)
    raw = logits.log_softmax(-1)
    assert logprobs is not None
    assert logprobs[1] is None
    for row, num_top in ((0, 3), (2, 0)):
        entry = logprobs[row]
        assert entry is not None
        assert entry.logprob == pytest.approx(float(raw[row, tokens[row]]))
        assert entry.rank == int((raw[row] > raw[row, tokens[row]]).sum()) + 1
        best = raw[row].topk(num_top)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist())


def test_logprobs_are_finite_whatever_the_logits() -> None:
    params = replace(GREEDY, logprobs=VOCAB)
    for logits in (torch.full((1, VOCAB), -torch.inf), torch.full((1, VOCAB), torch.nan), torch.zeros(1, VOCAB)):
        logits[0, 0] = 1.0
        tokens, logprobs = _sample(_sampler(params), logits)
        assert 0 <= tokens[0] < VOCAB
        assert logprobs is not None
        assert logprobs[0] is not None
        assert all(math.isfinite(value) for value in (logprobs[0].logprob, *(v for _, v in logprobs[0].top)))


def test_unseeded_requests_differ_and_follow_the_samplers_seed() -> None:
    logits = torch.zeros(8, 10_000)
    unseeded = [SamplingParams()] * 8
    first, _ = _sample(_sampler(*unseeded, vocab_size=10_000), logits)
    again, _ = _sample(_sampler(*unseeded, vocab_size=10_000), logits)
    assert len(set(first.tolist())) == 8
    assert first.tolist() == again.tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logprobs", -1),
        ("logprobs", VOCAB + 1),
        ("logit_bias", ((VOCAB, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, 101.0),)),
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        validate_sampling(replace(SamplingParams(), **{field: value}), VOCAB)
    assert caught.value.param == field


@settings(max_examples=60, deadline=None)
@given(params=_params)
def test_what_is_accepted_can_be_sampled(params: SamplingParams) -> None:
    validate_sampling(params, VOCAB)
    tokens, _ = _sample(_sampler(params), torch.randn(1, VOCAB))
    assert 0 <= tokens[0] < VOCAB


def test_token_ids_are_checked() -> None:
    validate_token_ids([0, VOCAB - 1], VOCAB, param="prompt")
    for bad in (-1, VOCAB):
        with pytest.raises(RequestError) as caught:
            validate_token_ids([0, bad], VOCAB, param="prompt")
        assert caught.value.param == "prompt"
