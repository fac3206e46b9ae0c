#include "kernels/reference/visibility.h"

#include <algorithm>

namespace cpattn::reference {
namespace {

std::int64_t begin_of(const Document& document, Side side) {
  return side == Side::q ? document.q_begin : document.kv_begin;
}

std::int64_t tokens_of(const Document& document, Side side) {
  return side == Side::q ? document.q_tokens : document.kv_tokens;
}

}  // namespace

DocumentFinder::DocumentFinder(const SequenceBatch& batch, Side side) : side_(side) {
  for (const Document& document : batch.documents) {
    if (tokens_of(document, side) > 0) documents_.push_back(document);
  }
  std::sort(documents_.begin(), documents_.end(), [&](const Document& a, const Document& b) {
    return begin_of(a, side) < begin_of(b, side);
  });
}

const Document* DocumentFinder::find(std::int64_t row) const {
  auto after = std::upper_bound(documents_.begin(), documents_.end(), row,
                                [&](std::int64_t value, const Document& document) {
                                  return value < begin_of(document, side_);
                                });
  if (after == documents_.begin()) return nullptr;
  const Document& document = *--after;
  return row < begin_of(document, side_) + tokens_of(document, side_) ? &document : nullptr;
}

std::int64_t count_visible(const Document& document, MaskKind mask, std::int64_t position) {
  switch (mask) {
    case MaskKind::full:
      return document.kv_tokens;
    case MaskKind::causal:  // j <= position + (kv_tokens - q_tokens)
      return std::max<std::int64_t>(0, position + 1 + document.kv_tokens - document.q_tokens);
  }
  return 0;
}

std::int64_t first_viewer(const Document& document, MaskKind mask, std::int64_t position) {
  switch (mask) {
    case MaskKind::full:
      return 0;
    case MaskKind::causal:  // i >= position - (kv_tokens - q_tokens)
      return std::clamp<std::int64_t>(position - document.kv_tokens + document.q_tokens, 0,
                                      document.q_tokens);
  }
  return document.q_tokens;
}

}  // namespace cpattn::reference
