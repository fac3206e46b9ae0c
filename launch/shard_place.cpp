#include "launch/shard_place.h"

#include <algorithm>
#include <utility>

#include "src/base/error.h"

namespace cpattn {
namespace {

/// Owned by the World.
std::shared_ptr<Communicator> borrowed(Communicator& comm) {
  return {std::shared_ptr<void>(), &comm};
}

/// 0 where none can be used: making the group then tells all ranks why, and none goes on alone.
int count_gpus(const std::string& backend) {
  try {
    return static_cast<int>(CudaBackend::open(backend)->devices().size());
  } catch (const Error&) {
    return 0;
  }
}

template <class T>
std::size_t bytes_of(const BasicAnyTensor<T>& tensor) {
  return static_cast<std::size_t>(tensor.shape[0] * tensor.shape[1] * tensor.shape[2]) *
         size_of(tensor.dtype);
}

}  // namespace

ShardPlace ShardPlace::on_cpu(const RunConfig& config) {
  ShardPlace place;
  place.kernels_ = &kernels_of(config);
  return place;
}

ShardPlace ShardPlace::on_gpu(const RunConfig& config, World& world) {
  ShardPlace place;
  const int num_gpus = count_gpus(config.cuda_backend);
  place.gpu_ =
      GpuGroup::make(borrowed(world.comm), {.device = world.local_rank % std::max(num_gpus, 1),
                                            .exchange = config.exchange,
                                            .nccl_comm = nullptr,
                                            .backend = config.cuda_backend,
                                            .allocator = {},
                                            .timeout = Seconds(config.cp_config.timeout_seconds)});
  place.kernels_ = &place.gpu_->kernels();
  place.stream_ = place.gpu_->make_stream();
  return place;
}

std::string ShardPlace::description() const {
  return detail::concat(gpu_->backend()->description(), "; ", gpu_->device().description());
}

std::unique_ptr<OwnedGraph> ShardPlace::capture(const std::function<void()>& work) const {
  return gpu_->capture(stream(), work);
}

std::byte* PlacedTensors::place(const void* data, std::size_t size_bytes) {
  Buffer there = device_.allocate(size_bytes);
  device_.upload(there.data(), {static_cast<const std::byte*>(data), size_bytes});
  inputs_.push_back(std::move(there));
  return inputs_.back().data();
}

AnyTensor PlacedTensors::input(const AnyConstTensor& host) {
  AnyTensor there{const_cast<void*>(host.data), host.dtype, host.shape, host.strides};
  if (device_.kind() == DeviceKind::cpu || host.data == nullptr) return there;
  there.data = place(host.data, bytes_of(host));
  return there;
}

TensorView<float, 2> PlacedTensors::input(const TensorView<const float, 2>& host) {
  TensorView<float, 2> there{const_cast<float*>(host.data), host.shape, host.strides};
  if (device_.kind() == DeviceKind::cpu || host.data == nullptr) return there;
  const auto count = static_cast<std::size_t>(host.shape[0] * host.shape[1]);
  there.data = reinterpret_cast<float*>(place(host.data, count * sizeof(float)));
  return there;
}

AnyTensor PlacedTensors::output(const AnyTensor& host) {
  AnyTensor there = input(host);
  if (there.data == host.data) return there;
  outputs_.push_back(
      {std::move(inputs_.back()), {static_cast<std::byte*>(host.data), bytes_of(host)}});
  inputs_.pop_back();
  return there;
}

TensorView<float, 2> PlacedTensors::output(const TensorView<float, 2>& host) {
  const TensorView<float, 2> there =
      input(TensorView<const float, 2>{host.data, host.shape, host.strides});
  if (there.data == host.data) return there;
  const auto count = static_cast<std::size_t>(host.shape[0] * host.shape[1]);
  outputs_.push_back({std::move(inputs_.back()),
                      {reinterpret_cast<std::byte*>(host.data), count * sizeof(float)}});
  inputs_.pop_back();
  return there;
}

void PlacedTensors::fetch() {
  for (const Copy& copy : outputs_) device_.download(copy.here, copy.there.data());
}

}  // namespace cpattn
