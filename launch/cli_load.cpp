#include "launch/cli_load.h"

#include <algorithm>
#include <array>
#include <initializer_list>

#include "kernels/shape.h"
#include "launch/cli_values.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// Problems so far; all are reported together.
class Problems {
 public:
  /// Runs a check and keeps what it throws under `label`.
  template <class Check>
  void collect(const std::string& label, Check&& check) {
    try {
      check();
    } catch (const InvalidArgument& error) {
      add(label.empty() ? error.what() : label + ": " + error.what());
    }
  }
  void add(const std::string& problem) {
    if (!text_.empty()) text_ += '\n';
    text_ += problem;
  }
  bool is_empty() const { return text_.empty(); }
  void raise() const { require(text_.empty(), text_); }

 private:
  std::string text_;
};

void apply(const Setting& setting, RunConfig& config, Problems& problems) {
  bool is_known = false;
  for_each_run_field(config, [&](const RunField& field, auto& value) {
    using Value = std::remove_cvref_t<decltype(value)>;
    if (field.name != setting.key) return;
    is_known = true;
    problems.collect(setting.label, [&] {
      require(kIsList<Value> || !setting.is_list, "expected ", expected_value(field, value),
              ", got a list");
      parse_value(field, setting.items, value);
    });
  });
  if (!is_known) {
    problems.add(setting.label + ": unknown key" + suggestion(setting.key, knob_names()));
  }
}

/// Where the first of the keys that was given was given; empty when none was.
std::string place_of(const GivenKnobs& given, std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys) {
    if (const auto entry = given.find(key); entry != given.end()) return entry->second;
  }
  return "";
}

/// Plans hold every chunk of every rank in memory; more than this is a slip of the hand.
constexpr std::int64_t kMaxChunks = std::int64_t{1} << 24;

void check_chunks(const RunConfig& config, const SequenceBatch& batch) {
  const std::int64_t chunk_tokens = config.cp_config.chunk_tokens;
  const std::int64_t chunks = std::max(batch.q_rows, batch.kv_rows) / chunk_tokens;
  require(chunks <= kMaxChunks, "chunk_tokens ", chunk_tokens, ": cuts the tokens into ", chunks,
          " chunks, expected at most ", kMaxChunks);
}

}  // namespace

std::vector<std::string> knob_names() {
  const RunConfig defaults;
  std::vector<std::string> names;
  for_each_run_field(defaults,
                     [&](const RunField& field, const auto&) { names.emplace_back(field.name); });
  return names;
}

std::string flag_of(std::string_view key) {
  std::string flag = "--" + std::string(key);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

RunConfig load_config(std::span<const Setting> file, std::span<const Setting> flags,
                      GivenKnobs& given) {
  RunConfig config;
  Problems problems;
  for (const auto& settings : std::array{file, flags}) {
    for (const Setting& setting : settings) {
      apply(setting, config, problems);
      given[setting.key] = setting.label;
    }
  }
  problems.raise();  // what follows would only repeat what a refused value caused

  for (const auto& [key, label] : given) {
    const std::string_view reason = why_without_effect(config, key);
    if (!reason.empty()) problems.add(label + ": has no effect: " + std::string(reason));
  }
  if (config.tensors.empty()) {
    problems.collect(place_of(given, {"kv_heads", "heads"}),
                     [&] { validate(synthetic_shape(config)); });
    SequenceBatch batch;
    problems.collect(place_of(given, {"cu_seqlens_kv", "cu_seqlens"}),
                     [&] { batch = synthetic_batch(config); });
    problems.collect("", [&] { check_chunks(config, batch); });
  }
  problems.raise();
  return config;
}

std::string agreement_lines(const RunConfig& config) {
  std::string lines;
  for_each_run_field(config, [&](const RunField& field, const auto& value) {
    if (field.scope == Scope::local) return;
    lines += std::string(field.name) + "=" + format_value(value, ",") + "\n";
  });
  return lines;
}

}  // namespace cpattn
