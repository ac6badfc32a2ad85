"""Private names of PyTorch: each behaves as `meshshard.tensor._torch_private` says."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from meshshard.tensor import _torch_private as private
from meshshard.tensor.rules import pointwise
from meshshard.tensor.shard_tensor import RULES


class Recorder(torch.Tensor):
    """A tensor that records the functions which PyTorch passes to `__torch_function__`."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        CALLS.append((func, args, kwargs or {}))
        ANSWERS.append(ASK[0]())
        with private.native():
            return func(*args, **(kwargs or {}))


CALLS, ANSWERS, ASK = [], [], [lambda: None]


@pytest.fixture
def record():
    """Functions called, and what `ask` returned at each call, while `call` runs on a Recorder."""

    def run(call, *shape, ask=lambda: None):
        CALLS.clear(), ANSWERS.clear()
        ASK[0] = ask
        call(torch.rand(*shape).as_subclass(Recorder))
        return [func for func, _, _ in CALLS], list(ANSWERS)

    yield run
    ASK[0] = lambda: None


# --------------------------------------------------------------------------- state of the thread
def test_native_switches_torch_functions_off(record):
    def call(x):
        with private.native():
            assert type(x + 1) is torch.Tensor
            assert x.shape == (3,)

    assert record(call, 3) == ([], [])


def test_the_autograd_node_tells_that_backward_runs():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(private.current_autograd_node()))
    assert private.current_autograd_node() is None
    x.sum().backward()
    assert seen[0] is not None
    assert private.current_autograd_node() is None


def test_forward_mode_is_off_inside_the_forward_of_a_function_only():
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(private.forward_mode_enabled())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(private.forward_mode_enabled())
            return grad

    Function.apply(torch.ones(2, requires_grad=True)).sum().backward()
    with torch.no_grad():
        seen.append(private.forward_mode_enabled())
    assert seen == [False, True, True]


