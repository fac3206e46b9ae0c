// CpConfig: every knob of the distributed attention, declared once. Flag, YAML key, help text,
// documentation and the digest that ranks compare are all made from for_each_field().
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/mask.h"
#include "src/base/enum_names.h"

namespace cpattn {

/// contiguous: rank r owns the r-th run of a document's chunks. zigzag: 2P runs, rank r owns runs r
/// and 2P-1-r, so that a causal mask gives every rank the same work. dual_chunk: the same with 2P
/// parts of equal length in tokens, which is what trainers with Transformer Engine or Megatron
/// hold.
enum class ShardingKind { contiguous, zigzag, dual_chunk };

/// canonical: partials are merged along a fixed binary tree over chunks; bits do not depend on the
/// split. arrival: partials are folded into one running state as they come; least memory, bits
/// depend on the split.
enum class ScheduleKind { canonical, arrival };

template <>
struct EnumNames<ShardingKind> {
  static constexpr std::array kValues{
      NamedValue<ShardingKind>{ShardingKind::contiguous, "contiguous"},
      NamedValue<ShardingKind>{ShardingKind::zigzag, "zigzag"},
      NamedValue<ShardingKind>{ShardingKind::dual_chunk, "dual_chunk"}};
};
template <>
struct EnumNames<ScheduleKind> {
  static constexpr std::array kValues{
      NamedValue<ScheduleKind>{ScheduleKind::canonical, "canonical"},
      NamedValue<ScheduleKind>{ScheduleKind::arrival, "arrival"}};
};

struct CpConfig {
  MaskKind mask = MaskKind::causal;
  ShardingKind sharding = ShardingKind::zigzag;
  ScheduleKind schedule = ScheduleKind::canonical;
  std::int64_t chunk_tokens = 512;
  std::int64_t threads = 0;  ///< 0: cores / ranks of this host, at least 1
  double timeout_seconds = 60.0;
  std::int64_t max_message_bytes = std::int64_t{1} << 30;
  bool verify_checksum = false;
  std::int64_t shuffle_arrival = 0;
};

/// Whether a knob must be equal on all ranks.
enum class Scope { agreed, local };

/// Range of a number; ignored for enums and booleans.
struct FieldInfo {
  std::string_view name;  ///< YAML key; the flag is the same with '-' for '_'
  std::string_view help;
  double min = 0.0;
  double max = 0.0;
  Scope scope = Scope::agreed;
};

/// Calls visit(const FieldInfo&, field&) for every knob, in documentation order. Config is CpConfig
/// or const CpConfig.
template <class Config, class Visitor>
void for_each_cp_field(Config& config, Visitor&& visit) {
  visit(FieldInfo{"mask",
                  "which keys a query sees; causal is bottom-right aligned when lengths differ"},
        config.mask);
  visit(FieldInfo{"sharding", "which rank owns which chunks of a document"}, config.sharding);
  visit(FieldInfo{"schedule",
                  "order of merges: canonical gives the same bits for every split, arrival takes "
                  "least memory"},
        config.schedule);
  visit(FieldInfo{"chunk_tokens",
                  "tokens per chunk, the unit of ownership and of merge order; two runs are "
                  "comparable bit for bit "
                  "only if it is equal",
                  1, 1 << 24},
        config.chunk_tokens);
  visit(FieldInfo{"threads", "threads per rank; 0 divides the cores among the ranks of the host", 0,
                  4096, Scope::local},
        config.threads);
  visit(FieldInfo{"timeout", "seconds any wait for a peer may last before the job ends", 0.001,
                  86400.0},
        config.timeout_seconds);
  visit(FieldInfo{"max_message_bytes", "longest single message; longer spans are cut", 64,
                  2147483647.0},
        config.max_message_bytes);
  visit(FieldInfo{"verify_checksum", "checksum every span that arrives"}, config.verify_checksum);
  visit(FieldInfo{"shuffle_arrival",
                  "seed that shuffles the order in which arrived chunks are worked on, the ring's "
                  "direction and the "
                  "moment of arrival; 0 leaves them alone",
                  0, 9007199254740992.0},
        config.shuffle_arrival);
}

}  // namespace cpattn
