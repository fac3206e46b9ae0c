// The memory layout of a DLPack capsule ("dltensor"), as its specification fixes it: how Python
// libraries hand each other tensors without a copy and without knowing each other.
#pragma once

#include <cstdint>

namespace cpattn::python {

struct DlDevice {
  std::int32_t type;  ///< 1 CPU, 2 CUDA, 3 CUDA pinned host memory, ...
  std::int32_t index;
};

struct DlType {
  std::uint8_t code;  ///< 0 int, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t num_dimensions;
  DlType type;
  std::int64_t* shape;
  std::int64_t* strides;  ///< in elements; null: row-major without gaps
  std::uint64_t byte_offset;
};

/// What the capsule points at. The capsule's own destructor frees it unless it was renamed.
struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};

}  // namespace cpattn::python
