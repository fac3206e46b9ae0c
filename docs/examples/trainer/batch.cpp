#include "batch.h"

#include <algorithm>
#include <fstream>
#include <stdexcept>

namespace trainer {

std::vector<std::string> read_paragraphs(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::vector<std::string> paragraphs;
  std::string line, paragraph;
  const auto finish = [&] {
    if (paragraph.size() > 1) paragraphs.push_back(paragraph);
    paragraph.clear();
  };
  while (std::getline(file, line)) {
    if (line.empty()) {
      finish();
    } else {
      paragraph += line + '\n';
    }
  }
  finish();
  if (paragraphs.empty()) throw std::runtime_error(path + " has no paragraph");
  return paragraphs;
}

Batch make_batch(const std::vector<std::string>& paragraphs, std::int64_t num_tokens, int step) {
  Batch batch;
  batch.cu_seqlens.push_back(0);
  constexpr std::size_t kStride = 5;  // paragraphs from the first one of a step to that of the next
  for (std::size_t i = static_cast<std::size_t>(step) * kStride;; ++i) {
    const std::string& paragraph = paragraphs[i % paragraphs.size()];
    const auto left = num_tokens - static_cast<std::int64_t>(batch.tokens.size());
    const auto length = std::min(left, static_cast<std::int64_t>(paragraph.size()));
    for (std::int64_t t = 0; t < length; ++t) {
      batch.tokens.push_back(static_cast<unsigned char>(paragraph[static_cast<std::size_t>(t)]));
    }
    batch.cu_seqlens.push_back(static_cast<std::int64_t>(batch.tokens.size()));
    if (length == left) return batch;
  }
}

}  // namespace trainer
