// What bench prints and writes: tables for people, JSON records for programs.
#pragma once

#include <string>
#include <vector>

#include "launch/bench_gpu.h"
#include "launch/bench_kernels.h"
#include "launch/bench_ring.h"

namespace cpattn {

/// The circumstances of a run, without which its numbers say nothing.
struct BenchRun {
  std::string suite;
  std::string command;
  std::string date;  ///< UTC
  std::string cpu;
  int cores = 0;
  double load_before = 0.0;  ///< one-minute load average
  double load_after = 0.0;
  std::string gpu;   ///< what the gpu suite ran on
  std::string peer;  ///< what the peer says it is, or why there is none; kernels suite only
};

/// Looks at the machine and the clock; load_after is filled at the end.
BenchRun describe_run(std::string suite, std::string command);
double load_average();

/// Lines about the run, above a table.
std::string run_text(const BenchRun& run);

std::string kernel_header();
std::string kernel_row(const KernelRecord& record);
std::string gpu_header();
std::string gpu_row(const GpuRecord& record);
std::string copy_header();
std::string copy_row(const GpuCopyRecord& record);
std::string ring_table(const std::vector<RingRecord>& records);

/// {suite, command, ..., records: [...]}. Every record has name, dtype, head_dim, seq_len, mask,
/// threads, gflops, peak_gflops, fraction_of_peak and ratio_to_peer; what was not measured is null.
std::string bench_json(const BenchRun& run, const std::vector<KernelRecord>& records);
std::string bench_json(const BenchRun& run, const std::vector<RingRecord>& records);
/// Besides records, `copies`.
std::string bench_json(const BenchRun& run, const std::vector<GpuRecord>& records,
                       const std::vector<GpuCopyRecord>& copies);

}  // namespace cpattn
