// Every kernel table under test with every dtype.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <string>

#include "tests/support/tested_tables.h"

namespace cpattn::testing {

inline constexpr std::array kDTypes{DType::f32, DType::f16, DType::bf16};

/// Calls visit(table, dtype), with a trace.
template <class Visitor>
void for_each_table(Visitor&& visit) {
  for (const KernelTable* table : tested().tables)
    for (const DType dtype : tested().dtypes) {
      SCOPED_TRACE(std::string(table->name) + " " + std::string(name_of(dtype)));
      visit(*table, dtype);
    }
}

}  // namespace cpattn::testing