# ----------------------------------------------------------------------------- names of functions
NAMES = {
    "gelu": (private.NN.gelu, nn.GELU(), (3,)),
    "linear": (private.NN.linear, nn.Linear(3, 3), (3,)),
    "silu": (private.NN.silu, lambda x: private.NN.silu(x), (3,)),
    "clip": (
        private.FOREACH_NORM,
        lambda x: nn.utils.get_total_norm([x], foreach=True),
        (3,),
    ),
    "adam": (torch._foreach_addcdiv_, lambda x: torch._foreach_addcdiv_([x], [x], [x], 1), (3,)),
    "left aligned": (
        private.is_left_aligned,
        lambda x: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1
        ).eval()(x, src_key_padding_mask=torch.zeros(2, 5).bool()),
        (2, 5, 4),
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_torch_passes_this_function(record, name):
    func, call, shape = NAMES[name]
    with torch.no_grad():
        functions, _ = record(call, *shape)
    assert func in functions


def test_functions_of_lists():
    found = private.foreach_functions()
    assert {torch._foreach_add_, torch._fused_adamw_} <= set(found)
    assert private.FOREACH_NORM not in found


def test_an_unsafe_view_is_not_a_view():
    x = torch.ones(1, 3, requires_grad=True) * 2
    out = private.unsafe_view(x, (3,))
    assert out.data_ptr() == x.data_ptr()
    assert not out._is_view()
    assert x.view(3)._is_view()


def test_grad_scaler_unscales_a_list(record):
    def call(x):
        private.UNSCALE([x], torch.zeros(1), torch.full((1,), 0.5))
        assert CALLS[-1][0] is private.UNSCALE

    record(call, 3)


def test_deprecated_arguments_of_losses():
    with pytest.warns(UserWarning, match="deprecated"):
        assert private.legacy_reduction(False, None) == "sum"
    with pytest.warns(UserWarning, match="deprecated"):
        assert private.legacy_reduction(None, False) == "none"


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_returns_the_log_sum_exp(causal):
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    out, lse = private.FLASH(q, k, v, 0.0, causal, attn_mask=None, scale=0.5)
    scores = q @ k.mT * 0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(5, 5).bool().tril(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    grads = private.FLASH_BACKWARD(out, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=0.5)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(
        F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.5), leaves, out
    )
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_pointwise_tags():
    """Names with a tag, names without one, and names whose tag is not followed."""
    tagged = pointwise.tagged()
    assert {"add", "exp", "gelu", "lerp", "igamma", "airy_ai", "masked_fill"} <= tagged
    assert not tagged & {*pointwise.UNTAGGED.split()}
    assert not tagged & {"sum", "sort", "softmax", "dropout", "cumsum", "matmul", "max", "equal"}
    for name in (*pointwise.OTHER_RULES.split(), *pointwise.NOT_TENSORS.split()):
        assert name == "bernoulli" or pointwise._is_tagged(name)


# ------------------------------------------------------------------------------------ TorchDynamo
def test_dynamo_compiles_neither_a_function_nor_what_it_calls():
    def compiled_frames(wrapper):
        def helper(x):
            return x * 5

        def func(x):
            return helper(x) + 1

        torch._dynamo.reset()
        counter = CompileCounter()
        run = torch.compile(wrapper(func), backend=counter)
        assert run(torch.ones(2)).tolist() == [6, 6]
        return counter.frame_count

    assert compiled_frames(lambda func: func) == 1
    assert compiled_frames(private.not_compiled) == 0


def test_dynamo_reports_what_it_does_not_support():
    error = private.unsupported_by_dynamo("because")
    assert isinstance(error, torch._dynamo.exc.Unsupported)
    assert "because" in str(error)


# ------------------------------------------------------------------------------ no torch function
UNASKED = {
    "ScriptFunction": lambda x: torch.jit.script(F.tanhshrink)(x),
    "_wrap_tensor_for_grad": torch.func.grad(lambda x: (x * x).sum()),
    "_maybe_wrap_functional_tensor": torch.func.functionalize(lambda x: x * x),
    "to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
}


@pytest.mark.parametrize("name", UNASKED)
def test_some_functions_do_not_ask(record, name):
    assert record(UNASKED[name], 3) == ([], [])


def test_each_of_them_is_listed():
    names = [o.__name__ if isinstance(o, type) else a for o, a, _ in private.UNASKED]
    assert names == list(UNASKED)


# --------------------------------------------------------------------------------- the call stack
def test_vmap_asks_for_a_size(record):
    ask = lambda: private.called_by_vmap()  # noqa: E731 - as a rule calls it
    functions, answers = record(lambda x: torch.vmap(torch.sin)(x), 3, ask=ask)
    assert [a for f, a in zip(functions, answers, strict=True) if f is torch.Tensor.size] == [True]
    functions, answers = record(lambda x: x.size(0), 3, ask=ask)
    assert answers == [False]


def test_ddp_detaches_buffers(record):
    def _sync_module_states(x):
        return x.detach()

    ask = lambda: private.called_by_ddp()  # noqa: E731 - as a rule calls it
    assert record(_sync_module_states, 3, ask=ask)[1] == [True]
    assert record(torch.detach, 3, ask=ask)[1] == [False]
    assert ".detach()" in inspect.getsource(torch.distributed.utils._sync_module_states)


def test_a_dtensor_is_made_in_this_file():
    file = inspect.getsourcefile(DTensor.from_local)
    assert file.endswith("torch/distributed/tensor/_api.py")
    assert "input.view_as(input)" in Path(file).read_text(encoding="utf-8")


def test_a_fake_tensor_asks_for_the_storage(record):
    def call(x):
        with FakeTensorMode() as mode:
            mode.from_tensor(x)

    functions, answers = record(call, 3, ask=private.called_by_fake_tensor)
    assert dict(zip(functions, answers, strict=True))[torch.Tensor.untyped_storage]


def test_a_checkpoint_is_an_autograd_function(record):
    _, answers = record(
        lambda x: checkpoint(torch.sin, x.requires_grad_(), use_reentrant=True),
        3,
        ask=private.in_checkpoint,
    )
    assert True in answers
    _, answers = record(torch.sin, 3, ask=private.in_checkpoint)
    assert answers == [False]


def test_modules_take_the_node_of_their_tensors_for_a_full_backward_hook():
    node, answers = torch.Tensor.grad_fn.__get__, []
    ask = lambda: private.tensors_of_module_hook()  # noqa: E731 - as a rule calls it

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func == node:
                answers.append(ask())
            return super().__torch_function__(func, types, args, kwargs)

    layer = nn.Bilinear(3, 3, 3)
    layer.register_full_backward_hook(lambda *_: None)
    x = torch.rand(2, 3, requires_grad=True).as_subclass(Asked)
    y = layer(x, x)
    assert {len(found) for found in answers} == {2, 1}
    assert answers[0][0].grad_fn is answers[0][1].grad_fn
    answers.clear()
    assert y.grad_fn
    assert answers == [None]


def test_l1_loss_drops_its_weight(record):
    _, answers = record(
        lambda x: F.l1_loss(x, torch.zeros(3), weight=torch.ones(3)), 3, ask=private.l1_loss_weight
    )
    assert torch.equal(answers[0], torch.ones(3))
    assert "weight" not in CALLS[0][2]
    assert len(CALLS[0][1]) <= 2


def test_functorch_transforms_are_seen():
    """The one private name of `comm.linear`."""
    assert not torch._C._are_functorch_transforms_active()
    active = []
    torch.func.grad(lambda x: (active.append(torch._C._are_functorch_transforms_active()), x)[1])(
        torch.tensor(1.0)
    )
    assert active == [True]


@pytest.mark.parametrize("name", ["select", "index_select"])
def test_functions_that_pyg_replaces_call_the_original(record, name):
    replaced = getattr(torch_geometric_imported(), name)
    calls = record(lambda x: replaced(x, 0, 0 if name == "select" else torch.tensor([0])), 3, 2)[0]
    assert getattr(private.ORIGINALS, name) in calls
    assert getattr(private.ORIGINALS, name) in RULES


def torch_geometric_imported():
    import torch_geometric  # noqa: F401 - it replaces functions of torch

    return torch
