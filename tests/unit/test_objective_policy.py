"""The policy loss worked by hand, its gradients by finite differences, and what must not reach them."""

from __future__ import annotations

import math
from math import exp, log

import pytest
import torch

from megarl.config.schema import CorrectionConfig, KLConfig, ObjectiveConfig
from megarl.objective.policy import MAXIMA, SUMS, policy_loss
from megarl.objective.recipes import resolve

NO_CORRECTION = CorrectionConfig(kind="none")


def objective(algorithm, correction=NO_CORRECTION, **fields):
    return resolve(ObjectiveConfig(algorithm=algorithm, correction=correction, **fields), 10)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def evaluate(one, ratios, advantages, weights, sequences=None, **more):
    """(loss, gradient of the log-probs, statistics as floats) of tokens with these ratios to old log-probs of -1.5."""
    old_t = torch.full((len(ratios),), -1.5, dtype=torch.float64)
    logprobs_t = (old_t + f64(*ratios).log()).requires_grad_()
    sequence_t = torch.tensor(sequences or [0] * len(ratios))
    loss, stats = policy_loss(logprobs_t, old_t, f64(*advantages), f64(*weights),
                              torch.ones(len(ratios), dtype=torch.bool), sequence_t, int(sequence_t.max()) + 1, one,
                              **more)
    assert set(stats) == {*SUMS, *MAXIMA, "by_lag"}
    assert not any(value.requires_grad for value in stats.values())
    loss.backward()
    return loss.item(), logprobs_t.grad.tolist(), {name: value.tolist() for name, value in stats.items()}


def near(*values):
    return pytest.approx(values[0] if len(values) == 1 else list(values), rel=1e-9, abs=1e-12)


def test_token_ratio_and_clip():
    # min(r A, clip(r, .8, 1.2) A): r 1.5 A 1 -> 1.2 (clipped); r .5 A -1 -> -.8 (clipped); r 1.5 A -1 -> -1.5;
    # r .5 A 1 -> .5. Loss = -(1.2 - .8 - 1.5 + .5) / 4 = .15. Gradient: 0 where clipped, else -A r / 4.
    loss, gradient, stats = evaluate(objective("grpo"), (1.5, 0.5, 1.5, 0.5), (1, -1, -1, 1), [0.25] * 4)
    assert loss == near(0.15) and gradient == near(0, 0, 0.375, -0.125)
    assert stats["tokens"] == 4 and stats["loss"] == near(0.15)
    assert stats["clipped_low"] == 1 and stats["clipped_high"] == 1
    assert stats["ratio"] == near(4) and stats["ratio_max"] == near(1.5)
    # KL(old || new) by k3: r - 1 - ln r, summed: 2 (.5 - ln 1.5) + 2 (-.5 + ln 2)
    assert stats["kl_old"] == near(2 * (log(2) - log(1.5)))


def test_asymmetric_clip():
    # DAPO, [.8, 1.28]: 1.25 is inside, 1.3 is cut to 1.28. Loss = -(1.25 + 1.28) / 2.
    loss, gradient, stats = evaluate(objective("dapo"), (1.25, 1.3), (1, 1), (0.5, 0.5))
    assert loss == near(-1.265) and gradient == near(-0.625, 0)
    assert (stats["clipped_low"], stats["clipped_high"]) == (0, 1)


def test_sequence_ratio_is_the_geometric_mean():
    # Sequence 0: log-ratios 1e-4, 5e-4, mean 3e-4: inside the clip of 4e-4. Sequence 1: one token, 6e-4: cut to 1.0004.
    # Loss = -(.1 + .3) 2 e^.0003 - .5 * 3 * 1.0004. Each token of sequence 0 has half of its sequence's gradient.
    ratios = exp(1e-4), exp(5e-4), exp(6e-4)
    loss, gradient, stats = evaluate(objective("gspo"), ratios, (2, 2, 3), (0.1, 0.3, 0.5), [0, 0, 1])
    half = -0.4 * 2 * exp(3e-4) / 2
    assert loss == near(2 * half - 1.5 * 1.0004) and gradient == near(half, half, 0)
    assert stats["clipped_high"] == 1 and stats["ratio"] == near(2 * exp(3e-4) + exp(6e-4))


def test_sequence_token_ratio_has_the_sequence_value_and_the_token_gradient():
    # As above, but the gradient of token t is -w_t A_t s, and a token may have an advantage of its own.
    ratios = exp(1e-4), exp(5e-4), exp(6e-4)
    loss, gradient, _ = evaluate(objective("gspo_token"), ratios, (2, -1, 3), (0.1, 0.3, 0.5), [0, 0, 1])
    s = exp(3e-4)
    assert loss == near(-0.2 * s + 0.3 * s - 1.5 * 1.0004) and gradient == near(-0.2 * s, 0.3 * s, 0)


