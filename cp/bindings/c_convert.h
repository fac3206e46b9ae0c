// From what a C caller passes to what the library takes. InvalidArgument names what does not
// convert; ranges are judged by the plan.
#pragma once

#include <cstring>
#include <span>
#include <string_view>

#include "cp/bindings/c_api.h"
#include "cp/context_parallel.h"
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
ForwardTensors tensors_of(const cpattn_forward_tensors* tensors);
BackwardTensors tensors_of(const cpattn_backward_tensors* tensors);
AnyTensor tensor_of(const cpattn_tensor* tensor, std::string_view name);

/// A struct that begins with its size, as this library knows it. The caller's may be longer if what
/// we do not know of it is all zeros.
template <class Struct>
Struct read_struct(const Struct* given, std::string_view name) {
  require(given != nullptr, name, ": NULL");
  std::size_t size = 0;
  std::memcpy(&size, given, sizeof size);
  require(size >= sizeof(Struct), name, ".struct_size is ", size, ", expected at least ",
          sizeof(Struct), ": start from cpattn_", name, "_init()");
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(Struct); i < size; ++i) {
    require<Unsupported>(bytes[i] == 0, name, " has fields set, from byte ", i,
                         ", that this version of the library does not know");
  }
  Struct known;
  std::memcpy(&known, given, sizeof known);
  return known;
}

}  // namespace cpattn::c
