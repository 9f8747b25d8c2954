"""Facts about the losses: against torch's own on full distributions, and where only a part is known."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from gristmill.training.objectives import cross_entropy, distillation, forward_kl

V = 23


def drawn(seed: int, rows: int = 5, spread: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a student and log-probabilities of a teacher, (rows, V)."""
    torch.manual_seed(seed)
    return torch.randn(rows, V) * spread, torch.log_softmax(torch.randn(rows, V) * spread, -1)


def stored(teacher: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k most likely tokens, their log-probabilities, and the log of the rest."""
    top, ids = teacher.topk(k, -1)
    rest = teacher.scatter(-1, ids, float("-inf"))
    return ids, top, rest.logsumexp(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 7.0])
def test_with_all_tokens_stored_the_kl_is_torchs_on_softened_logits(temperature: float) -> None:
    student, teacher = drawn(1)
    found = forward_kl(student, *stored(teacher, V), temperature)
    softened = (torch.log_softmax(student / temperature, -1), torch.log_softmax(teacher / temperature, -1))
    expected = functional.kl_div(*softened, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_bucket_is_one_token_of_the_coarse_distributions() -> None:
    student, teacher = drawn(2)
    ids, top, tail = stored(teacher, 4)
    own = torch.softmax(student, -1)
    p = torch.cat([top.exp(), tail.exp()[:, None]], -1)
    q = torch.cat([own.gather(-1, ids), 1 - own.gather(-1, ids).sum(-1, keepdim=True)], -1)
    expected = (p * (p.log() - q.log())).sum(-1)
    torch.testing.assert_close(forward_kl(student, ids, top, tail), expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, V - 1))
def test_the_coarse_kl_is_between_nothing_and_the_full_one(seed: int, k: int) -> None:
    student, teacher = drawn(seed)
    coarse, full = forward_kl(student, *stored(teacher, k)), forward_kl(student, *stored(teacher, V))
    assert (coarse >= -1e-5).all()
    assert (coarse <= full + 1e-4).all()


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("k", [1, 6, V])
def test_the_teacher_itself_has_no_loss_and_no_gradient(k: int, temperature: float) -> None:
    _, teacher = drawn(3)
    student = (teacher + 1.7).requires_grad_()  # logits are known up to a constant
    found = forward_kl(student, *stored(teacher, k), temperature)
    found.sum().backward()
    assert student.grad is not None
    torch.testing.assert_close(found, torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(student.grad, torch.zeros(5, V), atol=1e-5, rtol=0)


def test_a_teacher_that_gives_the_others_nothing_leaves_finite_numbers() -> None:
    student, _ = drawn(4, rows=1)
    student.requires_grad_()
    ids, top = torch.tensor([[3, 5]]), torch.tensor([[0.25, 0.75]]).log()
    found = forward_kl(student, ids, top, torch.tensor([float("-inf")]))
    found.sum().backward()
    own = torch.softmax(student, -1)[0, [3, 5]].detach()
    expected = 0.25 * (0.25 / own[0]).log() + 0.75 * (0.75 / own[1]).log()
    torch.testing.assert_close(found[0].detach(), expected)
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_a_student_that_is_sure_of_something_else_has_a_finite_loss() -> None:
    student = torch.full((1, V), -80.0)
    student[0, 7] = 80.0
    _, teacher = drawn(5, rows=1, spread=0.1)
    assert forward_kl(student, *stored(teacher, 4)).isfinite().all()


def test_alpha_weighs_the_cross_entropy_and_t_squared_the_kl() -> None:
    ce, kl = torch.tensor([2.0]), torch.tensor([3.0])
    assert distillation(ce, kl, 0.25, 2.0).item() == 0.25 * 2.0 + 0.75 * 4.0 * 3.0
    assert distillation(ce, kl, 1.0, 2.0).item() == 2.0
    assert distillation(ce, kl, 0.0, 1.0).item() == 3.0


def test_t_squared_keeps_the_gradients_size_as_hinton_has_it() -> None:
    """For high T the gradient of T² KL tends to (z − v) / V with logits of zero mean (their equation 4)."""
    student, teacher = drawn(6, rows=1, spread=1.0)
    z, v = (logits - logits.mean() for logits in (student, teacher))
    z.requires_grad_()
    temperature = 1000.0
    kl = forward_kl(z, *stored(v, V), temperature)
    distillation(torch.zeros(1), kl, 0.0, temperature).sum().backward()
    assert z.grad is not None
    torch.testing.assert_close(z.grad, (z.detach() - v) / V, rtol=1e-2, atol=1e-3)


def test_the_cross_entropy_is_minus_the_log_of_the_targets_probability() -> None:
    student, _ = drawn(7)
    targets = torch.tensor([0, 3, 5, 22, 1])
    expected = -torch.softmax(student, -1)[torch.arange(5), targets].log()
    torch.testing.assert_close(cross_entropy(student, targets), expected)
