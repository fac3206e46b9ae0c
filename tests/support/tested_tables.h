// What a program's kernel tests run on: the CPU's kernels, unless the program says otherwise before
// its tests begin.
#pragma once

#include <vector>

#include "kernels/kernel_table.h"

namespace cpattn::testing {

struct TestedTables {
  std::vector<const KernelTable*> tables;
  std::vector<DType> dtypes;
  Stream stream;  ///< for every call
};

inline TestedTables& tested() {
  static TestedTables all{available_kernels(), {DType::f32, DType::f16, DType::bf16}, {}};
  return all;
}

}  // namespace cpattn::testing
