"""Context-parallel attention as a differentiable PyTorch function and as a module.

    import cpattn.torch
    out = cpattn.torch.context_parallel_attention(q, k, v, cu_seqlens=cu_seqlens)
    loss(out).backward()

Every rank brings its shard, and the gradients that come back are those of its shard. Forward and
backward are collective: all ranks call them, in the same order. Where Transformer Engine has a name
for something, that name works too: `qkv_format`, `attn_mask_type`, `cp_group`.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch

from cpattn import _cpattn
from cpattn._cpattn import InvalidArgumentError, UnsupportedError
from cpattn import _torch_call
from cpattn._torch_call import (
    agreed_plan,
    check_maxima,
    check_tensors,
    checked_call,
    local_problem,
)
from cpattn.groups import GroupLike, complaint_of, group_of

__all__ = ["ContextParallelAttention", "context_parallel_attention"]


# Addresses on a GPU are multiples of this many bytes.
_ALIGNMENT = 16


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers without gaps, as they are in memory, at an address that a GPU takes."""
    tensor = tensor.contiguous().resolve_neg()
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


class _Gradients(torch.autograd.Function):
    """dq, dk, dv as a step of its own, so that deriving them once more is an error, not a zero."""

    @staticmethod
    def forward(ctx, compute, *tensors):
        return compute(*(None if t is None else t.detach() for t in tensors))

    @staticmethod
    def backward(ctx, *gradients):
        raise UnsupportedError("second derivatives of attention are not implemented")


class _PlannedAttention(torch.autograd.Function):
    """out, lse of one planned call. The plan, and with it the group, goes into the backward by
    value: whatever group the next call uses, this one's gradients travel on their own."""

    @staticmethod
    def forward(ctx, plan, head_maxima, q, k, v):
        out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        stream, _ = _torch_call.cuda_stream(q.device)
        rows = (q.detach(), k.detach(), v.detach())
        plan.forward(*rows, out=out, lse=lse, head_maxima=head_maxima, stream=stream)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        def compute(q, k, v, out, lse, dout, dlse):
            # Autograd brings no gradient for an output nobody used, and any strides, such as the
            # zeros of an expanded scalar, and negated views.
            dout = torch.zeros_like(out) if dout is None else _dense(dout)
            dlse = None if dlse is None else _dense(dlse)
            dq, dk, dv = (
                torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                for tensor in (q, k, v)
            )
            stream, _ = _torch_call.cuda_stream(q.device)
            given = (q, k, v, out, lse, dout)
            ctx.plan.backward(*given, dlse=dlse, dq=dq, dk=dk, dv=dv, stream=stream)
            return dq, dk, dv

        return None, None, *_Gradients.apply(compute, *ctx.saved_tensors, dout, dlse)


class _DoubleAttention(torch.autograd.Function):
    """The same in float64 by the reference, on one rank: for torch.autograd.gradcheck."""

    @staticmethod
    def forward(ctx, call, q, k, v):
        options = dict(call.options)
        ctx.problem, ctx.causal = local_problem(call), options["mask"] == "causal"
        ctx.threads = options["threads"]
        ctx.save_for_backward(q, k, v)
        results = _cpattn.reference_forward(
            ctx.problem, ctx.causal, q.detach(), k.detach(), v.detach(), ctx.threads
        )
        return tuple(torch.from_numpy(result) for result in results)

    @staticmethod
    def backward(ctx, dout, dlse):
        def compute(q, k, v, dout, dlse):
            results = _cpattn.reference_backward(
                ctx.problem, ctx.causal, q, k, v, dout, dlse, ctx.threads
            )
            return tuple(torch.from_numpy(result) for result in results)

        dout, dlse = _dense(dout), _dense(dlse.unsqueeze(2))
        return None, *_Gradients.apply(compute, *ctx.saved_tensors, dout, dlse)