@pytest.mark.parametrize("estimator, value, slope", [
    ("k2", log(2) ** 2 / 2, -log(2)),  # r = ref - logprob = ln 2: r^2 / 2, derivative -r
    ("k3", 1 - log(2), -1.0)])  # 2 - 1 - ln 2, derivative 1 - 2
def test_kl_in_the_loss(estimator, value, slope):
    one = objective("grpo", kl=KLConfig(coefficient=0.1, estimator=estimator))
    loss, gradient, stats = evaluate(one, (1.0,), (3,), (0.5,), ref_t=f64(-1.5 + log(2)))
    assert loss == near(0.5 * (-3 + 0.1 * value)) and gradient == [near(0.5 * (-3 + 0.1 * slope))]
    assert stats["ref_kl"] == near(value)


def test_kl_in_the_reward_is_measured_but_no_term():
    one = objective("grpo", kl=KLConfig(coefficient=0.1, estimator="k1", place="reward"))
    loss, gradient, stats = evaluate(one, (1.0,), (3,), (0.5,), ref_t=f64(-1.5 - log(2)))
    assert loss == near(-1.5) and gradient == [near(-1.5)] and stats["ref_kl"] == near(log(2))


def test_entropy_bonus():
    entropy_t = f64(2.0, 4.0).requires_grad_()
    loss, _, stats = evaluate(objective("grpo", entropy_bonus=0.01), (1, 1), (1, 1), (0.5, 0.25), entropy_t=entropy_t)
    # -(.5 + .25) - .01 (.5 * 2 + .25 * 4); the entropy's gradient is -.01 w
    assert loss == near(-0.75 - 0.02) and entropy_t.grad.tolist() == near(-0.005, -0.0025)
    assert stats["entropy"] == 6


def engine(*weights):
    """Engine log-probs under which exp(old - engine) are these."""
    return -1.5 - f64(*weights).log()


@pytest.mark.parametrize("kind, level, low, weights, cut", [
    # gaps exp(old - engine) of (3, .25 | 1.5, 1.6): by token, and by sequence .75 and 2.4
    ("truncated", "token", 0, (2, 0.25, 1.5, 1.6), 1), ("masked", "token", 0.5, (0, 0, 1.5, 1.6), 2),
    ("truncated", "sequence", 0, (0.75, 0.75, 2, 2), 2), ("masked", "sequence", 0.5, (0.75, 0.75, 0, 0), 2),
    # geometric means sqrt(.75) and sqrt(2.4)
    ("truncated", "geometric", 0, (0.75 ** 0.5, 0.75 ** 0.5, 2.4 ** 0.5, 2.4 ** 0.5), 0),
    ("masked", "geometric", 0.9, (0, 0, 2.4 ** 0.5, 2.4 ** 0.5), 2),
    ("none", "token", 0, (1, 1, 1, 1), 0)])
def test_correction(kind, level, low, weights, cut):
    one = objective("grpo", CorrectionConfig(kind=kind, level=level, low=low, high=2.0))
    loss, gradient, stats = evaluate(one, (1.1, 0.9, 1.1, 0.9), (1, 1, -1, -1), [0.25] * 4, [0, 0, 1, 1],
                                     engine_t=engine(3, 0.25, 1.5, 1.6))
    terms = [-0.25 * c * a * r for c, a, r in zip(weights, (1, 1, -1, -1), (1.1, 0.9, 1.1, 0.9), strict=True)]
    assert loss == near(sum(terms)) and gradient == near(*terms)  # weights are constants: gradient = -w c A r
    assert stats["is_weight"] == near(sum(weights)) and stats["is_cut"] == cut
    # |gaps|: ln 3, ln 4, ln 1.5, ln 1.6; KL(engine || old) by k3: e^g - 1 - g
    assert stats["engine_gap"] == near(log(3 * 4 * 1.5 * 1.6)) and stats["engine_gap_max"] == near(log(4))
    assert stats["engine_kl"] == near(3 + 0.25 + 1.5 + 1.6 - 4 - log(3 * 0.25 * 1.5 * 1.6))


