// Who sees whom, by the definition: documents, positions, mask. Written from the contract of
// kernels/mask.h and kernels/shape.h, not from the code that cuts blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/mask.h"
#include "kernels/shape.h"

namespace cpattn::reference {

enum class Side { q, kv };

/// The document a q (or kv) row belongs to, found by bisection; documents are disjoint.
class DocumentFinder {
 public:
  DocumentFinder(const SequenceBatch& batch, Side side);
  /// nullptr for a padding row.
  const Document* find(std::int64_t row) const;

 private:
  Side side_;
  std::vector<Document> documents_;
};

/// Keys that the query at `position` of its document sees: the document's first so many.
std::int64_t count_visible(const Document& document, MaskKind mask, std::int64_t position);

/// The first query (a position) that sees the key at `position` of its document; that one and all
/// later ones do. q_tokens when none does.
std::int64_t first_viewer(const Document& document, MaskKind mask, std::int64_t position);

}  // namespace cpattn::reference
