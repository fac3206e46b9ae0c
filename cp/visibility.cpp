#include "cp/visibility.h"

#include <algorithm>

namespace cpattn {

std::int64_t num_visible_kv_chunks(const Document& document, const OwnedChunk& q, MaskKind mask,
                                   const ChunkGrid& kv_grid) {
  std::int64_t keys = document.kv_tokens;
  if (mask == MaskKind::causal) {
    const std::int64_t last = q.first + q.num_tokens - 1;
    keys = std::clamp<std::int64_t>(last + 1 + document.kv_tokens - document.q_tokens, 0, keys);
  }
  return keys == 0 ? 0 : kv_grid.chunk_at(keys - 1) + 1;
}

std::int64_t first_seeing_q_chunk(const Document& document, const OwnedChunk& kv, MaskKind mask,
                                  const ChunkGrid& q_grid) {
  if (mask == MaskKind::full || document.q_tokens == 0) return 0;
  // Query i sees key j when j <= i + kv_tokens - q_tokens, so the last one sees all of them.
  const std::int64_t first = kv.first - document.kv_tokens + document.q_tokens;
  return q_grid.chunk_at(std::max<std::int64_t>(first, 0));
}

BlockMask block_mask(const Document& document, const OwnedChunk& q, const OwnedChunk& kv,
                     MaskKind mask) {
  const std::int64_t limit = q.first + 1 + document.kv_tokens - document.q_tokens - kv.first;
  if (mask == MaskKind::full || limit >= kv.num_tokens) return {};
  return {MaskKind::causal, limit};
}

}  // namespace cpattn
