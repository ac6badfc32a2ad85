"""comm: the ranks that hold one sample together, and the collectives between them.

The only folder that calls torch.distributed's collectives. The tensor collectives of a `Domain` are
differentiable, to any order, with exact adjoints.

One gradient convention
    The loss is global: the same number on every rank, reduced with `all_reduce`, whose adjoint is
    the same sum. On a domain of S ranks, local autograd then holds S times the global gradient.
    Gradients are rescaled at the API boundary: DDP and FSDP2 take the mean over all ranks, so their
    defaults are exact on any mix of domain and data axes without a hook; without either, call
    `Domain.average_gradients`. "Serial" means: the loss of that sample on one rank.

One page of types
    ============  ==================================  ==========================================
    type          what each rank holds                its gradient, in local autograd
    ============  ==================================  ==========================================
    sharded       its owned rows                      S times the global gradient of these rows
    replicated    the same whole tensor               parts whose sum is S times the global one
    partial       one term of a sum                   the gradient of the sum, on every rank
    ============  ==================================  ==========================================

    `all_reduce` turns partial into replicated, `all_gather` turns sharded into replicated. A
    replicated leaf that requires a gradient goes through `Domain.replicate`, whose adjoint is the
    mean. Parameters stay plain tensors: replicated, with gradients averaged by DDP.
"""

from meshshard.comm.domain import Domain, count_traffic, init_domain
from meshshard.comm.exchange import Exchange
from meshshard.comm.ranks import Ranks
from meshshard.comm.simulate import simulate
from meshshard.comm.traffic import Traffic
from meshshard.errors import DomainError

__all__ = [
    "Domain", "DomainError", "Exchange", "Ranks", "Traffic", "count_traffic", "init_domain",
    "simulate",
]  # fmt: skip
