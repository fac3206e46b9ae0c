#include "src/device/cuda_device.h"

#include <cstring>
#include <utility>

#include "src/base/error.h"
#include "src/device/cuda_handles.h"

namespace cpattn {
namespace {

constexpr std::size_t kBufferAlignment = 256, kTensorAlignment = 16;

/// "13.0"
std::string version_text(int version) {
  constexpr int kMajor = 1000, kMinor = 10;
  return detail::concat(version / kMajor, ".", version % kMajor / kMinor);
}

std::string describe_missing(cudaError_t status, const CudaFacts& facts) {
  if (status == cudaErrorInsufficientDriver && facts.driver_version == 0)
    return "no CUDA driver on this machine";
  if (status == cudaErrorInsufficientDriver) {
    return detail::concat("the CUDA driver is older than the library: it knows CUDA up to ",
                          version_text(facts.driver_version), ", expected ",
                          version_text(facts.runtime_version), " (update the driver)");
  }
  if (status == cudaErrorNoDevice || status == cudaSuccess)
    return "a CUDA driver, but no GPU that it gives to this process";
  return detail::concat("CUDA does not start: ", cudaGetErrorString(status));
}

bool is_aligned(const void* address, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(address) % alignment == 0;
}

}  // namespace

CudaFacts cuda_facts() {
  CudaFacts facts;
  cudaDriverGetVersion(&facts.driver_version);
  cudaRuntimeGetVersion(&facts.runtime_version);
  const cudaError_t status = cudaGetDeviceCount(&facts.num_devices);
  if (status != cudaSuccess) {
    facts.num_devices = 0;
    cudaGetLastError();
  }
  if (facts.num_devices == 0) facts.problem = describe_missing(status, facts);
  return facts;
}

bool can_access_peer(int device, int peer) {
  int can = 0;
  cuda_check(cudaDeviceCanAccessPeer(&can, device, peer), "cudaDeviceCanAccessPeer");
  return can != 0;
}

/// Where buffers come from and go back to; lives as long as any of them.
///
/// Not the runtime's pool: other devices do not see memory of a pool, whatever cudaDeviceEnable-
/// PeerAccess was told, and NCCL reads and writes it from them where ranks share a process.
struct CudaDevice::Memory {
  int ordinal;
  DeviceAllocator allocator;
  CudaStream stream;

  void* take(std::size_t size_bytes) const {
    if (allocator.allocate) return allocator.allocate(size_bytes, {stream.get()});
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, size_bytes);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    cuda_check(status, detail::concat("cuda:", ordinal, ": cannot allocate ", size_bytes,
                                      " bytes of device memory"));
    return memory;
  }

  void give_back(void* memory) const noexcept {
    // Streams that we do not know of may still be working on it.
    int before = ordinal;
    cudaGetDevice(&before);
    cudaSetDevice(ordinal);
    cudaDeviceSynchronize();
    if (allocator.allocate) {
      try {
        if (allocator.free) allocator.free(memory);
      } catch (...) {  // NOLINT: there is nobody to tell
      }
    } else {
      cudaFree(memory);
    }
    cudaSetDevice(before);
  }

  void synchronize() const {
    cuda_check(cudaStreamSynchronize(stream.get()), detail::concat("cuda:", ordinal));
  }
};

CudaDevice::CudaDevice(int ordinal, DeviceAllocator allocator)
    : ordinal_(ordinal), name_(detail::concat("cuda:", ordinal)) {
  const CudaFacts facts = cuda_facts();
  require<Unsupported>(facts.problem.empty(), name_, ": ", facts.problem);
  require(ordinal >= 0 && ordinal < facts.num_devices, "device ", name_,
          ": this machine has cuda:0 to cuda:", facts.num_devices - 1);
  cudaDeviceProp properties{};
  cuda_check(cudaGetDeviceProperties(&properties, ordinal), name_);
  model_ = properties.name;
  uuid_.assign(properties.uuid.bytes, sizeof properties.uuid.bytes);
  compute_capability_ = 10 * properties.major + properties.minor;
  num_multiprocessors_ = properties.multiProcessorCount;
  require<Unsupported>(compute_capability_ >= kLeastCapability, name_, " ", model_, " is sm_",
                       compute_capability_, ": the kernels need sm_", kLeastCapability,
                       " or newer");
  const DeviceGuard guard(ordinal);
  memory_ = std::make_shared<Memory>(
      Memory{.ordinal = ordinal, .allocator = std::move(allocator), .stream = make_cuda_stream()});
}

std::string CudaDevice::description() const {
  return detail::concat(name_, " ", model_, ", sm_", compute_capability_, ", ",
                        num_multiprocessors_, " multiprocessors");
}

