#include "cp/plan.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "cp/step_binding.h"
#include "cp/step_images.h"
#include "src/base/digest.h"
#include "src/base/error.h"
#include "src/base/integers.h"
#include "src/comm/ring_exchange.h"

namespace cpattn {
namespace {

/// Runs a check and keeps its complaint, so that all of them can be reported at once.
template <class Check>
void collect(std::vector<std::string>& problems, Check&& check) {
  try {
    check();
  } catch (const InvalidArgument& error) {
    problems.emplace_back(error.what());
  }
}

struct RangeCheck {
  std::vector<std::string>& problems;

  template <class Number>
  requires std::is_arithmetic_v<Number>
  void operator()(const FieldInfo& field, const Number& value) const {
    if constexpr (!std::is_same_v<Number, bool>) {
      const auto number = static_cast<double>(value);
      if (number >= field.min && number <= field.max) return;  // NaN fails both
      problems.push_back(detail::concat(field.name, " ", value, ": expected a number in [",
                                        field.min, ", ", field.max, "]"));
    }
  }
  template <class Mode>
  requires NamedEnum<Mode>
  void operator()(const FieldInfo& field, const Mode& value) const {
    if (!from_name<Mode>(name_of(value))) {
      problems.push_back(detail::concat(field.name, ": expected ", choices<Mode>()));
    }
  }
};

std::uint64_t digest_of(const std::vector<Document>& documents) {
  Digest digest;
  for (const Document& document : documents) {
    digest.add(document.q_begin);
    digest.add(document.q_tokens);
    digest.add(document.kv_begin);
    digest.add(document.kv_tokens);
  }
  return digest.value();
}

/// Refuses what counts of 64 bits, or the lists of a plan, cannot hold. In double, where a product
/// of two lengths does not overflow.
void check_sizes(const Problem& problem, const CpConfig& config, int world_size) {
  constexpr double kMaxPairs = 0x1p62;     // visible_pairs, exact
  constexpr double kMaxElements = 0x1p48;  // leaves 2^16 for bytes of each, all partial states
  constexpr double kMaxListed = 0x1p27;    // entries of a rank's plan, some 100 bytes each
  double pairs = 0.0, chunks = 0.0, chunk_pairs = 0.0;
  for (const Document& document : problem.batch.documents) {
    const auto chunks_of = [&](std::int64_t tokens) {
      return static_cast<double>(chunk_grid(tokens, config, world_size).num_chunks());
    };
    const double q_chunks = chunks_of(document.q_tokens), kv_chunks = chunks_of(document.kv_tokens);
    pairs += static_cast<double>(document.q_tokens) * static_cast<double>(document.kv_tokens);
    chunks += q_chunks + kv_chunks;
    chunk_pairs += q_chunks * kv_chunks;
  }
  const auto elements = [&](std::int64_t rows, std::int64_t heads) {
    return static_cast<double>(std::max<std::int64_t>(rows, 1)) * static_cast<double>(heads) *
           static_cast<double>(problem.shape.head_dim + problem.shape.value_dim);
  };
  const double listed = chunks + chunk_pairs / world_size;
  std::string text;
  const auto at_most = [&text](double count, double limit, const auto&... what) {
    if (count <= limit) return;
    text += detail::concat(text.empty() ? "" : "; ", what..., " make ", count,
                           ", expected at most ", limit);
  };
  at_most(pairs, kMaxPairs, "documents: their (query, key) pairs");
  at_most(listed, kMaxListed, "chunk_tokens ", config.chunk_tokens,
          ": chunks, and pairs of chunks per rank,");
  at_most(elements(problem.batch.q_rows, problem.shape.num_heads), kMaxElements, "q_rows ",
          problem.batch.q_rows, ", num_heads ", problem.shape.num_heads, ": elements of q and out");
  at_most(elements(problem.batch.kv_rows, problem.shape.num_kv_heads), kMaxElements, "kv_rows ",
          problem.batch.kv_rows, ", num_kv_heads ", problem.shape.num_kv_heads,
          ": elements of k and v");
  require(text.empty(), text);
}

/// A line for each of the first documents, so that a difference is told as the rows it is about;
/// the rest is compared by its digest, because ranks exchange these lines.
void add_documents(std::ostream& text, const std::vector<Document>& documents) {
  constexpr std::size_t kMaxDocumentLines = 64;
  for (std::size_t d = 0; d < std::min(documents.size(), kMaxDocumentLines); ++d) {
    const Document& document = documents[d];
    text << "document " << d << "=q rows [" << document.q_begin << ", "
         << document.q_begin + document.q_tokens << ") kv rows [" << document.kv_begin << ", "
         << document.kv_begin + document.kv_tokens << ")\n";
  }
  if (documents.size() > kMaxDocumentLines)
    text << "documents_digest=" << std::hex << digest_of(documents) << std::dec << '\n';
}

void check(const Problem& problem, const CpConfig& config, int rank, int world_size) {
  std::string text;
  for (const std::string& item : problems_with(problem, config, rank, world_size))
    text += (text.empty() ? "" : "; ") + item;
  require(text.empty(), text);
}

/// Query rows of it, at least 1: no chunk needs more.
std::int64_t longest_document(const SequenceBatch& batch) {
  std::int64_t longest = 1;
  for (const Document& document : batch.documents) longest = std::max(longest, document.q_tokens);
  return longest;
}

}  // namespace

std::vector<std::string> problems_with(const Problem& problem, const CpConfig& config, int rank,
                                       int world_size) {
  std::vector<std::string> problems;
  collect(problems, [&] { validate(problem.shape); });
  collect(problems, [&] { validate(problem.batch); });
  for_each_cp_field(config, RangeCheck{problems});
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    problems.push_back(detail::concat("rank ", rank, " of world_size ", world_size,
                                      ": expected 0 <= rank < world_size"));
  }
  if (problems.empty()) {
    collect(problems, [&] { check_divisible(problem.batch, config, world_size); });
  }
  if (problems.empty()) {
    collect(problems, [&] { check_sizes(problem, config, world_size); });
  }
  return problems;
}

