// From what a C caller passes to what the library takes. InvalidArgument names what does not
// convert; ranges are judged by the plan.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>

#include "cp/bindings/c_api.h"
#include "cp/context_parallel.h"
#include "cp/gpu_group.h"
#include "src/base/error.h"

namespace cpattn::c {

struct Settings {
  CpConfig config;
  const KernelTable* kernels = nullptr;  ///< nullptr: the best of this machine
};

/// Lists every unknown or repeated key and every value that does not parse. Unsupported for an isa
/// this machine lacks.
Settings settings_of(std::span<const cpattn_setting> settings);

Problem problem_of(const cpattn_problem* problem);
GpuOptions gpu_options_of(const cpattn_cuda_options* options);
ForwardTensors tensors_of(const cpattn_forward_tensors* tensors);
BackwardTensors tensors_of(const cpattn_backward_tensors* tensors);
AnyTensor tensor_of(const cpattn_tensor* tensor, std::string_view name);

/// Of a struct that begins with its size: how much of it the library's first version had, which
/// stays when fields are added behind; and what the fields are that a caller's version lacks.
template <class Struct>
struct StructVersions;
template <>
struct StructVersions<cpattn_group_options> {
  static constexpr std::size_t kFirstSize =
      offsetof(cpattn_group_options, max_message_bytes) + sizeof(std::int64_t);
  static cpattn_group_options defaults() { return cpattn_group_options_init(); }
};
template <>
struct StructVersions<cpattn_cuda_options> {
  static constexpr std::size_t kFirstSize =
      offsetof(cpattn_cuda_options, timeout_seconds) + sizeof(double);
  static cpattn_cuda_options defaults() { return cpattn_cuda_options_init(); }
};
template <>
struct StructVersions<cpattn_problem> {
  static constexpr std::size_t kFirstSize =
      offsetof(cpattn_problem, cu_seqlens_kv) + sizeof(const std::int64_t*);
  static cpattn_problem defaults() { return cpattn_problem_init(); }
};
template <>
struct StructVersions<cpattn_forward_tensors> {
  static constexpr std::size_t kFirstSize =
      offsetof(cpattn_forward_tensors, lse) + sizeof(cpattn_matrix);
  static cpattn_forward_tensors defaults() { return cpattn_forward_tensors_init(); }
};
template <>
struct StructVersions<cpattn_backward_tensors> {
  static constexpr std::size_t kFirstSize =
      offsetof(cpattn_backward_tensors, dv) + sizeof(cpattn_tensor);
  static cpattn_backward_tensors defaults() { return cpattn_backward_tensors_init(); }
};

/// A struct that begins with its size, as this library knows it. An older caller's is shorter: what
/// it lacks has its default. A newer caller's is longer: what we do not know of it is all zeros.
template <class Struct>
Struct read_struct(const Struct* given, std::string_view name) {
  require(given != nullptr, name, ": NULL");
  std::size_t size = 0;
  std::memcpy(&size, given, sizeof size);
  require(size >= StructVersions<Struct>::kFirstSize, name, ".struct_size is ", size,
          ", expected at least ", StructVersions<Struct>::kFirstSize, ": start from cpattn_", name,
          "_init()");
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(Struct); i < size; ++i) {
    require<Unsupported>(bytes[i] == 0, name, " has fields set, from byte ", i,
                         ", that this version of the library does not know");
  }
  Struct known = StructVersions<Struct>::defaults();
  std::memcpy(&known, bytes, std::min(size, sizeof known));
  return known;
}

/// The stream of a call whose tensors may be unreadable; none where it cannot be told.
template <class Tensors>
Stream stream_of(const Tensors* given) noexcept {
  if (given == nullptr) return {};
  std::size_t size = 0;
  std::memcpy(&size, given, sizeof size);
  return {size >= offsetof(Tensors, stream) + sizeof given->stream ? given->stream : nullptr};
}

/// The range of the "timeout" setting.
inline constexpr double kLongestTimeout = 86400.0;
inline bool is_timeout(double seconds) { return seconds >= 0.001 && seconds <= kLongestTimeout; }

}  // namespace cpattn::c
