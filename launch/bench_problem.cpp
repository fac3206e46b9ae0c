#include "launch/bench_problem.h"

#include <array>
#include <cmath>
#include <utility>

#include "src/base/dtype.h"

namespace cpattn {
namespace {

/// Unit variance, uniform: attention weights stay flat, so no work is skipped and none is special.
void fill(const AnyTensor& tensor, std::uint64_t seed) {
  const float width = std::sqrt(12.0f);
  const std::int64_t count = tensor.shape[0] * tensor.shape[1] * tensor.shape[2];
  std::uint64_t state = seed * 2 + 1;
  for (std::int64_t i = 0; i < count; ++i) {
    state ^= state << 13;  // xorshift64 (Marsaglia 2003)
    state ^= state >> 7;
    state ^= state << 17;
    const float unit = static_cast<float>(state >> 40) * 0x1p-24f;
    store_from_float(tensor.data, tensor.dtype, i, (unit - 0.5f) * width);
  }
}

/// Of one channel of a head: two products in the forward, five in the backward, 2 flop each.
double flop_per_pair(BenchPass pass) {
  switch (pass) {
    case BenchPass::forward:
      return 4.0;
    case BenchPass::backward:
      return 10.0;
    case BenchPass::both:
      return 14.0;
  }
  return 0.0;
}

}  // namespace

double BenchProblem::useful_flop() const {
  const auto tokens = static_cast<double>(seq_len);
  const double all = flop_per_pair(pass) * tokens * tokens * static_cast<double>(head_dim * heads);
  return mask == MaskKind::causal ? all / 2.0 : all;
}

Problem BenchProblem::problem() const {
  Problem result;
  result.shape.num_heads = heads;
  result.shape.num_kv_heads = kv_heads;
  result.shape.head_dim = head_dim;
  result.shape.value_dim = head_dim;
  result.shape.softmax_scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  result.batch = batch_of_one(seq_len, seq_len);
  result.dtype = dtype;
  result.out_dtype = out_dtype;
  return result;
}

std::vector<BenchProblem> bench_problems(const RunConfig& config, const BenchSweep& choice) {
  std::vector<BenchProblem> problems;
  for (const DType dtype : or_choice(config.dtypes, choice.dtypes)) {
    for (const std::int64_t head_dim : or_choice(config.head_dims, choice.head_dims)) {
      for (const std::int64_t seq_len : or_choice(config.seq_lens, choice.seq_lens)) {
        for (const MaskKind mask : or_choice(config.masks, choice.masks)) {
          for (const BenchPass pass : or_choice(config.passes, choice.passes)) {
            problems.push_back({.dtype = dtype,
                                .mask = mask,
                                .head_dim = head_dim,
                                .seq_len = seq_len,
                                .heads = config.heads,
                                .kv_heads = config.kv_heads,
                                .pass = pass});
          }
        }
      }
    }
  }
  return problems;
}

std::string_view suffix_of(BenchPass pass) {
  switch (pass) {
    case BenchPass::forward:
      return "";
    case BenchPass::backward:
      return "_gradient";
    case BenchPass::both:
      return "_and_gradient";
  }
  return "";
}

BenchTensors::BenchTensors(const BenchProblem& problem, std::int64_t q_rows, std::int64_t kv_rows,
                           int rank, Device* device) {
  std::uint64_t seed = static_cast<std::uint64_t>(rank) * 4;
  const bool is_elsewhere = device != nullptr && device->kind() != DeviceKind::cpu;
  const auto place = [&](Buffer& memory, Buffer host, std::size_t size_bytes) {
    if (!is_elsewhere) {
      memory = std::move(host);
      return;
    }
    memory = device->allocate(size_bytes);
    device->upload(memory.data(), {host.data(), size_bytes});
  };
  const auto make = [&](Buffer& memory, DType dtype, std::int64_t rows, std::int64_t heads) {
    const std::size_t size_bytes =
        static_cast<std::size_t>(rows * heads * problem.head_dim) * size_of(dtype);
    Buffer host(size_bytes);
    AnyTensor tensor =
        contiguous_tensor(static_cast<void*>(host.data()), dtype, {rows, heads, problem.head_dim});
    fill(tensor, ++seed);
    place(memory, std::move(host), size_bytes);
    tensor.data = memory.data();
    return tensor;
  };
  tensors_.q = make(memory_[0], problem.dtype, q_rows, problem.heads);
  tensors_.k = make(memory_[1], problem.dtype, kv_rows, problem.kv_heads);
  tensors_.v = make(memory_[2], problem.dtype, kv_rows, problem.kv_heads);
  tensors_.out = make(memory_[3], problem.out_dtype, q_rows, problem.heads);
  const std::size_t lse_bytes = static_cast<std::size_t>(q_rows * problem.heads) * sizeof(float);
  place(memory_[4], Buffer(lse_bytes), lse_bytes);
  tensors_.lse =
      contiguous_view(memory_[4].as<float>(), std::array<std::int64_t, 2>{q_rows, problem.heads});
  if (problem.pass == BenchPass::forward) return;
  dout_ = make(memory_[5], problem.out_dtype, q_rows, problem.heads);
  dq_ = make(memory_[6], problem.out_dtype, q_rows, problem.heads);
  dk_ = make(memory_[7], problem.out_dtype, kv_rows, problem.kv_heads);
  dv_ = make(memory_[8], problem.out_dtype, kv_rows, problem.kv_heads);
}

ForwardTensors BenchTensors::tensors() const { return tensors_; }

BackwardTensors BenchTensors::backward_tensors() const {
  const TensorView<float, 2>& lse = tensors_.lse;
  return {.q = tensors_.q,
          .k = tensors_.k,
          .v = tensors_.v,
          .out = tensors_.out,
          .lse = {lse.data, lse.shape, lse.strides},
          .dout = dout_,
          .dlse = {},
          .dq = dq_,
          .dk = dk_,
          .dv = dv_};
}

void BenchAttention::run(const BenchTensors& tensors) {
  switch (pass_) {
    case BenchPass::forward:
      return forward(tensors);
    case BenchPass::backward:
      return gradient_->backward(tensors.backward_tensors(), stream_);
    case BenchPass::both:
      forward(tensors);
      return gradient_->backward(tensors.backward_tensors(), stream_);
  }
}

TransferStats BenchAttention::stats() const {
  TransferStats sum = ring_.stats();
  if (!gradient_) return sum;
  for (const TransferStats& more : {gradient_->ring_stats(), gradient_->piece_stats()}) {
    sum.bytes_sent += more.bytes_sent;
    sum.messages_posted += more.messages_posted;
    sum.exposed_seconds += more.exposed_seconds;
  }
  return sum;
}

}  // namespace cpattn