def test_masked_token_leaves_the_surrogate_only():
    """Its ratio may overflow; its KL stays; the weights of the others, which carry the divisor, stay."""
    one = objective("grpo", CorrectionConfig(kind="masked", high=2.0), kl=KLConfig(coefficient=0.1, estimator="k2"))
    old_t, ref_t = f64(-1, -1000), f64(-1, -2)
    logprobs_t = f64(-1, -1).requires_grad_()
    loss, stats = policy_loss(logprobs_t, old_t, f64(1, -1), f64(0.5, 0.5), torch.tensor([True, True]),
                              torch.zeros(2, dtype=torch.int64), 1, one, ref_t=ref_t, engine_t=f64(-1, -1005))
    loss.backward()
    # Token 1: weight e^5 > 2, masked; ratio e^999 = inf. KL: (1)^2 / 2, gradient -(ref - logprob) = 1.
    assert loss.item() == near(-0.5 + 0.5 * 0.1 * 0.5) and logprobs_t.grad.tolist() == near(-0.5, 0.5 * 0.1)
    assert stats["ratio"] == 2 and stats["is_cut"] == 1


def test_a_nan_of_the_engine_at_a_response_token_is_not_lost():
    for kind in ("truncated", "masked"):
        loss, _, _ = evaluate(objective("grpo", CorrectionConfig(kind=kind)), (1, 1), (1, 1), (0.5, 0.5),
                              engine_t=f64(-1.5, math.nan))
        assert math.isnan(loss)


@pytest.mark.parametrize("one, name", [
    (objective("grpo", kl=KLConfig(coefficient=0.1)), "ref_t"), (objective("grpo", entropy_bonus=0.1), "entropy_t"),
    (objective("grpo", CorrectionConfig()), "engine_t")])
def test_a_term_without_its_input_is_refused(one, name):
    with pytest.raises(ValueError, match=name):
        evaluate(one, (1.0,), (1,), (1,))


FULL = dict(entropy_bonus=0.05, kl=KLConfig(coefficient=0.2))
CORRECTIONS = [CorrectionConfig(kind=kind, level=level, low=0.3 * (kind == "masked"), high=1.2)
               for kind in ("truncated", "masked") for level in ("token", "sequence", "geometric")]
CORRECTIONS.append(CorrectionConfig(kind="truncated", high=1.2, reject="geometric", reject_low=0.9, reject_high=1.05))


def random_inputs(tokens=12, n_seq=3, seed=0):
    """Keyword arguments of policy_loss: ragged sequences, prompt positions between them, tail padding."""
    g = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(tokens, generator=g, dtype=torch.float64)

    sequence_t = torch.randint(n_seq + 1, (tokens,), generator=g).sort().values
    old_t = draw() - 3
    return dict(
        logprobs_t=(old_t + 0.2 * draw()).requires_grad_(), old_t=old_t, advantages_t=draw(), weights_t=draw().abs(),
        mask_t=(torch.rand(tokens, generator=g) > 0.3) & (sequence_t < n_seq), sequence_t=sequence_t, n_seq=n_seq,
        entropy_t=(draw().abs() + 1).requires_grad_(), ref_t=old_t + 0.3 * draw(), engine_t=old_t + 0.3 * draw())


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.kind}-{c.level}-{c.reject}")
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "dapo", "dr_grpo"])
def test_gradients_by_finite_differences(algorithm, correction):
    inputs = random_inputs()
    one = objective(algorithm, correction, clip_low=0.1, clip_high=0.15, **FULL)

    def loss(logprobs_t, entropy_t):
        return policy_loss(**{**inputs, "logprobs_t": logprobs_t, "entropy_t": entropy_t}, objective=one)[0]

    assert torch.autograd.gradcheck(loss, (inputs["logprobs_t"], inputs["entropy_t"]))


@pytest.mark.parametrize("reject", ["none", "token", "geometric"])
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "dapo"])
def test_gradients_of_the_naive_ratio_by_finite_differences(algorithm, reject):
    inputs = random_inputs()
    naive = CorrectionConfig(kind="none", reject=reject, reject_low=0.8, reject_high=1.2)
    one = objective(algorithm, naive, clip_low=0.1, clip_high=0.15, proximal="behaviour", **FULL)

    def loss(logprobs_t):
        return policy_loss(**{**inputs, "logprobs_t": logprobs_t}, objective=one)[0]

    assert torch.autograd.gradcheck(loss, (inputs["logprobs_t"],))


