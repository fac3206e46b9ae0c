#include "launch/peer_openblas.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <numbers>

#include "launch/bench_timing.h"
#include "src/base/error.h"
#include "src/base/integers.h"

namespace cpattn {
namespace {

constexpr std::int64_t kQueryRows = 256;
constexpr std::int64_t kLanes = 16;  ///< rows of scores begin at whole vectors

// cblas.h belongs to a package that nothing else needs; these are its enumerators.
constexpr int kRowMajor = 101;
constexpr int kNoTranspose = 111;
constexpr int kTranspose = 112;

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

}  // namespace

std::unique_ptr<OpenBlasPeer> OpenBlasPeer::load() {
  ::unsetenv("OPENBLAS_CORETYPE");
  ::unsetenv("OPENBLAS_L2_SIZE");
  // Never closed: OpenBLAS keeps threads that would go on running in unmapped code.
  void* library = ::dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  Sgemm sgemm = nullptr;
  void (*set_num_threads)(int) = nullptr;
  char* (*get_config)() = nullptr;
  if (!find(library, "cblas_sgemm", sgemm) ||
      !find(library, "openblas_set_num_threads", set_num_threads) ||
      !find(library, "openblas_get_config", get_config)) {
    return nullptr;
  }
  set_num_threads(1);
  return std::make_unique<OpenBlasPeer>(sgemm, get_config());
}

std::string OpenBlasPeer::remedy() {
  return "no peer: libopenblas.so.0 is not there; apt-get install libopenblas0-pthread provides it";
}

void OpenBlasPeer::attend(const PeerProblem& problem, float* out) {
  const std::int64_t stride = round_up(problem.k.shape[0], kLanes);
  scores_.resize(std::max<std::size_t>(scores_.size(), static_cast<std::size_t>(problem.threads)));
  std::atomic<std::int64_t> next_head{0};
  run_threads(problem.threads, [&](int thread) {
    std::vector<float>& scores = scores_[static_cast<std::size_t>(thread)];
    const auto needed = static_cast<std::size_t>(kQueryRows * stride);
    if (scores.size() < needed) scores.resize(needed);
    for (std::int64_t head = next_head++; head < problem.q.shape[1]; head = next_head++) {
      attend_head(problem, head, scores.data(), out);
    }
  });
}

void OpenBlasPeer::attend_head(const PeerProblem& problem, std::int64_t head, float* scores,
                               float* out) const {
  const auto tokens = problem.q.shape[0], heads = problem.q.shape[1], dim = problem.q.shape[2];
  const auto keys = problem.k.shape[0], kv_heads = problem.k.shape[1];
  const std::int64_t kv_head = head / (heads / kv_heads);
  const auto* k = reinterpret_cast<const float*>(problem.k.row(0, kv_head));
  const auto* v = reinterpret_cast<const float*>(problem.v.row(0, kv_head));
  const int q_step = narrow<int>(heads * dim), kv_step = narrow<int>(kv_heads * dim);
  const int stride = narrow<int>(round_up(keys, kLanes)), width = narrow<int>(dim);
  const bool is_causal = problem.mask == MaskKind::causal;
  // Logits in base 2, so that the softmax needs no further product.
  const auto scale = static_cast<float>(std::numbers::log2e / std::sqrt(static_cast<double>(dim)));

  float inverse_sum[kQueryRows];
  for (std::int64_t first = 0; first < tokens; first += kQueryRows) {
    const std::int64_t rows = std::min(kQueryRows, tokens - first);
    const std::int64_t seen = is_causal ? std::min(keys, first + rows) : keys;
    const int m = narrow<int>(rows), n = narrow<int>(seen);
    const auto* q = reinterpret_cast<const float*>(problem.q.row(first, head));
    sgemm_(kRowMajor, kNoTranspose, kTranspose, m, n, width, scale, q, q_step, k, kv_step, 0.0f,
           scores, stride);
    detail::softmax_rows({.scores = scores,
                          .stride = stride,
                          .num_rows = rows,
                          .num_keys = seen,
                          .visible_begin = is_causal ? first + 1 : -1,
                          .inverse_sum = inverse_sum});
    float* out_rows = out + first * q_step + head * dim;
    sgemm_(kRowMajor, kNoTranspose, kNoTranspose, m, width, n, 1.0f, scores, stride, v, kv_step,
           0.0f, out_rows, q_step);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t d = 0; d < dim; ++d) out_rows[row * q_step + d] *= inverse_sum[row];
    }
  }
}

}  // namespace cpattn