Buffer CudaDevice::allocate(std::size_t size_bytes) {
  if (size_bytes == 0) return {};
  const DeviceGuard guard(ordinal_);
  void* const memory = memory_->take(size_bytes);
  require(memory != nullptr, name_, ": cannot allocate ", size_bytes, " bytes of device memory");
  Buffer buffer(
      static_cast<std::byte*>(memory), size_bytes,
      [](void* owner, std::byte* bytes) noexcept { static_cast<Memory*>(owner)->give_back(bytes); },
      memory_);
  require(is_aligned(memory, kBufferAlignment), name_, ": the allocator gave address ", memory,
          ", expected a multiple of ", kBufferAlignment);
  cuda_check(cudaMemsetAsync(memory, 0, size_bytes, memory_->stream.get()), name_);
  memory_->synchronize();
  return buffer;
}

Buffer CudaDevice::allocate_pinned(std::size_t size_bytes) const {
  if (size_bytes == 0) return {};
  const DeviceGuard guard(ordinal_);
  void* memory = nullptr;
  const cudaError_t status = cudaHostAlloc(&memory, size_bytes, cudaHostAllocPortable);
  if (status == cudaErrorMemoryAllocation) cudaGetLastError();
  require(status != cudaErrorMemoryAllocation, name_, ": cannot allocate ", size_bytes,
          " bytes of pinned host memory");
  cuda_check(status, name_);
  std::memset(memory, 0, size_bytes);
  return Buffer(
      static_cast<std::byte*>(memory), size_bytes,
      [](void*, std::byte* bytes) noexcept { cudaFreeHost(bytes); }, nullptr);
}

void CudaDevice::upload(std::byte* to, std::span<const std::byte> from) {
  if (from.empty()) return;
  cuda_check(
      cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyHostToDevice, memory_->stream.get()),
      name_);
  memory_->synchronize();
}

void CudaDevice::download(std::span<std::byte> to, const std::byte* from) {
  if (to.empty()) return;
  cuda_check(
      cudaMemcpyAsync(to.data(), from, to.size(), cudaMemcpyDeviceToHost, memory_->stream.get()),
      name_);
  memory_->synchronize();
}

void CudaDevice::copy(std::byte* to, std::span<const std::byte> from, Stream stream) {
  if (from.empty()) return;
  cuda_check(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyDeviceToDevice,
                             static_cast<cudaStream_t>(stream.handle)),
             name_);
}

void CudaDevice::order(Stream before, Stream after) {
  const DeviceGuard guard(ordinal_);
  order_streams(static_cast<cudaStream_t>(before.handle), make_cuda_event(),
                static_cast<cudaStream_t>(after.handle));
}

int CudaDevice::enter() {
  int before = 0;
  cuda_check(cudaGetDevice(&before), "cudaGetDevice");
  if (before != ordinal_) cuda_check(cudaSetDevice(ordinal_), "cudaSetDevice");
  return before;
}

void CudaDevice::leave(int before) noexcept {
  if (before != ordinal_) cudaSetDevice(before);
}

std::string CudaDevice::problem_with(const void* data) const {
  cudaPointerAttributes attributes{};
  if (const cudaError_t status = cudaPointerGetAttributes(&attributes, data);
      status != cudaSuccess) {
    cudaGetLastError();
    return detail::concat("address ", data, ": ", cudaGetErrorString(status));
  }
  const bool is_device = attributes.type == cudaMemoryTypeDevice;
  if (!is_device && attributes.type != cudaMemoryTypeManaged)
    return detail::concat("host memory, expected memory of ", name_);
  if (is_device && attributes.device != ordinal_)
    return detail::concat("memory of cuda:", attributes.device, ", expected memory of ", name_);
  if (!is_aligned(data, kTensorAlignment))
    return detail::concat("address ", data, ", expected a multiple of ", kTensorAlignment);
  return "";
}

std::string CudaDevice::problem_with(Stream stream) const {
  auto* const handle = static_cast<cudaStream_t>(stream.handle);
  if (handle == nullptr || handle == cudaStreamLegacy) {
    return detail::concat("stream: the legacy default stream, which waits for every other; ",
                          "expected a stream of ", name_);
  }
  int device = -1;
  if (const cudaError_t status = cudaStreamGetDevice(handle, &device); status != cudaSuccess) {
    cudaGetLastError();
    return detail::concat("stream: ", cudaGetErrorString(status), "; expected a stream of ", name_);
  }
  if (device != ordinal_)
    return detail::concat("stream: of cuda:", device, ", expected a stream of ", name_);
  return "";
}

bool CudaDevice::is_capturing(Stream stream) const {
  auto* const handle = static_cast<cudaStream_t>(stream.handle);
  if (handle == nullptr || handle == cudaStreamLegacy) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(handle, &status) == cudaSuccess)
    return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // problem_with() tells what is wrong with it
  return false;
}

int CudaDevice::resident_blocks(const void* kernel, int block_threads,
                                std::size_t shared_bytes) const {
  const DeviceGuard guard(ordinal_);
  int per_multiprocessor = 0;
  cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel,
                                                           block_threads, shared_bytes),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return per_multiprocessor * num_multiprocessors_;
}

}  // namespace cpattn
