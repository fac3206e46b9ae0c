// Ranks as threads, each with a GPU, and whole problems run on them.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cp/context_parallel.h"
#include "cp/cuda_backend.h"
#include "tests/support/attend_backward.h"
#include "tests/support/batches.h"

namespace cpattn::testing {

/// The one that the executable tests, with at least one GPU.
std::shared_ptr<CudaBackend> backend_under_test();

enum class GpuExchangeKind { nccl, host };

/// NCCL where every rank has a GPU of its own.
inline GpuExchangeKind nccl_if_possible(int world_size) {
  const auto num_gpus = static_cast<int>(backend_under_test()->devices().size());
  return world_size <= num_gpus ? GpuExchangeKind::nccl : GpuExchangeKind::host;
}

/// One rank: its device, its stream, what moves its shards.
struct GpuRank {
  Communicator& comm;
  std::shared_ptr<CudaBackend> backend;
  std::shared_ptr<Device> device;
  std::shared_ptr<ShardTransport> transport;
  std::unique_ptr<OwnedStream> stream;

  const KernelTable& kernels() const { return backend->kernels(device); }
  Stream queue() const { return stream->get(); }
  void finish() const { transport->synchronize(queue(), deadline_after(Seconds(60))); }
};

/// Runs `body` on every rank, each in its own thread.
inline void on_gpu_ranks(int world_size, GpuExchangeKind exchange,
                         const std::function<void(GpuRank&)>& body) {
  const std::shared_ptr<CudaBackend> backend = backend_under_test();
  const auto num_gpus = static_cast<int>(backend->devices().size());
  LoopbackWorld(world_size).run([&](Communicator& comm) {
    const std::shared_ptr<Communicator> control(std::shared_ptr<void>(), &comm);
    GpuRank rank{comm, backend, backend->open_device(comm.rank() % num_gpus), nullptr, nullptr};
    rank.stream = backend->make_stream(rank.device);
    rank.transport = exchange == GpuExchangeKind::nccl
                         ? backend->nccl_transport(control, rank.device, nullptr, Seconds(60))
                         : backend->host_transport(control, rank.device);
    body(rank);
  });
}

/// A tensor of the host and its copy on a device.
class Mirrored {
 public:
  Mirrored() = default;
  Mirrored(Device& device, HostTensor& host) : device_(&device), host_(host.view()) {
    there_ = device.allocate(bytes());
    put();
  }
  Mirrored(Device& device, std::vector<float>& host)
      : device_(&device),
        host_(contiguous_tensor(static_cast<void*>(host.data()), DType::f32,
                                {static_cast<std::int64_t>(host.size()), 1, 1})) {
    there_ = device.allocate(bytes());
    put();
  }

  void put() { device_->upload(there_.data(), {static_cast<std::byte*>(host_.data), bytes()}); }
  void fetch() { device_->download({static_cast<std::byte*>(host_.data), bytes()}, there_.data()); }

  AnyTensor view() const {
    AnyTensor tensor = host_;
    tensor.data = there_.data();
    return tensor;
  }
  TensorView<float, 2> rows(std::int64_t heads) const {
    return contiguous_view(there_.as<float>(), std::array{host_.shape[0] / heads, heads});
  }
  TensorView<float, 1> flat() const {
    return contiguous_view(there_.as<float>(), std::array{host_.shape[0]});
  }

 private:
  std::size_t bytes() const {
    return static_cast<std::size_t>(host_.shape[0] * host_.shape[1] * host_.shape[2]) *
           size_of(host_.dtype);
  }

  Device* device_ = nullptr;
  AnyTensor host_;
  Buffer there_;
};

/// One rank's tensors of a problem on its GPU.
struct GpuTensors {
  RankGradients host;
  std::vector<float> maxima;
  Mirrored q, k, v, out, lse, dout, dlse, dq, dk, dv, head_maxima;
  std::int64_t num_heads;