Plan::Plan(const Problem& problem, const CpConfig& config, const KernelTable& kernels, int rank,
           int world_size)
    : problem_(problem), config_(config), kernels_(&kernels), rank_(rank), world_size_(world_size) {
  check(problem, config, rank, world_size);
  num_threads_ = kernels.num_workers > 0
                     ? kernels.num_workers
                     : static_cast<int>(std::max<std::int64_t>(config.threads, 1));
  sharding_ = make_sharding(problem_.batch, config_, world_size_);
  reach_ = make_reach(problem_.batch, sharding_, config_, ring_direction(config_));
  schedule_ = make_schedule(problem_.batch, sharding_, config_, rank_, num_ring_steps(reach_));
  kernel_problem_ = {problem_.shape, problem_.dtype,
                     std::min(config_.chunk_tokens, longest_document(problem_.batch)),
                     num_threads_};
  ring_ = RingLayout(sharding_, reach_, rank_, schedule_.direction, [&](std::int64_t num_keys) {
    return kernels.packed_kv_bytes(kernel_problem_, num_keys);
  });
  for (const Shard& shard : sharding_.shards) {
    limits_.keys = std::max(limits_.keys, shard.kv_rows);
    limits_.blocks = std::max(limits_.blocks, static_cast<std::int64_t>(shard.kv.size()));
  }
  limits_.scratch_slots = schedule_.num_scratch_slots;
  Digest digest;
  digest.add(agreement_lines());
  digest_ = digest.value();
}

MemoryPlan Plan::memory() const {
  const AttentionShape& shape = problem_.shape;
  const auto bytes = [](std::int64_t rows, std::int64_t per_row, std::size_t size) {
    return static_cast<std::size_t>(rows * per_row) * size;
  };
  const KernelProblem& facts = kernel_problem_;
  MemoryPlan memory;
  memory.inputs = bytes(shard().q_rows, shape.num_heads * shape.head_dim, size_of(problem_.dtype)) +
                  bytes(shard().kv_rows, shape.num_kv_heads * (shape.head_dim + shape.value_dim),
                        size_of(problem_.dtype));
  memory.outputs =
      bytes(shard().q_rows, shape.num_heads * shape.value_dim, size_of(problem_.out_dtype)) +
      bytes(shard().q_rows, shape.num_heads, sizeof(float));
  memory.ring_slots = RingExchange::workspace_bytes(ring_.bytes());
  memory.carried =
      static_cast<std::size_t>(schedule_.num_carried_slots) * kernels_->carried_slot_bytes(facts);
  memory.workspace = kernels_->workspace_bytes(facts, limits_);
  const std::byte anywhere{};  // sizes do not depend on addresses
  memory.images = StepImages::size_bytes(
      StepBinding(*this).make_images([&](std::size_t) { return &anywhere; }));
  if (kernels_->device != DeviceKind::cpu) memory.maxima = bytes(1, shape.num_heads, sizeof(float));
  return memory;
}

std::string Plan::guarantee() const {
  if (config_.schedule == ScheduleKind::arrival) {
    return "none across CP sizes: arrival folds partials in the order the ring brings them";
  }
  for (std::size_t d = 0; d < problem_.batch.documents.size(); ++d) {
    const Document& document = problem_.batch.documents[d];
    for (const std::int64_t tokens : {document.q_tokens, document.kv_tokens}) {
      const ChunkGrid grid = chunk_grid(tokens, config_, world_size_);
      if (!grid.is_fragmented()) continue;
      return detail::concat("bitwise for CP size ", world_size_,
                            " only: shard borders do not meet chunk borders (document ", d,
                            ": parts of ", grid.part_tokens, " tokens, chunk_tokens ",
                            grid.chunk_tokens, ")");
    }
  }
  return std::string(kBitwise);
}

std::string Plan::agreement_lines() const {
  std::ostringstream text;
  for_each_cp_field(config_, [&](const FieldInfo& field, const auto& value) {
    if (field.scope == Scope::local) return;
    text << field.name << '=';
    if constexpr (NamedEnum<std::remove_cvref_t<decltype(value)>>) {
      text << name_of(value);
    } else {
      text << value;
    }
    text << '\n';
  });
  const AttentionShape& shape = problem_.shape;
  text << "world_size=" << world_size_ << "\nnum_heads=" << shape.num_heads
       << "\nnum_kv_heads=" << shape.num_kv_heads << "\nhead_dim=" << shape.head_dim
       << "\nvalue_dim=" << shape.value_dim << "\nsoftmax_scale=" << std::hexfloat
       << shape.softmax_scale << std::defaultfloat << "\ndtype=" << name_of(problem_.dtype)
       << "\nout_dtype=" << name_of(problem_.out_dtype)
       << "\ndocuments=" << problem_.batch.documents.size() << "\nq_rows=" << problem_.batch.q_rows
       << "\nkv_rows=" << problem_.batch.kv_rows << '\n';
  add_documents(text, problem_.batch.documents);
  text << "sharding_digest=" << std::hex << digest_of(sharding_)
       << std::dec
       // Equal numerics give equal bits, but a device's packed keys and slots have its own form.
       << "\ndevice=" << name_of(kernels_->device)
       << "\nnumerics=" << kernels_->numerics(problem_.dtype) << '\n';
  return text.str();
}

}  // namespace cpattn
