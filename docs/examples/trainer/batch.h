// Training batches: paragraphs of a text, packed one after the other into a fixed number of tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trainer {

/// One packed sequence. A token is a byte. Document d is [cu_seqlens[d], cu_seqlens[d + 1]).
struct Batch {
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> cu_seqlens;
};

/// The paragraphs of a text file (separated by empty lines). Throws std::runtime_error when it
/// cannot be read or has none.
std::vector<std::string> read_paragraphs(const std::string& path);

/// The batch of a step: `num_tokens` bytes of the paragraphs that follow those of the step before,
/// the last one cut off. The same on every rank.
Batch make_batch(const std::vector<std::string>& paragraphs, std::int64_t num_tokens, int step);

}  // namespace trainer
