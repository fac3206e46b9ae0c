// What parity compares a lane with besides the single-rank run: exact values of some rows of every
// tensor, and what a result may differ from them by.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/reference/gradient.h"
#include "launch/error_bound.h"
#include "launch/lane_result.h"
#include "launch/parity_lane.h"
#include "launch/run_config.h"

namespace cpattn {

/// Flop in double precision that are worth spending for all lanes of a run together, on out, lse
/// and dq, and again on dk and dv.
inline constexpr double kReferenceFlopBudget = 8e10;

/// Which rows of a problem the reference computes: all of them when they cost no more than
/// `flop_budget` (or when `asked` covers them), otherwise a fixed spread: half of them first and
/// last rows of chunks, half at even distances. Ascending, without repetition. Pure.
std::vector<std::int64_t> choose_reference_rows(const std::vector<OwnedChunk>& chunks,
                                                double flop_of_all, double flop_budget,
                                                std::int64_t asked);

/// Rows of q or of k and v, as far as they do not depend on how a lane was split.
struct RowMap {
  std::vector<OwnedChunk> chunks;          ///< of all documents
  std::vector<std::int64_t> rows;          ///< global rows that belong to a document, ascending
  std::vector<std::int32_t> chunk_of_row;  ///< of each global row; -1: padding
};

struct RowMaps {
  RowMap q;
  RowMap kv;
  std::vector<std::int64_t> visible_keys;  ///< of each global q row

  const RowMap& of(ResultRole role) const { return has_key_rows(role) ? kv : q; }
  double visible_pairs() const;
};

RowMaps make_row_maps(const SequenceBatch& batch, const CpConfig& config);

/// Some rows of q, or of k and v.
struct ReferenceRows {
  std::vector<std::int64_t> rows;
  std::vector<std::int32_t> chunk_of_row;  ///< of each of `rows`
};

/// Exact values; those of gradients are empty when none are compared.
struct Reference {
  ReferenceRows q;
  ReferenceRows kv;
  std::vector<double> out;           ///< [q rows, heads, value_dim]
  std::vector<double> lse;           ///< [q rows, heads]
  std::vector<double> logit_size;    ///< [q rows, heads], see kernels/reference/attention.h
  std::vector<double> part_size;     ///< likewise
  std::vector<double> term_size;     ///< likewise
  std::vector<BoundedGroup> groups;  ///< [q chunks, heads]
  reference::Gradient gradient;      ///< of the same rows

  const ReferenceRows& rows_of(ResultRole role) const { return has_key_rows(role) ? kv : q; }
};

struct ReferenceRequest {
  const RunConfig& config;
  const InputSource& source;
  LaneConfig lane;
  const RowMaps& maps;
  /// Where exact lse and delta of all rows are too dear, dk and dv of a key take them from this
  /// result: of its rows too, only the sampled ones are held against exact arithmetic, and only
  /// where the forward is compared; nothing: such dk and dv are left out.
  const LaneResult* single_rank = nullptr;
  double num_references = 1.0;  ///< that share the budget
  int threads = 1;
};

Reference make_reference(const ReferenceRequest& request);

}  // namespace cpattn
