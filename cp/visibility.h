// Which chunks of a document see which: the mask, on whole chunks. What a q chunk sees is a prefix
// of the kv chunks, so the q chunks that see a kv chunk are those from some first one on.
#pragma once

#include <cstdint>

#include "cp/sharding.h"
#include "kernels/mask.h"
#include "kernels/shape.h"

namespace cpattn {

/// Number of kv chunks of which some row of `q` sees a key.
std::int64_t num_visible_kv_chunks(const Document& document, const OwnedChunk& q, MaskKind mask,
                                   const ChunkGrid& kv_grid);

/// The first q chunk of which some row sees a key of `kv`; q_grid.num_chunks() when there is none.
std::int64_t first_seeing_q_chunk(const Document& document, const OwnedChunk& kv, MaskKind mask,
                                  const ChunkGrid& q_grid);

/// What `q` sees of `kv`. A block that every row sees whole is `full`: same bits, less work.
BlockMask block_mask(const Document& document, const OwnedChunk& q, const OwnedChunk& kv,
                     MaskKind mask);

}  // namespace cpattn
