#include "launch/bench.h"

#include <iostream>

#include "launch/bench_gpu.h"
#include "launch/bench_kernels.h"
#include "launch/bench_report.h"
#include "launch/bench_ring.h"
#include "launch/output_file.h"
#include "launch/peer_openblas.h"
#include "launch/world.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// The invocation, as it can be typed again.
std::string command_of(const CommandLine& line) {
  std::string command = "cpattn " + line.subcommand;
  for (const std::string& argument : line.arguments) command += " " + argument;
  return command;
}

template <class Record>
void write_json(const CommandLine& line, const BenchRun& run, const std::vector<Record>& records) {
  if (line.has("json")) write_atomically(line.value("json"), bench_json(run, records));
}

int bench_kernels(const RunConfig& config, const CommandLine& line) {
  const auto peer = OpenBlasPeer::load();
  BenchRun run = describe_run("kernels", command_of(line));
  run.peer = peer ? peer->description() : OpenBlasPeer::remedy();
  std::cout << run_text(run) << kernel_header() << std::flush;
  std::vector<KernelRecord> records;
  run_kernel_suite({config, peer.get(), [&](const KernelRecord& record) {
                      std::cout << kernel_row(record) << std::flush;
                      records.push_back(record);
                    }});
  run.load_after = load_average();
  write_json(line, run, records);
  return static_cast<int>(ExitCode::pass);
}

void publish_ring(const CommandLine& line, BenchRun run, const std::vector<RingRecord>& records) {
  run.load_after = load_average();
  std::cout << run_text(run) << ring_table(records) << std::flush;
  write_json(line, run, records);
}

/// One rank of a job, the launcher's or the user's.
int bench_ring_rank(const RunConfig& config, const CommandLine& line) {
  const BenchRun run = describe_run("ring", command_of(line));
  constexpr std::size_t kMaxMessageBytes = std::size_t{1} << 30;
  return with_world(kMaxMessageBytes, [&](World& world) {
    const std::vector<RingSamples> samples = measure_ring(config, world);
    if (world.comm.rank() != 0) return static_cast<int>(ExitCode::pass);
    if (line.has("job-dir")) {
      write_atomically(samples_path(line.value("job-dir")), samples_json(samples));
    } else {
      publish_ring(line, run, ring_records({samples}));
    }
    return static_cast<int>(ExitCode::pass);
  });
}

int bench_ring(const RunConfig& config, const CommandLine& line) {
  if (mpirun_world_size() > 0 || line.has("job-dir")) return bench_ring_rank(config, line);
  const BenchRun run = describe_run("ring", command_of(line));
  publish_ring(line, run, run_ring_jobs(config));
  return static_cast<int>(ExitCode::pass);
}

int bench_gpu(const RunConfig& config, const CommandLine& line) {
  BenchRun run = describe_run("gpu", command_of(line));
  constexpr std::size_t kMaxMessageBytes = std::size_t{1} << 30;
  return with_world(kMaxMessageBytes, [&](World& world) {
    std::vector<GpuRecord> records;
    std::vector<GpuCopyRecord> copies;
    const GpuSuite suite{.config = config,
                         .on_gpu =
                             [&](const std::string& description) {
                               run.gpu = description;
                               std::cout << run_text(run) << gpu_header() << std::flush;
                             },
                         .on_record =
                             [&](const GpuRecord& record) {
                               std::cout << gpu_row(record) << std::flush;
                               records.push_back(record);
                             },
                         .on_copy =
                             [&](const GpuCopyRecord& record) {
                               std::cout << (copies.empty() ? copy_header() : "")
                                         << copy_row(record) << std::flush;
                               copies.push_back(record);
                             }};
    try {
      run_gpu_suite(suite, world);
    } catch (const Unsupported& error) {
      throw Unsupported(std::string("suite gpu: not run: ") + error.what());
    }
    if (world.comm.rank() != 0) return static_cast<int>(ExitCode::pass);
    run.load_after = load_average();
    if (line.has("json")) {
      write_atomically(line.value("json"), bench_json(run, records, copies));
    }
    return static_cast<int>(ExitCode::pass);
  });
}

}  // namespace

Subcommand bench_subcommand() {
  return {"bench",
          "measures kernels against the machine's peak and a peer, and what more ranks cost",
          "cpattn bench --head-dims 128 --seq-lens 2048,4096 --json bench.json",
          kBenchKnobs,
          {{"json", "FILE", "writes the records as JSON"},
           {"job-dir", "DIR", "internal: where a rank that the launcher started delivers to"}},
          run_bench};
}

int run_bench(const RunConfig& config, const CommandLine& line) {
  if (line.has("json") && mpirun_rank() == 0) require_writable(line.value("json"));
  switch (config.suite) {
    case BenchSuite::kernels:
      return bench_kernels(config, line);
    case BenchSuite::ring:
      return bench_ring(config, line);
    case BenchSuite::gpu:
      return bench_gpu(config, line);
  }
  return static_cast<int>(ExitCode::internal);
}

}  // namespace cpattn
