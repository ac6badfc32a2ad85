"""comm: the ranks that together hold one sample, and the collectives between them.

The only place that calls torch.distributed's collectives. Every collective here is differentiable,
to any order, with its exact adjoint.

One convention of gradients
    The loss is global: the same number on every rank, reduced with `all_reduce`, whose adjoint is
    the same sum. Local autograd then holds S times the global gradient, S ranks in the domain. The
    doors where people meet gradients scale: DDP and FSDP2 take the mean over all ranks, which is
    exact on any mix of domain and data axes without a hook; without either,
    `Domain.average_gradients`. Serial means: that sample's loss on one rank.

One page of types
    ============  ==================================  ==========================================
    type          what each rank holds                its gradient, in local autograd
    ============  ==================================  ==========================================
    sharded       its own rows                        S times the global gradient of these rows
    replicated    the same whole tensor               shares that sum to S times the global one
    partial       a term of a sum                     what the sum's gradient is, on every rank
    ============  ==================================  ==========================================

    `all_reduce`: partial to replicated. `all_gather`: sharded to replicated. A replicated leaf that
    wants a gradient goes through `Domain.replicate`, whose adjoint is the mean. Parameters stay
    plain tensors: replicated, their gradients averaged by DDP.
"""

from meshshard.comm.domain import Domain, init_domain
from meshshard.comm.exchange import Exchange
from meshshard.comm.simulate import simulate
from meshshard.comm.traffic import Traffic
from meshshard.errors import DomainError

__all__ = ["Domain", "DomainError", "Exchange", "Traffic", "init_domain", "simulate"]
