"""The losses, as sums over positions: who divides them, and by what, is the loop's business.

N positions with a target, V outputs of the head, k tokens that the teacher stored of each position.

- Cross-entropy: −log q(target).
- Distillation (Hinton, Vinyals and Dean 2015, arXiv:1503.02531): alpha · CE + (1 − alpha) · T² · KL(p_T ‖ q_T), teacher
  first (forward KL), both softened by the temperature T. T² keeps the size of the gradient when T changes.
- Of the teacher only the k largest probabilities of a position are known, and the sum of the others. So both
  distributions are made coarse first: k tokens and one bucket for all others. The KL of the coarse ones is at most
  that of the full ones, equal to it at k = V, and 0 when the student has the teacher's k probabilities and sum.
- T ≠ 1 softens these k + 1 probabilities (each to the power of 1/T, then normalized), the bucket as if it were one
  token. At k = V that is the softened softmax exactly. Below it is not the coarse form of the softened full
  distribution, which nobody can know from k probabilities; it has its minimum at the same student.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """−log q(target) of each position.

    Args:
        logits: (N, V).
        targets: (N,), token ids.

    Returns:
        (N,) in float32.
    """
    from torch.nn import functional

    return functional.cross_entropy(logits.float(), targets, reduction="none")


def forward_kl(
    logits: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
    tail_logprob: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """KL(teacher ‖ student) of each position over k tokens and the bucket of all others, without the factor T².

    Args:
        logits: (N, V), the student's, over the vocabulary that the teacher's are normalized over.
        top_ids: (N, k), tokens.
        top_logprobs: (N, k), the teacher's at temperature 1.
        tail_logprob: (N,), the log of what the teacher gives all other tokens; −inf: nothing.
        temperature: T.

    Returns:
        (N,) in float32.
    """
    import torch

    student = torch.log_softmax(logits.float(), -1)  # (N, V)
    own = student.gather(-1, top_ids)  # (N, k)
    teacher = top_logprobs.float()
    if top_ids.shape[-1] < logits.shape[-1]:  # else there are no others, and a sum over nothing has no gradient
        others = student.scatter(-1, top_ids, float("-inf")).logsumexp(-1)  # (N,)
        own = torch.cat([own, others[:, None]], -1)
        teacher = torch.cat([teacher, tail_logprob.float()[:, None]], -1)
    own, teacher = torch.log_softmax(own / temperature, -1), torch.log_softmax(teacher / temperature, -1)
    there = torch.isfinite(teacher)  # p log p is 0 at p = 0
    return torch.where(there, teacher.exp() * (teacher.masked_fill(~there, 0.0) - own), 0.0).sum(-1)


def distillation(ce: torch.Tensor, kl: torch.Tensor, alpha: float, temperature: float) -> torch.Tensor:
    """Alpha · CE + (1 − alpha) · T² · KL."""
    return alpha * ce + (1 - alpha) * temperature**2 * kl