  GpuTensors(const AttentionCase& problem, const Upstream& upstream, const Shard& shard,
             Device& device)
      : host(problem, upstream, shard, DType::f32),
        maxima(static_cast<std::size_t>(problem.shape.num_heads), -kInf),
        q(device, host.forward.q),
        k(device, host.forward.k),
        v(device, host.forward.v),
        out(device, host.forward.out),
        lse(device, host.forward.lse),
        dout(device, host.dout),
        dlse(device, host.dlse),
        dq(device, host.dq),
        dk(device, host.dk),
        dv(device, host.dv),
        head_maxima(device, maxima),
        num_heads(problem.shape.num_heads) {}

  ForwardTensors forward_views() const {
    return {q.view(), k.view(), v.view(), out.view(), lse.rows(num_heads), head_maxima.flat()};
  }
  BackwardTensors backward_views() const {
    const auto as_input = [](const TensorView<float, 2>& view) {
      return TensorView<const float, 2>{view.data, view.shape, view.strides};
    };
    return {.q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .out = out.view(),
            .lse = as_input(lse.rows(num_heads)),
            .dout = dout.view(),
            .dlse = as_input(dlse.rows(num_heads)),
            .dq = dq.view(),
            .dk = dk.view(),
            .dv = dv.view()};
  }
  void fetch() {
    for (Mirrored* tensor : {&out, &lse, &dq, &dk, &dv, &head_maxima}) tensor->fetch();
  }
};

/// All results of a problem, from all ranks.
struct GpuResults {
  Attended forward;
  Gradients gradients;
  std::vector<float> maxima;  ///< of all ranks
};

inline GpuResults empty_results(const AttentionCase& problem) {
  return {unset_global_result(problem),
          {HostTensor(DType::f32, problem.q.shape()), HostTensor(DType::f32, problem.k.shape()),
           HostTensor(DType::f32, problem.v.shape())},
          std::vector<float>(static_cast<std::size_t>(problem.shape.num_heads), -kInf)};
}

/// What a rank fetched, to where it belongs. One rank at a time.
inline void collect(const GpuTensors& tensors, const Shard& shard, GpuResults& whole) {
  tensors.host.forward.scatter(shard, whole.forward);
  tensors.host.scatter(shard, whole.gradients);
  for (std::size_t h = 0; h < whole.maxima.size(); ++h)
    whole.maxima[h] = std::max(whole.maxima[h], tensors.maxima[h]);
}

inline ::testing::AssertionResult same(const GpuResults& actual, const GpuResults& expected) {
  auto result = bits_equal(actual.forward.out, expected.forward.out);
  if (!result) return result << " (out)";
  result = bits_equal(actual.forward.lse, expected.forward.lse);
  if (!result) return result << " (lse)";
  result = bits_equal(actual.maxima, expected.maxima);
  if (!result) return result << " (head_maxima)";
  return same(actual.gradients, expected.gradients);
}

inline AttentionCase small_case(DType dtype, MaskKind mask, std::uint64_t seed = 1) {
  return make_random_case(make_shape(2, 1, 16, 16), pack({70, 0, 41}), test_config(mask, 16), dtype,
                          seed);
}

/// Forward and backward on `world_size` ranks, `repeats` times.
inline GpuResults run_on_gpus(const AttentionCase& problem, int world_size,
                              GpuExchangeKind exchange, int repeats = 1) {
  const Upstream upstream = random_upstream(problem, 3);
  GpuResults whole = empty_results(problem);
  std::mutex mutex;
  on_gpu_ranks(world_size, exchange, [&](GpuRank& rank) {
    const auto plan = ContextParallelAttention(rank.transport, problem.config, &rank.kernels())
                          .plan(problem_of(problem));
    GpuTensors tensors(problem, upstream, plan->plan().shard(), *rank.device);
    for (int i = 0; i < repeats; ++i) {
      plan->forward(tensors.forward_views(), rank.queue());
      plan->backward(tensors.backward_views(), rank.queue());
    }
    rank.finish();
    tensors.fetch();
    const std::lock_guard lock(mutex);
    collect(tensors, plan->plan().shard(), whole);
  });
  return whole;
}

}  // namespace cpattn::testing
