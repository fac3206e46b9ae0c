// Rows copied by ranges on the CPU.
#pragma once

#include "kernels/rows.h"

namespace cpattn::cpu {

/// KernelTable::copy_rows.
void copy_rows(const RowCopy& copy);

}  // namespace cpattn::cpu