def test_gspo_token_gradient_by_finite_differences():
    """The stop-gradient holds s at its value: differentiate sum of -w min(s e^(x - x0) A, clip(...) A) over x at x0."""
    inputs = random_inputs()
    one = objective("gspo_token", clip_low=0.1, clip_high=0.15)
    loss, _ = policy_loss(**inputs, objective=one)
    loss.backward()
    mask, start_t, sequence_t = inputs["mask_t"], inputs["logprobs_t"].detach(), inputs["sequence_t"]
    s_t = torch.stack([(start_t - inputs["old_t"])[mask & (sequence_t == s)].mean().exp() for s in sequence_t])

    def frozen(logprobs_t):
        ratio_t = s_t * (logprobs_t - start_t).exp()
        surrogate_t = torch.minimum(ratio_t * inputs["advantages_t"],
                                    ratio_t.clamp(0.9, 1.15) * inputs["advantages_t"])
        return -(inputs["weights_t"] * surrogate_t)[mask].sum()

    step = torch.eye(len(start_t), dtype=torch.float64) * 1e-6
    want = torch.stack([(frozen(start_t + d) - frozen(start_t - d)) / 2e-6 for d in step])
    assert loss.item() == near(frozen(start_t).item())
    torch.testing.assert_close(inputs["logprobs_t"].grad, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.kind}-{c.level}-{c.reject}")
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "gspo_token"])
def test_nan_under_the_mask_stays_there(algorithm, correction):
    one = objective(algorithm, correction, **FULL)

    def run(fill):
        inputs = random_inputs()
        leaves = [inputs["logprobs_t"], inputs["entropy_t"]]
        for name, values_t in inputs.items():
            if name.endswith("_t") and name not in ("mask_t", "sequence_t"):
                inputs[name] = torch.where(inputs["mask_t"], values_t, fill)
        loss, stats = policy_loss(**inputs, objective=one)
        loss.backward()
        return loss, stats, [leaf.grad for leaf in leaves], inputs["mask_t"]

    (loss, stats, grads, mask_t), (clean, clean_stats, clean_grads, _) = run(math.nan), run(-0.5)
    assert torch.isfinite(loss) and loss == clean
    assert all(torch.equal(stats[name], clean_stats[name]) for name in stats)
    for got, want in zip(grads, clean_grads, strict=True):
        assert torch.equal(got, want) and not got[~mask_t].any()


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "gspo_token"])
@pytest.mark.parametrize("tokens", [0, 4])
def test_filler_micro_batch_adds_nothing(algorithm, tokens):
    """All masked, no sequence: the loss is 0 and has a gradient of 0, so that the backward pass runs as elsewhere."""
    inputs = random_inputs(tokens)
    inputs |= dict(n_seq=0, sequence_t=torch.zeros(tokens, dtype=torch.int64),
                   mask_t=torch.zeros(tokens, dtype=torch.bool))
    loss, stats = policy_loss(**inputs, objective=objective(algorithm, CorrectionConfig(level="sequence"), **FULL))
    loss.backward()
    assert loss == 0 and not inputs["logprobs_t"].grad.any() and not any(value.any() for value in stats.values())


@pytest.mark.parametrize("correction, proximal", [
    (CorrectionConfig(level="sequence", high=1.2), "old"),
    (CorrectionConfig(kind="masked", level="geometric", low=0.9, high=1.1), "old"),
    (CorrectionConfig(kind="none", reject="geometric", reject_low=0.9, reject_high=1.1), "behaviour")])
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "gspo_token"])
def test_sequences_shared_by_ranks(algorithm, correction, proximal):
    """Two shares of every sequence, summed by sum_across, give the loss, gradients and statistics of the whole.

    Both shares are evaluated in one process: the first pass tells each share's sums, the second adds the other's to
    them, still attached to the graph, as a differentiable all-reduce does.
    """
    one = objective(algorithm, correction, clip_low=0.01, clip_high=0.02, proximal=proximal, **FULL)
    whole = random_inputs(20)
    want, want_stats = policy_loss(**whole, objective=one)
    want.backward()
    shared = random_inputs(20)
    even = torch.arange(20) % 4 < 2
    shares = [{name: value[part] if isinstance(value, torch.Tensor) else value for name, value in shared.items()}
              for part in (even, ~even)]
    sums = []
    for share in shares:
        policy_loss(**share, objective=one, sum_across=lambda own: sums.append(own) or own)
    results = [policy_loss(**share, objective=one, sum_across=lambda own, k=k: own + sums[1 - k])
               for k, share in enumerate(shares)]
    loss = results[0][0] + results[1][0]
    loss.backward()
    assert loss.item() == near(want.item())
    for name in ("logprobs_t", "entropy_t"):
        torch.testing.assert_close(shared[name].grad, whole[name].grad, rtol=1e-10, atol=1e-12)
    for name in SUMS:
        assert (results[0][1][name] + results[1][1][name]).item() == near(want_stats[name].item()), name
    for name in MAXIMA:
        assert max(results[0][1][name], results[1][1][name]) == want_stats[name], name