def _to_thd(tensor: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """[tokens, batch * heads, channels]: a batch of equal lengths is more heads of one document."""
    if qkv_format == "thd":
        return tensor
    if qkv_format == "bshd":
        tensor = tensor.transpose(0, 1)
    return tensor.flatten(1, 2)


def _from_thd(tensor: torch.Tensor, qkv_format: str, batch: int) -> torch.Tensor:
    if qkv_format == "thd":
        return tensor
    tensor = tensor.unflatten(1, (batch, tensor.shape[1] // batch))
    return tensor.transpose(0, 1) if qkv_format == "bshd" else tensor


def _attend(plan, head_maxima, rows, batch):
    """out, lse of rows [tokens, batch * heads, channels]; `head_maxima` is of the batch's heads."""
    if head_maxima is None or batch == 1:
        return _PlannedAttention.apply(plan, head_maxima, *rows)
    maxima = torch.full((rows[0].shape[1],), -float("inf"), device=rows[0].device)
    results = _PlannedAttention.apply(plan, maxima, *rows)
    maxima = maxima.unflatten(0, (batch, head_maxima.shape[0])).amax(0)
    head_maxima.copy_(torch.maximum(head_maxima, maxima))
    return results


def _one_group(group: GroupLike, cp_group: GroupLike) -> GroupLike:
    if group is not None and cp_group is not None and group is not cp_group:
        raise InvalidArgumentError("group, cp_group: two names of one argument, expected one")
    return cp_group if group is None else group


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_kv: Any = None,
    causal: Optional[bool] = None,
    softmax_scale: Optional[float] = None,
    sharding: str = "zigzag",
    group: GroupLike = None,
    return_lse: bool = False,
    qkv_format: str = "thd",
    attn_mask_type: Optional[str] = None,
    cp_group: GroupLike = None,
    head_maxima: Optional[torch.Tensor] = None,
    **config: Any,
) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:
    """softmax(softmax_scale * q k^T + mask) v over the sequence that the group's ranks share.

    Collective, as is its backward: all ranks of the group call it, with equal arguments and their
    own rows.

    Args:
        q: [tokens, heads, channels], this rank's query rows in the order of the sharding
            (`cpattn.Sharding.shard`); float32, float16 or bfloat16; any strides, but the last
            dimension contiguous. float64 on one rank runs through the reference, slowly: that is
            for torch.autograd.gradcheck. On the CPU; or on a GPU, in the order of torch's current
            stream, which may be in capture (torch.cuda.graph) after a warm-up of forward and
            backward with the same shapes, lengths and knobs. Addresses on a GPU are multiples of
            16. GPUs: executed on doubles of CUDA only, not run on a GPU.
        k, v: [tokens, kv_heads, channels] likewise; query head h reads kv head
            h // (heads // kv_heads). v may have another number of channels.
        cu_seqlens: *global* cumulative lengths of the packed documents, [documents + 1] integers
            from 0. None: one document, all rows of all ranks.
        cu_seqlens_kv: those of the keys where they differ.
        causal: a query sees keys up to its own place, bottom-right aligned. None: True, or what
            `attn_mask_type` says. (Not `mask`: that is refused.)
        softmax_scale: None: 1 / sqrt(channels).
        sharding: "zigzag", "contiguous" or "dual_chunk": which rank owns which rows.
        group: None: all ranks of mpirun, or this process alone; `cpattn.world()`,
            `cpattn.self_group()`, or an mpi4py communicator. Used for this call and its backward,
            remembered for no other. `cp_group` is the same. For tensors on GPUs the first call
            makes a `cpattn.cuda_group` of these ranks, kept with the group; or pass one.
        return_lse: also return the natural log of the sum of exp(softmax_scale * q.k).
        qkv_format: "thd"; "sbhd" [tokens, batch, heads, channels] or "bshd" [batch, tokens, heads,
            channels] for a batch of documents of one length, each split alike (bshd costs a copy
            of each tensor).
        attn_mask_type: Transformer Engine's name for the mask, instead of `causal`; both must not
            contradict each other.
        head_maxima: float32 [heads], contiguous, on q's device: head_maxima[h] becomes the larger
            of what it was and the largest visible softmax_scale * q.k of head h over this rank's
            rows, in place and outside of autograd. Begin with -inf, which stays where nothing was
            observed; `cpattn.max_over_ranks` makes it the group's.
        config: knobs by their names: schedule, chunk_tokens, threads (default:
            torch.get_num_threads()), timeout, isa, ...; isa and threads are of the CPU.
    Returns:
        out, in the layout and dtype of q with v's channels; with return_lse (out, lse), lse float32
        without the last dimension. Both are differentiable.
    Raises:
        InvalidArgumentError: (a ValueError) on every rank, before anything moves, when any rank's
            arguments are wrong or the ranks' arguments differ.
        CommError: a peer failed or is late; the group cannot be used again.
    """
    # Chosen before anything is refused: a rank that gives two groups says so in the first.
    ranks = group_of(cp_group if group is None else group)
    complaint, call = "", None
    try:
        _one_group(group, cp_group)
        check_tensors(q, k, v, qkv_format)
        rows = [_to_thd(tensor, qkv_format) for tensor in (q, k, v)]
        batch = 1 if qkv_format == "thd" else q.shape[qkv_format.index("b")]
        if head_maxima is not None:
            check_maxima(head_maxima, q, q.shape[-2])
        if qkv_format != "thd" and cu_seqlens is not None:
            raise InvalidArgumentError(
                f"cu_seqlens: given with qkv_format {qkv_format!r}, expected None or 'thd'"
            )
        call = checked_call(
            ranks,
            *rows,
            cu_seqlens=cu_seqlens,
            cu_seqlens_kv=cu_seqlens_kv,
            causal=causal,
            attn_mask_type=attn_mask_type,
            softmax_scale=softmax_scale,
            config={"sharding": sharding, **config},
        )
    except Exception as error:
        complaint = complaint_of(error)
    requires_grad = torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in (q, k, v)
    )
    if call is not None and q.dtype == torch.float64:
        out, lse = _DoubleAttention.apply(call, *rows)
    else:
        plan = agreed_plan(ranks, call, complaint, requires_grad)
        out, lse = _attend(plan, head_maxima, rows, batch)
    out = _from_thd(out, qkv_format, batch)
    return (out, _from_thd(lse, qkv_format, batch)) if return_lse else out


class ContextParallelAttention(torch.nn.Module):
    """`context_parallel_attention` with its settings kept; it has no parameters.

    Args: those of the function but for the tensors and lengths. A group given here is used by the
        calls that name none; one given to a call is used by that call alone.
    Raises:
        InvalidArgumentError: two different groups. Everything else is refused by the calls.
    """

    def __init__(
        self,
        *,
        causal: Optional[bool] = None,
        softmax_scale: Optional[float] = None,
        sharding: str = "zigzag",
        group: GroupLike = None,
        cp_group: GroupLike = None,
        qkv_format: str = "thd",
        **config: Any,
    ):
        super().__init__()
        self.settings = {
            "causal": causal,
            "softmax_scale": softmax_scale,
            "sharding": sharding,
            "qkv_format": qkv_format,
            **config,
        }
        self.group = _one_group(group, cp_group)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens: Any = None,
        cu_seqlens_kv: Any = None,
        group: GroupLike = None,
        return_lse: bool = False,
        head_maxima: Optional[torch.Tensor] = None,
    ) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:
        """As `context_parallel_attention`."""
        return context_parallel_attention(
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            cu_seqlens_kv=cu_seqlens_kv,
            group=self.group if group is None else group,
            return_lse=return_lse,
            head_maxima=head_maxima,
            **self.settings,
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())
